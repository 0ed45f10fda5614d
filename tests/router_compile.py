"""Compiles every kernel of router and auxiliary loss for sm_90 and sm_100, without a GPU, and prints what was built.

A script of its own, because a process either interprets kernels or compiles them. One line of JSON a kernel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bicomm.model_hooks import (
    all_scores_kernel,
    aux_loss_kernel,
    counts_kernel,
    exact_loss_kernel,
    gate_kernel,
    router_kernel,
    z_loss_kernel,
)

INTEGERS = (
    "T", "row_stride", "grad_stride", "slots", "num_experts", "rows", "cols", "rows_per_block", "blocks", "M", "N", "K",
)  # fmt: skip
STRIDES = ("a_row", "a_col", "b_row", "b_col")  # of the gate: the only integers whose value may become a constant
F32 = dict.fromkeys(("scale", "c_host", "start"), "fp32")
COMMON = {
    **F32, "padding": "*u8", "routing_map": "*u8", "ids": "*i64", "fixed_ids": "*i64", "counts": "*i64",
    "total": "*i64", "sums": "*i64", "ticket": "*i32",
}  # fmt: skip
ROUTE: dict[str, Any] = {
    "E": 256, "K": 8, "KP": 8, "G": 1, "G_PAD": 1, "S_PAD": 256, "GROUP_TOPK": 1, "GROUP_SCORE_TOPK": 1, "FUNCTION": 0,
    "RENORMALIZE": True, "SCALE": False, "BIAS": False, "PADDING": False, "REPLAY": False, "INDEX": True,
    "DENSE": False, "MAP": False, "R": 2,
}  # fmt: skip
GROUPS = {
    "G": 8, "G_PAD": 8, "S_PAD": 32, "GROUP_TOPK": 4, "GROUP_SCORE_TOPK": 2, "FUNCTION": 1, "BIAS": True, "DENSE": True,
    "MAP": True, "SCALE": True, "PADDING": True,
}  # fmt: skip
BACK: dict[str, Any] = {
    "E": 256, "K": 8, "KP": 8, "P": 256, "FUNCTION": 0, "RENORMALIZE": True, "SCALE": False, "PADDING": False,
    "DENSE": False, "R": 1,
}  # fmt: skip
AUX = {"TILE_ROWS": 16, "TILE_COLS": 128, "WIDE": True, "PADDING": False}
PRODUCT = {"a": "*bf16", "b": "*bf16", "a_row": "i32", "b_col": "i32"}
# kernel, constants, pointers that are not fp32, warps
KERNELS: list[tuple[Any, dict[str, Any], dict[str, str], int]] = [
    (router_kernel.route_forward, ROUTE, {}, 1),
    (router_kernel.route_forward, {**ROUTE, **GROUPS}, {"logits": "*bf16", "dense": "*bf16"}, 1),
    (router_kernel.route_forward, {**ROUTE, "E": 1024, "S_PAD": 1024, "FUNCTION": 2, "R": 1}, {}, 4),
    (router_kernel.route_forward, {**ROUTE, "FUNCTION": 3, "REPLAY": True, "RENORMALIZE": False}, {}, 1),
    (router_kernel.route_backward, BACK, {"logits": "*bf16", "grad_logits": "*bf16"}, 1),
    (router_kernel.route_backward, {**BACK, "FUNCTION": 3, "DENSE": True}, {}, 1),
    (all_scores_kernel.all_scores_forward, {"E": 96, "P": 128, "FUNCTION": 2, "R": 1}, {"logits": "*fp16"}, 1),
    (all_scores_kernel.all_scores_backward, {"E": 96, "P": 128, "FUNCTION": 0, "R": 1}, {"grad_logits": "*bf16"}, 1),
    (counts_kernel.count_slots, {"K": 8, "PADDING": True, "BLOCK": 1024}, {}, 4),
    (z_loss_kernel.lse_forward, {"E": 96, "P": 128, "R": 1}, {}, 1),
    (z_loss_kernel.lse_backward, {"E": 96, "P": 128, "R": 1}, {"grad_logits": "*bf16"}, 1),
    (aux_loss_kernel.aux_loss_partials, {**AUX, "DEVICE_TOTAL": False, "UNROLL": 4, "FINISH": True, "WARPS": 8}, {}, 8),
    (aux_loss_kernel.aux_loss_partials, {**AUX, "DEVICE_TOTAL": True, "UNROLL": 1, "FINISH": False, "WARPS": 4}, {}, 4),
    (aux_loss_kernel.aux_loss_finish, {"DEVICE_TOTAL": True}, {}, 1),
    (aux_loss_kernel.aux_loss_backward, AUX, {"grad_probs": "*bf16"}, 4),
    (exact_loss_kernel.exact_column_sums, {"TILE_ROWS": 8, "TILE_COLS": 128, "PADDING": True}, {"probs": "*bf16"}, 4),
    (exact_loss_kernel.exact_finish, {"TILE": 512, "DEVICE_C": True}, {}, 4),
    (
        gate_kernel.serial_product,
        {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64, "EVEN_K": True, "a_col": 1, "b_row": 1},
        PRODUCT,
        4,
    ),
]


def usage(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory as the assembler counted them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


def integers(kernel: Any) -> dict[str, str]:
    """Runtime integers of a kernel, by their annotations: what the launcher makes of them, also where they are 1."""
    return {p.name: p.annotation_type for p in kernel.params if p.annotation_type in ("i32", "i64")}


def build(
    kernel: Any, constants: dict[str, Any], pointers: dict[str, str], warps: int, arch: int, kind: str
) -> dict[str, Any]:
    names = kernel.arg_names
    kinds = {
        n: "constexpr" if n in constants else integers(kernel).get(n, pointers.get(n, COMMON.get(n, "*fp32")))
        for n in names
    }
    source = ASTSource(kernel, kinds, {(names.index(n),): v for n, v in constants.items()})
    options = {"num_warps": warps, "enable_fp_fusion": False, "num_stages": 3}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = built.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "kind": kind,
        "launcher's ones": launched_ones(kernel),
        "fma": len(re.findall(r"\bfma\.rn\.f", ptx)),
        "float atomics": len(re.findall(r"\b(?:atom|red)\.\S*add\S*\.f\d", ptx)),
        "approximate": len(re.findall(r"\.approx|\.ftz|div\.full", ptx)),
        **usage(built.asm["cubin"]),
    }


def launched_ones(kernel: Any) -> list[str]:
    """Integers that a launch with 1 turns into constants, which have no `.to`: only the gate's strides may."""
    plain = [p for p in kernel.params if not p.is_constexpr]
    scalars = {p.name for p in plain if p.name in (*INTEGERS, *STRIDES)}
    return sorted(scalars - set(integers(kernel)))


def main() -> None:
    seen = set()
    for kernel, constants, pointers, warps in KERNELS:
        for arch in (90, 100):
            print(json.dumps(build(kernel, constants, pointers, warps, arch, "usual")))
        if kernel.__name__ not in seen:
            # every integer 1, and a constant: the hardest that a launcher of any version could make of it
            seen.add(kernel.__name__)
            ones = dict.fromkeys((n for n in kernel.arg_names if n in (*integers(kernel), *STRIDES)), 1)
            print(json.dumps(build(kernel, {**constants, **ones}, pointers, warps, 90, "ones")))


if __name__ == "__main__":
    main()
