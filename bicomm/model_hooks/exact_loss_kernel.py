"""Exact column sums and their one rounding as Triton kernels: the integers of `exact_loss.py`, and the same bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.model_hooks import limbs
from bicomm.model_hooks import pinned_triton as pin
from bicomm.model_hooks.launching import on_its_device

LIMBS = tl.constexpr(limbs.LIMBS)
LIMB_BITS = tl.constexpr(limbs.LIMB_BITS)
DIGITS = tl.constexpr(32)  # base 2**16: S has at most 2**(277 + 31 + 63 + log2 cols), C another 24 bits


@triton.jit
def _load(probs, padding, r, c, last, rows_stride, cols, PADDING: tl.constexpr):
    mask = (r < last) & (c < cols)
    if PADDING:
        mask = mask & (tl.load(padding + r, mask=r < last, other=1) == 0)
    return pin.widen(tl.load(probs + r * rows_stride + c, mask=mask, other=0.0)).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["rows", "rows_per_block"])
def exact_column_sums(
    probs, padding, sums, rows: tl.int64, cols: tl.int64, row_stride: tl.int64, rows_per_block: tl.int64,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Adds a block of rows into sums int64 [10, cols], limb by limb; the rows come from cache after the first limb."""
    first = tl.program_id(0).to(tl.int64) * rows_per_block
    last = tl.minimum(first + rows_per_block, rows)
    lane = first + tl.arange(0, TILE_ROWS)[:, None].to(tl.int64)
    c = tl.program_id(1) * TILE_COLS + tl.arange(0, TILE_COLS)[None, :]
    out = tl.reshape(c, (TILE_COLS,)).to(tl.int64)
    low = tl.full([TILE_ROWS, TILE_COLS], 254, tl.int32)
    high = tl.full([TILE_ROWS, TILE_COLS], 1, tl.int32)
    wild = tl.zeros([TILE_ROWS, TILE_COLS], tl.int32)
    for base in range(0, rows_per_block, TILE_ROWS):
        m = _load(probs, padding, lane + base, c, last, row_stride, cols, PADDING) & 0x7FFFFFFF
        finite = m < 0x7F800000
        exponent = tl.maximum(m >> 23, 1)
        low = tl.where((m > 0) & finite, tl.minimum(low, exponent), low)
        high = tl.where(finite, tl.maximum(high, exponent), high)
        wild += tl.where(finite, 0, 1)
    wild_columns = tl.sum(wild, axis=0).to(tl.int64)
    tl.atomic_add(sums + LIMBS * tl.cast(cols, tl.int64) + out, wild_columns, mask=(out < cols) & (wild_columns > 0))
    limb_low = (tl.min(tl.min(low, axis=1), axis=0) - 1) // LIMB_BITS
    limb_high = (tl.max(tl.max(high, axis=1), axis=0) - 1 + 23) // LIMB_BITS
    for limb in range(limb_low, limb_high + 1):
        acc = tl.zeros([TILE_ROWS, TILE_COLS], tl.int64)
        for base in range(0, rows_per_block, TILE_ROWS):
            bits = _load(probs, padding, lane + base, c, last, row_stride, cols, PADDING)
            m = bits & 0x7FFFFFFF
            m = tl.where(m < 0x7F800000, m, 0)
            mantissa = tl.where(m >= 0x800000, (m & 0x7FFFFF) | 0x800000, m).to(tl.int64)
            shift = tl.maximum(m >> 23, 1) - 1 - LIMB_BITS * limb
            up = (mantissa << tl.minimum(tl.maximum(shift, 0), 32).to(tl.int64)) & 0xFFFFFFFF
            down = mantissa >> tl.minimum(tl.maximum(-shift, 0), 63).to(tl.int64)
            part = tl.where(shift >= LIMB_BITS, 0, tl.where(shift >= 0, up, down))
            acc += tl.where(bits < 0, -part, part)
        column = tl.sum(acc, axis=0)
        tl.atomic_add(sums + limb * tl.cast(cols, tl.int64) + out, column, mask=(out < cols) & (column != 0))


@triton.jit
def _carried(d, i):
    """Digits in 0..65535, the carry moved up (the top digit keeps the sign): i is 0..31, d int64 [32]."""
    up = i[:, None] == i[None, :] + 1
    for _ in range(DIGITS):
        carry = tl.where(i < DIGITS - 1, d >> 16, 0)
        d = d - (carry << 16) + tl.sum(tl.where(up, carry[None, :], 0), axis=1)
    return d


@triton.jit(do_not_specialize=["cols"])
def exact_finish(sums, counts, loss, c_host, c_device, cols: tl.int64, TILE: tl.constexpr, DEVICE_C: tl.constexpr):
    i = tl.arange(0, DIGITS)
    d = tl.zeros([DIGITS], tl.int64)
    wild = tl.zeros([TILE], tl.int64)
    for base in range(0, cols, TILE):
        lane = base + tl.arange(0, TILE)
        inside = lane < cols
        n = tl.load(counts + lane, mask=inside, other=0).to(tl.int64)
        wild += tl.load(sums + LIMBS * tl.cast(cols, tl.int64) + lane, mask=inside, other=0)
        for limb in range(LIMBS):
            v = tl.load(sums + limb * tl.cast(cols, tl.int64) + lane, mask=inside, other=0)
            for p in tl.static_range(4):
                piece = v >> (16 * p)
                if p < 3:
                    piece = piece & 0xFFFF
                for q in tl.static_range(4):
                    part = n >> (16 * q)
                    if q < 3:
                        part = part & 0xFFFF
                    d += tl.where(i == 2 * limb + p + q, tl.sum(piece * part, axis=0), 0)
    d = _carried(d, i)
    negative = tl.sum(tl.where(i == DIGITS - 1, d, 0), axis=0) < 0
    d = _carried(tl.where(negative, -d, d), i)

    if DEVICE_C:
        c = tl.load(c_device)
    else:
        c = tl.sum(tl.zeros([1], tl.float32), axis=0) + c_host
    c_bits = c.to(tl.int32, bitcast=True)
    c_field = (c_bits >> 23) & 0xFF
    c_mantissa = tl.where(c_field > 0, (c_bits & 0x7FFFFF) | 0x800000, c_bits & 0x7FFFFF).to(tl.int64)
    negative = negative != (c_bits < 0)
    d = _carried(d * c_mantissa, i)
    top = tl.max(tl.where(d != 0, i, 0), axis=0)
    # 48 leading bits, at least 33 of them significant, and one that says whether anything lies below: rounding to odd,
    # so that the single cast to fp32 rounds as if it saw all digits
    w = tl.sum(
        tl.where(i == top, d << 32, 0) + tl.where(i == top - 1, d << 16, 0) + tl.where(i == top - 2, d, 0), axis=0
    )
    below = tl.max(tl.where((i < top - 2) & (d != 0), 1, 0), axis=0)
    exponent = 16 * (top - 2) - 149 + tl.maximum(c_field, 1) - 150 - 1
    unit = ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    value = ((w * 2 + below).to(tl.float64) * unit).to(tl.float32)
    value = tl.where(negative & (value != 0.0), -value, value)
    value = tl.where(tl.sum(wild, axis=0) > 0, float("nan"), value)
    tl.store(loss, value)


@on_its_device
def column_sums(probs: Tensor, padding_mask: Tensor | None) -> Tensor:
    """`exact_loss.definition` as one kernel; integer atomics, whose order is no matter."""
    x = probs if probs.stride(1) == 1 or probs.shape[1] == 1 else probs.contiguous()
    rows, cols = x.shape
    sums = torch.zeros(limbs.SUMS, cols, dtype=torch.int64, device=x.device)
    if rows == 0 or cols == 0:
        return sums
    tile_cols = min(triton.next_power_of_2(cols), 128)
    tile_rows = 1024 // tile_cols if tile_cols < 128 else 8
    per_block = max(tile_rows, min(256, triton.next_power_of_2(triton.cdiv(rows, 256))))
    exact_column_sums[(triton.cdiv(rows, per_block), triton.cdiv(cols, tile_cols))](
        x, x if padding_mask is None else padding_mask.contiguous().view(torch.uint8), sums, rows, cols, x.stride(0),
        per_block, TILE_ROWS=tile_rows, TILE_COLS=tile_cols, PADDING=padding_mask is not None, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return sums


@on_its_device
def finish(sums: Tensor, counts: Tensor, c: float | Tensor) -> Tensor:
    """`exact_loss.finish_definition` as one kernel: 0-dim fp32, no synchronisation."""
    loss = torch.empty((), dtype=torch.float32, device=sums.device)
    cols = sums.shape[1]
    exact_finish[(1,)](
        sums, counts.contiguous(), loss, 0.0 if isinstance(c, Tensor) else c, c if isinstance(c, Tensor) else loss,
        cols,
        TILE=min(triton.next_power_of_2(max(cols, 1)), 512), DEVICE_C=isinstance(c, Tensor), num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return loss
