"""The backward kernels of the mirror, and their launcher: `definition.backward` without atomics.

A slot's row gets its token's gradient, so every output element has one writer; nothing depends on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.kernels.arithmetic import canonical_nan, from_bf16_bits
from bicomm.mirror.addends import (
    ALL,
    SLOT_BITS,
    TAGGED,
    at_once,
    interpreted,
    load_row,
    narrow,
    on_device,
    raw_bits,
    row_at,
    weight_at,
)


@triton.jit
def _mark_kernel(used, places, count, num_rows, BLOCK: tl.constexpr):
    """used[row] = 1 for every row that some slot names."""
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(places + here, mask=here < count, other=-1).to(tl.int64)
    tl.store(used + row, tl.full([BLOCK], 1, tl.uint8), mask=(row >= 0) & (row < num_rows))


@triton.jit
def _fill_unused(d_rows, used, part, num_rows, hidden, FILL: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros into those rows of [part * FILL, (part + 1) * FILL) that no slot names."""
    begin = part.to(tl.int64) * FILL
    rows = begin + tl.arange(0, FILL)
    if tl.min(tl.load(used + rows, mask=rows < num_rows, other=1).to(tl.int32), axis=0) == 0:
        for i in range(FILL):
            row = begin + i
            if tl.load(used + row, mask=row < num_rows, other=1) == 0:
                for start in range(0, hidden, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    zero = tl.zeros([BLOCK], d_rows.dtype.element_ty)
                    tl.store(d_rows + row * hidden + columns, zero, mask=columns < hidden)


@triton.jit
def _load_grad(grad, first, hidden, columns, limit, GRAD_BF16: tl.constexpr):
    raw = tl.load(grad + first * hidden + columns, mask=columns < limit, other=0)
    return from_bf16_bits(raw) if GRAD_BF16 else raw


@triton.jit
def _store_row(d_rows, row, num_rows, hidden, columns, g, ROWS_BF16: tl.constexpr, SOFT: tl.constexpr):
    exists = (row >= 0) & (row < num_rows)
    inside = columns < tl.where(exists, hidden, 0)
    there = d_rows + row.to(tl.int64) * hidden + columns
    if ROWS_BF16:
        tl.store(there, narrow(g, SOFT), mask=inside)
    else:
        tl.store(there, canonical_nan(g), mask=inside)


@triton.jit
def _scatter_kernel(
    d_rows, grad, places, tags, probs, used, tokens, num_rows, hidden,
    K: tl.constexpr, GROUPS: tl.constexpr, GRAD_BF16: tl.constexpr, ROWS_BF16: tl.constexpr, WEIGHTED: tl.constexpr,
    WEIGHT_BF16: tl.constexpr, SOFT: tl.constexpr, FILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every slot's row gets its token's gradient (times its weight); rows without a slot get 0."""
    blocks = tl.cdiv(hidden, BLOCK)
    if tl.program_id(0) >= tokens * blocks:
        _fill_unused(d_rows, used, tl.program_id(0) - tokens * blocks, num_rows, hidden, FILL, BLOCK)
    else:
        first = (tl.program_id(0) // blocks).to(tl.int64)
        columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        g = _load_grad(grad, first, hidden, columns, hidden, GRAD_BF16)
        for i in range(K):
            row = row_at(places, first, i, tokens, K, True)
            if WEIGHTED:
                weight = weight_at(probs, tags, first, i, row, K, GROUPS, WEIGHT_BF16)
                _store_row(d_rows, row, num_rows, hidden, columns, weight * g, ROWS_BF16, SOFT)
            else:
                _store_row(d_rows, row, num_rows, hidden, columns, g, ROWS_BF16, SOFT)


@triton.jit
def _sum_of_neighbours(x, N: tl.constexpr):
    """[N * FOLD] -> [N]: neighbours lie in one thread, so this needs no exchange."""
    return tl.sum(tl.reshape(x, [N, x.shape[0] // N]), axis=1)


@triton.jit
def _weighted_kernel(
    d_rows, d_probs, grad, rows, stride, places, tags, probs, used, tokens, num_rows, hidden,
    K: tl.constexpr, GROUPS: tl.constexpr, GRAD_BF16: tl.constexpr, ROWS_BF16: tl.constexpr,
    WEIGHT_BF16: tl.constexpr, NEED_ROWS: tl.constexpr, SOFT: tl.constexpr, FILL: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """As above, and every slot's weight gets the dot product of its row and the gradient; one program a token.

    AT_ONCE slots (a divisor of K) are taken together: each block of the gradient is read and widened once for them, and
    each slot's sum is a register or two until the end of the row.
    """
    if tl.program_id(0) >= tokens:
        _fill_unused(d_rows, used, tl.program_id(0) - tokens, num_rows, hidden, FILL, BLOCK)
    else:
        first = tl.program_id(0).to(tl.int64)
        LANES: tl.constexpr = max(1, BLOCK // 8)
        for base in range(0, K, AT_ONCE):
            held = ()
            dots = ()
            for j in tl.static_range(AT_ONCE):
                row = row_at(places, first, base + j, tokens, K, True)
                weight = weight_at(probs, tags, first, base + j, row, K, GROUPS, WEIGHT_BF16)
                held = held + ((row, weight),)  # noqa: RUF005 (Triton knows no stars)
                dots = dots + (tl.zeros([LANES], tl.float64),)  # noqa: RUF005
            for start in range(0, hidden, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                g = _load_grad(grad, first, hidden, columns, hidden, GRAD_BF16)
                raws = ()
                for j in tl.static_range(AT_ONCE):
                    raws = raws + (load_row(rows, held[j][0], stride, num_rows, columns, hidden),)  # noqa: RUF005
                sums = ()
                for j in tl.static_range(AT_ONCE):
                    row, weight = held[j]
                    x = from_bf16_bits(raws[j]) if ROWS_BF16 else raws[j]
                    part = _sum_of_neighbours(x.to(tl.float64) * g.to(tl.float64), LANES)
                    sums = sums + (dots[j] + part,)  # noqa: RUF005
                    if NEED_ROWS:
                        _store_row(d_rows, row, num_rows, hidden, columns, weight * g, ROWS_BF16, SOFT)
                dots = sums
            for j in tl.static_range(AT_ONCE):
                slot = base + j
                if GROUPS == TAGGED:
                    slot = tl.load(tags + first * K + base + j) & SLOT_BITS
                total = tl.where(held[j][0] >= 0, tl.sum(dots[j], axis=0), 0.0)  # 0 also for a gradient that is NaN
                tl.store(d_probs + first * K + slot, canonical_nan(total.to(tl.float32)))


def scatter_tile(hidden: int) -> tuple[int, int]:
    """Columns and warps of a program that writes a block of a token's gradient to the rows of its slots."""
    return min(1024, triton.next_power_of_2(hidden)), 4


def weighted_tile(hidden: int) -> tuple[int, int]:
    """Columns of a turn and warps of a program that also takes dot products, over the whole row.

    As an H200 chose (bench/mirror.py --tune, bench/mirror_notes.md): 176 us at 8192 x 2048 and 555 at 8192 x 7168,
    where 1,024 columns and 4 warps took 192 and 562. The columns are part of the weights' gradient: they order its sum.
    """
    return min(512, triton.next_power_of_2(hidden)), 2


def backward(
    grad: Tensor, places: Tensor, tags: Tensor | None, rows: Tensor | None, probs: Tensor | None, weight_bf16: bool,
    num_rows: int, dtype: torch.dtype, need_rows: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`definition.backward` as one kernel, after a small one that marks which rows have a slot."""
    tokens, slots = places.shape
    hidden = grad.shape[1]
    grad, places = grad.contiguous(), places.contiguous()
    d_rows = torch.empty(num_rows if need_rows else 0, hidden, dtype=dtype, device=grad.device)
    d_probs = torch.empty(places.shape if rows is not None else (0, 0), dtype=torch.float32, device=grad.device)
    if hidden == 0:
        return d_rows, d_probs.zero_()
    fill = 32
    used = torch.zeros(d_rows.shape[0], dtype=torch.uint8, device=grad.device)
    fillers = triton.cdiv(d_rows.shape[0], fill)
    groups = ALL if tags is None else TAGGED
    common = {
        "K": slots, "GROUPS": groups, "GRAD_BF16": grad.dtype == torch.bfloat16, "ROWS_BF16": dtype == torch.bfloat16,
        "WEIGHT_BF16": weight_bf16, "SOFT": interpreted(), "FILL": fill, "enable_fp_fusion": False,
    }  # fmt: skip
    with on_device(grad):
        if used.numel() and places.numel():
            _mark_kernel[(triton.cdiv(places.numel(), 1024),)](
                used, places, places.numel(), num_rows, BLOCK=1024, enable_fp_fusion=False
            )
        if rows is not None:
            if rows.stride(1) != 1:
                rows = rows.contiguous()
            if tokens + fillers:
                block, warps = weighted_tile(hidden)
                _weighted_kernel[(tokens + fillers,)](
                    raw_bits(d_rows), d_probs, raw_bits(grad), raw_bits(rows), rows.stride(0), places, tags, probs,
                    used, tokens, num_rows, hidden, NEED_ROWS=need_rows, AT_ONCE=at_once(slots), BLOCK=block,
                    num_warps=warps, **common,
                )  # fmt: skip
            return d_rows, d_probs
        block, warps = scatter_tile(hidden)
        if tokens * triton.cdiv(hidden, block) + fillers:
            _scatter_kernel[(tokens * triton.cdiv(hidden, block) + fillers,)](
                raw_bits(d_rows), raw_bits(grad), places, tags, probs, used, tokens, num_rows, hidden,
                WEIGHTED=probs is not None, BLOCK=block, num_warps=warps, **common,
            )  # fmt: skip
    return d_rows, d_probs
