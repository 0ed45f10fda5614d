"""The auxiliary loss with one rounding: RN32(S * C), S the exact sum over columns of column sum times count.

A column sum is kept as integers: limb l counts in units of 2**(32 l - 149), so nine limbs hold every finite fp32 to its
last bit, and a tenth counts what is not finite. Integers add up to the same in any order, so neither the split of rows
over blocks and ranks nor the algorithm of an all-reduce can change a bit. Fewer than 2**31 rows in all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bicomm.model_hooks.limbs import LIMB_BITS, LIMBS, SUMS, UNIT

ADDENDS_AT_ONCE = 1 << 20  # of the definition: bounds its memory


def _digits(x: Tensor, limb: int) -> Tensor:
    """int64: the part of finite fp32 x that lies in limb `limb`, with the sign of x."""
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    mantissa = torch.where(magnitude >= 0x800000, (magnitude & 0x7FFFFF) | 0x800000, magnitude).to(torch.int64)
    shift = (magnitude >> 23).clamp(min=1) - 1 - LIMB_BITS * limb  # of the mantissa's lowest bit, within this limb
    up = (mantissa << shift.clamp(0, 32).to(torch.int64)) & 0xFFFFFFFF
    down = mantissa >> (-shift).clamp(0, 63).to(torch.int64)
    part = torch.where(shift >= LIMB_BITS, 0, torch.where(shift >= 0, up, down))
    return torch.where(bits < 0, -part, part)


def _used_limbs(x: Tensor) -> range:
    """The limbs that finite fp32 x can touch."""
    magnitude = x.view(torch.int32) & 0x7FFFFFFF  # integers: set_flush_denormal makes x == 0 true for a subnormal
    exponent = magnitude >> 23
    low = int(torch.where(magnitude == 0, 255, exponent).min().clamp(1, 254))
    high = int(exponent.max().clamp(1, 254))
    return range((low - 1) // LIMB_BITS, (high - 1 + 23) // LIMB_BITS + 1)


def definition(probs: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """The exact column sums of probs [rows, cols] as int64 [10, cols], in plain torch."""
    rows, cols = probs.shape
    sums = torch.zeros(SUMS, cols, dtype=torch.int64, device=probs.device)
    if probs.numel() == 0:
        return sums
    at_once = max(1, ADDENDS_AT_ONCE // cols)
    for first in range(0, rows, at_once):
        x = probs[first : first + at_once].to(torch.float32)
        if padding_mask is not None:
            x = torch.where(padding_mask[first : first + at_once].unsqueeze(1), 0.0, x)
        finite = torch.isfinite(x)
        sums[LIMBS] += (~finite).sum(0)
        x = torch.where(finite, x, 0.0)
        for limb in _used_limbs(x):
            sums[limb] += _digits(x, limb).sum(0)
    return sums


def column_sums(probs: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """The exact column sums of fp32, fp16 or bf16 probs [rows, cols] as int64 [10, cols] (see above)."""
    if probs.is_cuda:
        from bicomm.model_hooks import exact_loss_kernel

        return exact_loss_kernel.column_sums(probs, padding_mask)
    return definition(probs, padding_mask)


def all_reduce(sums: Tensor, group: Any) -> Tensor:
    """Add the ranks' integers; `group` None means that one rank holds all rows."""
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums


def round_to_fp32(n: int, exponent: int) -> float:
    """RN32(n * 2**exponent) of an integer of any size, as a Python float; infinity beyond fp32."""
    if n == 0:
        return 0.0
    magnitude = abs(n)
    drop = max(magnitude.bit_length() - 24, UNIT - exponent)  # bits below the last place of the result
    if drop > 0:
        kept, rest, half = magnitude >> drop, magnitude & ((1 << drop) - 1), 1 << (drop - 1)
        magnitude, exponent = kept + (rest > half or (rest == half and kept & 1)), exponent + drop
    if magnitude.bit_length() + exponent > 128:
        value = float("inf")
    else:
        value = float(magnitude) * 2.0**exponent if exponent > -1000 else 0.0
    return -value if n < 0 else value


def finish_definition(sums: Tensor, counts: Tensor, c: float) -> float:
    """RN32(S * C) in Python integers, from sums int64 [10, cols], integer counts [cols], and an fp32 C."""
    if int(sums[LIMBS].sum()):
        return float("nan")
    total = 0
    for column, count in zip(sums[:LIMBS].t().tolist(), counts.tolist(), strict=True):
        total += count * sum(limb << (LIMB_BITS * i) for i, limb in enumerate(column))
    numerator, denominator = c.as_integer_ratio()
    return round_to_fp32(total * numerator, UNIT - (denominator.bit_length() - 1))


def finish(sums: Tensor, counts: Tensor, c: float | Tensor) -> Tensor:
    """The loss, 0-dim fp32: RN32(S * C). On a GPU without a synchronisation."""
    if sums.is_cuda:
        from bicomm.model_hooks import exact_loss_kernel

        return exact_loss_kernel.finish(sums, counts, c)
    value = finish_definition(sums, counts, float(c))
    return torch.tensor(value, dtype=torch.float32, device=sums.device)
