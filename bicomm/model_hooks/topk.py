"""Which experts: a total order, so that the choice never depends on luck.

Order of candidates: value descending, then expert id ascending. -0 equals +0. -inf is a value like any other, the
lowest number. NaN comes after -inf. So k distinct ids always come out, for 256 equal scores, for a row of -inf and for
a row of NaN (ids 0..k-1), and the result is in that order. This is the definition and the CPU path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bicomm.model_hooks.scores import Rule

_NOT_A_CANDIDATE = -(1 << 63)


def order_key(value: Tensor) -> Tensor:
    """An int32 that orders fp32 values: NaN below -inf, -0 equal to +0. INT32_MIN is left free."""
    bits = torch.where(value == 0, 0.0, value).view(torch.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return torch.where(torch.isnan(value), -2147483647, key)


def _ranked(value: Tensor) -> Tensor:
    """int64 keys [..., n], all different: order_key in the high half, ascending position as the tie-break below."""
    position = torch.arange(value.shape[-1], device=value.device, dtype=torch.int64)
    return (order_key(value).to(torch.int64) << 32) | (0x7FFFFFFF - position)


def _position(key: Tensor) -> Tensor:
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


def top(value: Tensor, k: int) -> Tensor:
    """Positions int64 [..., k] of the k first candidates of fp32 value [..., n] in the order above."""
    return _position(_ranked(value).topk(k, dim=-1).values)


def select(value: Tensor, rule: Rule) -> Tensor:
    """Expert ids int64 [T, k] for selection values fp32 [T, E]: scores (or logits), plus the bias where there is one.

    With groups (num_groups G > 1): the E experts form G equal groups of neighbours; a group's score is the sum, from
    the largest down, of its `group_score_topk` first values; the `group_topk` first groups stay, and the experts of
    the others are no candidates.
    """
    key = _ranked(value)
    if rule.num_groups > 1:
        members = value.view(value.shape[0], rule.num_groups, -1)
        best = members.gather(-1, top(members, rule.group_score_topk))
        total = best[..., 0]
        for i in range(1, rule.group_score_topk):
            total = total + best[..., i]
        keep = torch.zeros_like(total, dtype=torch.bool).scatter_(1, top(total, rule.group_topk), True)
        dropped = ~keep.repeat_interleave(members.shape[-1], dim=1)
        key = key.masked_fill(dropped, _NOT_A_CANDIDATE)
    return _position(key.topk(rule.topk, dim=-1).values)
