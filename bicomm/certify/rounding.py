"""Sums that no contract allows, but that hardware may compute: rounded toward zero, in a tree, subnormals flushed."""

from __future__ import annotations

import torch
from torch import Tensor

from bicomm.contract import exact, ordered

SMALLEST_NORMAL = 2.0**-126


def exact_toward_zero(addends: Tensor) -> Tensor:
    """The exact sum of fp32 [W, N], truncated to fp32: never away from zero, overflow stops at the largest number."""
    nearest = exact(addends)
    finite = torch.isfinite(addends).all(0)
    largest = torch.finfo(torch.float32).max
    inside = torch.where(finite, nearest.clamp(-largest, largest), nearest)
    remainder = exact(torch.cat([addends, -inside[None]]))  # rounded, but with the right sign
    away = finite & (remainder != 0) & ((remainder > 0) != (inside > 0))
    bits = inside.view(torch.int32)
    return torch.where(away, bits - 1, bits).view(torch.float32)


def chain_toward_zero(addends: Tensor) -> Tensor:
    """acc = +0; for r = 0..W-1: acc = acc + addend_r truncated to fp32."""
    acc = torch.zeros_like(addends[0])
    for x in addends.unbind(0):
        acc = exact_toward_zero(torch.stack([acc, x]))
    return acc


def pairwise_tree(addends: Tensor) -> Tensor:
    """fp32 sums of neighbours, then of neighbouring sums, to the root; an odd one moves up as it is."""
    rows = list(addends.unbind(0))
    while len(rows) > 1:
        pairs = [ordered(rows[i : i + 2]) for i in range(0, len(rows) - 1, 2)]
        rows = pairs + rows[len(rows) & ~1 :]
    return rows[0]


def chain_from(addends: Tensor, start: int, step: int) -> Tensor:
    """The fp32 chain over ranks start, start + step, ... (modulo W), from +0."""
    world = addends.shape[0]
    return ordered([addends[(start + step * i) % world] for i in range(world)])


def flush(x: Tensor) -> Tensor:
    """Subnormal numbers read as zeros (of their sign)."""
    return torch.where(x.abs() < SMALLEST_NORMAL, x * 0.0, x)
