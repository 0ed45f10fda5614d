"""Compiles the mirror's kernels without a GPU, for the test that reads their PTX and registers."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bicomm.contract import Contract
from bicomm.mirror import addends, backward, forward

FORWARD = {  # contract: weighted
    "megatron-vllm-swiglu": False,
    "megatron-deepgemm": False,
    "megatron-vllm-squared-relu-fma": True,
    "transformers-bf16": True,
    "fp64/1+megatron-vllm-swiglu": False,
    "owner": False,
    "owner/1+slot-exact-combine-bf16-fp32": True,
    "exact/1+megatron-vllm-swiglu": False,
    "exact/1+slot-exact-activation": False,
    "window(16,95,86)/1+megatron-vllm-swiglu": False,
}

BLACKWELL = ("transformers-bf16", "exact/1+slot-exact-activation")  # these two hold every construct


def _compile(
    kernel: Any, types: dict[str, str | None], constants: dict[str, Any], capability: int, options: dict[str, Any]
) -> Any:
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants or types[name] is None:
            signature[name] = "constexpr"
            values[(i,)] = getattr(constants.get(name), "value", constants.get(name))
            continue
        signature[name] = types[name]
        if str(types[name]).startswith("*") or name in ("hidden", "stride"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _registers(compiled: Any) -> tuple[int, int]:
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def compile_forward(name: str, weighted: bool, capability: int, slots: int = 8, rows_bf16: bool = True) -> Any:
    """The forward kernel as `kernels.unpermute` would launch it for this contract at H divisible by 16."""
    contract = Contract.parse(name)
    groups = addends.EACH if contract.rule == "owner" else addends.TAGGED
    kernel, constants, options = forward.forward_constants(
        contract, weighted, rows_bf16, False, slots, 2048, groups, True, False
    )
    types = {
        "out": "*fp32", "rows": "*i16" if rows_bf16 else "*fp32", "stride": "i32", "num_rows": "i32", "places": "*i32",
        "tags": "*i32" if groups is addends.TAGGED else None, "probs": "*fp32" if weighted else None, "tokens": "i32",
        "hidden": "i32",
    }  # fmt: skip
    return _compile(kernel, types, constants, capability, options)


def _backward(weighted: bool, capability: int) -> Any:
    plain = {"enable_fp_fusion": False}
    constants: dict[str, Any] = {
        "K": 8, "GROUPS": addends.TAGGED, "GRAD_BF16": False, "ROWS_BF16": True, "WEIGHT_BF16": False, "SOFT": False,
        "FILL": 32,
    }  # fmt: skip
    types: dict[str, str | None] = {
        "d_rows": "*i16", "d_probs": "*fp32", "grad": "*fp32", "rows": "*i16", "stride": "i32", "places": "*i32",
        "tags": "*i32", "probs": "*fp32" if weighted else None, "used": "*u8", "tokens": "i32", "num_rows": "i32",
        "hidden": "i32",
    }  # fmt: skip
    if weighted:
        constants |= {"NEED_ROWS": True, "AT_ONCE": 8, "BLOCK": 512}
        return _compile(backward._weighted_kernel, types, constants, capability, {"num_warps": 2, **plain})
    constants |= {"WEIGHTED": False, "BLOCK": 1024}
    return _compile(backward._scatter_kernel, types, constants, capability, {"num_warps": 4, **plain})


def compile_kernels() -> Iterator[tuple[str, int, str, int, int]]:
    """(name, capability, PTX, registers, bytes of stack) of every kernel that a step launches."""
    for capability in (90, 100):
        for name, weighted in FORWARD.items():
            if capability == 100 and name not in BLACKWELL:
                continue
            compiled = compile_forward(name, weighted, capability)
            yield (name, capability, compiled.asm["ptx"], *_registers(compiled))
        for weighted in (False, True):
            compiled = _backward(weighted, capability)
            yield (f"backward weighted={weighted}", capability, compiled.asm["ptx"], *_registers(compiled))
