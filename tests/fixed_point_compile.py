"""Assembles the integer reductions of a multicast address for sm_90, sm_100 and sm_103, without a GPU.

A script of its own, because a process either interprets kernels or compiles them. One line of JSON for each.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "0"

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add_u64(address, out):
    lane = tl.arange(0, 128)
    value = tl.inline_asm_elementwise(
        "multimem.ld_reduce.relaxed.sys.global.add.u64 $0, [$1];", "=l,l",
        [address + lane.to(tl.int64) * 8], dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out + lane, value)


@triton.jit
def max_u32(address, out):
    lane = tl.arange(0, 128)
    value = tl.inline_asm_elementwise(
        "multimem.ld_reduce.relaxed.sys.global.max.u32 $0, [$1];", "=r,l",
        [address + lane.to(tl.int64) * 4], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out + lane, value.to(tl.int64))


@triton.jit
def add_two_u64(address, out):
    lane = tl.arange(0, 128)
    a, b = tl.inline_asm_elementwise(
        "multimem.ld_reduce.relaxed.sys.global.add.v2.u64 {$0, $1}, [$2];", "=l,=l,l",
        [address + lane.to(tl.int64) * 16], dtype=(tl.int64, tl.int64), is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out + lane, a + b)


def main() -> None:
    for kernel in (add_u64, max_u32, add_two_u64):
        for target in (90, 100, 103):
            source = ASTSource(kernel, signature={"address": "i64", "out": "*i64"})
            try:
                triton.compile(source, target=GPUTarget("cuda", target, 32))
                refused = ""
            except Exception as error:
                refused = type(error).__name__
            print(json.dumps({"kernel": kernel.__name__, "target": target, "refused": refused}))


if __name__ == "__main__":
    main()
