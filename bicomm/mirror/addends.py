"""What the mirror's kernels share: the codes of a contract's parts, and how a slot becomes an addend."""

# ruff: noqa: SIM109 (Triton compares constants one by one)

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.kernels.arithmetic import add_round_to_odd, bf16_bits, from_bf16_bits, round_through_bf16

LAST_BIT, FIRST_BIT, MANY_BIT = (tl.constexpr(30 - i) for i in range(3))  # as definition.LAST, FIRST, MANY and SLOT
SLOT_BITS = tl.constexpr((1 << 28) - 1)

# The codes of a contract's parts in the kernels.
ACC_EXACT, ACC_FP64, ACC_FP32, ACC_BF16 = (tl.constexpr(i) for i in range(4))
ORDERED, FP64, EXACT, WINDOW = (tl.constexpr(i) for i in range(4))
PLAIN, PRODUCT_FP32, PRODUCT_BF16, FMA = (tl.constexpr(i) for i in range(4))
EACH, ALL, TAGGED = (tl.constexpr(i) for i in range(3))  # groups: every slot one, one of all slots, or by the tags


@triton.jit
def row_at(places, first, i, tokens, K: tl.constexpr, HAS_MAP: tl.constexpr):
    """The row at place i < K of token `first`; without a map, rank i's partial of the token. int32 where that will do.

    Of a map in int64 only what does not fit becomes another row, and that does not exist either.
    """
    if HAS_MAP:
        row = tl.load(places + first * K + i)
        if row.dtype == tl.int64:
            row = tl.minimum(tl.maximum(row, -1), 0x7FFFFFFF).to(tl.int32)
    else:
        row = tl.cast(i, tl.int64) * tokens + first
    return row


@triton.jit
def load_row(rows, row, stride, num_rows, columns, hidden):
    """Raw data of a row; 0 where the slot is not routed, or the row does not exist."""
    exists = (row >= 0) & (row < num_rows)
    limit = tl.where(exists, hidden, 0)  # a scalar: the interpreter cannot join a scalar condition to a mask
    return tl.load(rows + row.to(tl.int64) * stride + columns, mask=columns < limit, other=0)


@triton.jit
def weight_at(probs, tags, first, i, row, K: tl.constexpr, GROUPS: tl.constexpr, WEIGHT_BF16: tl.constexpr):
    """The weight of place i in fp32, rounded as the contract says; 0 where the slot is not routed."""
    slot = i
    if GROUPS == TAGGED:
        slot = tl.load(tags + first * K + i) & SLOT_BITS
    weight = tl.load(probs + first * K + slot, mask=row >= 0, other=0.0)
    if WEIGHT_BF16:
        weight = round_through_bf16(weight)
    return weight


@triton.jit
def through_bf16(x, SOFT: tl.constexpr):
    """fp32 rounded to nearest even into bf16, widened again: by one instruction, or its twin for the interpreter.

    A NaN stays one; which, nobody may see. Two columns share the conversion, which takes a pair at the same cost.
    """
    if SOFT:
        x = round_through_bf16(x)
    else:
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }",
            "=&r,=r,r,r", [x.to(tl.int32, bitcast=True)], dtype=tl.int32, is_pure=True, pack=2,
        ).to(tl.float32, bitcast=True)  # fmt: skip
    return x


@triton.jit
def narrow(x, SOFT: tl.constexpr):
    """As `arithmetic.bf16_bits`, by one instruction a pair of values and one for NaN, or its twin."""
    if SOFT:
        bits = bf16_bits(x)
    else:
        bits = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
        bits = tl.where(x != x, tl.full([], 0x7FC0, tl.int16), bits)
    return bits


@triton.jit
def addend(raw, weight, ROWS_BF16: tl.constexpr, PRODUCT: tl.constexpr, SOFT: tl.constexpr):
    """The fp32 addend of raw row data: the row, or its rounded product with the weight (not with FMA)."""
    x = from_bf16_bits(raw) if ROWS_BF16 else raw
    if PRODUCT == PRODUCT_FP32 or PRODUCT == PRODUCT_BF16:
        x = weight * x
    if PRODUCT == PRODUCT_BF16:
        x = through_bf16(x, SOFT)
    return x


@triton.jit
def fma_once(w, x, acc, SOFT: tl.constexpr):
    """RN32(w * x + acc) in one rounding: the instruction, or its twin for the interpreter (see partial.py)."""
    if SOFT:
        product = (w.to(tl.float64) * x.to(tl.float64)) + tl.zeros_like(x).to(tl.float64)
        plain = product + acc.to(tl.float64)
        odd = add_round_to_odd(product, acc.to(tl.float64))
        result = tl.where(tl.abs(plain) < float("inf"), odd, plain).to(tl.float32)
    else:
        result = tl.fma(tl.zeros_like(x) + w, x, acc)
    return result


@triton.jit
def accumulate(acc, x, weight, ACC: tl.constexpr, PRODUCT: tl.constexpr, SOFT: tl.constexpr):
    """One step of the chain within a rank; acc is fp64 for the accumulators exact and fp64, else fp32."""
    if PRODUCT == FMA:
        acc = fma_once(weight, x, acc, SOFT)
    elif ACC == ACC_EXACT or ACC == ACC_FP64:
        acc = acc + x.to(tl.float64)
    elif ACC == ACC_BF16:
        acc = through_bf16(acc + x, SOFT)
    else:
        acc = acc + x
    return acc


def at_once(slots: int) -> int:
    """How many slots a kernel takes together: the largest divisor of their number up to 8, so that none is left."""
    return max(n for n in range(1, 9) if slots % n == 0) if slots else 1


def interpreted() -> bool:
    return not isinstance(row_at, triton.JITFunction)


def raw_bits(x: Tensor) -> Tensor:
    """bf16 as its bits; fp32 as it is."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def on_device(tensor: Tensor) -> Any:
    """Launches go to the tensor's own GPU, whatever the current one is."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
