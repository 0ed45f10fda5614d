"""The mirror in plain torch: what the kernels must equal, and the CPU executor.

Slots are first sorted into the engine's tree (by rank, then by place in the rank's order, then by slot). A tree is two
int32 tensors [T, K]: `rows`, the row at each place (-1: none), and `tags`, the slot it came from and flags: on the
first and the last place of each engine rank, and on all places of a rank that has three or more. A rank that made no
row for a token adds +0, which no contract can see, so it is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bicomm.contract import Contract, Partial, canonical_nan_
from bicomm.partial import partial_sum, weighted

LAST, FIRST, MANY = 1 << 30, 1 << 29, 1 << 28  # in a tag
SLOT = MANY - 1
_CHUNK = 1 << 18  # elements of one slot's addends at a time: the intermediates stay small and near the core


def sort_slots(row_of_slot: Tensor, rank_of_slot: Tensor | None, order_of_slot: Tensor | None) -> tuple[Tensor, Tensor]:
    """The tree of each token's slots, (rows, tags), both int32 [T, K]. Without ranks all slots belong to one."""
    ranks = torch.zeros_like(row_of_slot) if rank_of_slot is None else rank_of_slot
    routed = (row_of_slot >= 0) & (ranks >= 0)
    key = ranks.long() << 32
    if order_of_slot is not None:
        key = key + order_of_slot.long()
    key, slots = torch.sort(torch.where(routed, key, 2**62), dim=1, stable=True)
    routed = key < 2**62
    rows = torch.where(routed, row_of_slot.gather(1, slots), -1)
    ranks = torch.where(routed, ranks.gather(1, slots), -1)
    padded = torch.nn.functional.pad(ranks, (2, 2), value=-1)
    before, after = (padded[:, i : i + ranks.shape[1]] for i in (1, 3))
    outer = [padded[:, i : i + ranks.shape[1]] == ranks for i in (0, 4)]  # two places off: all three share the rank
    many = outer[0] | outer[1] | ((before == ranks) & (after == ranks))
    for holds, flag in ((ranks != after, LAST), (ranks != before, FIRST), (many, MANY)):
        slots = slots + flag * (holds & routed)
    return rows.to(torch.int32), slots.to(torch.int32)


def unpermute(rows: Tensor, tree: tuple[Tensor, Tensor], probs: Tensor | None, contract: Contract) -> Tensor:
    """The contract's value of every token: fp32 [T, H] from rows [R, H] and a tree [T, K]; probs fp32 [T, K]."""
    places, tags = tree
    tokens, slots = places.shape
    out = torch.zeros(tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    step = max(1, _CHUNK // max(1, rows.shape[1]))
    if slots == 0:
        return out
    for start in range(0, tokens, step):
        here = places[start : start + step].t()  # [K, t]
        tag = tags[start : start + step].t()
        present = here >= 0
        if not present.any():
            continue
        addends = torch.where(present.unsqueeze(-1), rows[here.clamp(min=0).long()], 0.0)
        weights = None if probs is None else probs[start : start + step].t().gather(0, (tag & SLOT).long())
        out[start : start + step] = _value(addends, present, (tag & LAST) != 0, weights, contract)
    return out


def _value(addends: Tensor, present: Tensor, last: Tensor, weights: Tensor | None, contract: Contract) -> Tensor:
    if contract.rule == "owner":
        if weights is not None:
            tree = contract.partial or Partial(probability="combine")
            addends = torch.where(present.unsqueeze(-1), weighted(addends, weights, tree), 0.0)
        return contract.cross_rank.sum(addends)
    if contract.partial is None:
        raise ValueError(f"{contract.id} says nothing about the tree within a rank: a mirror needs both")
    group = last.int().cumsum(0) - last.int()  # 0, 1, ... : which of the token's engine ranks, ascending
    count = int(last.sum(0).max())
    partials = [
        partial_sum(addends, contract.partial, present=present & (group == g), weights=weights) for g in range(count)
    ]
    return contract.cross_rank.sum(partials)


def backward(
    grad: Tensor, places: Tensor, tags: Tensor | None, rows: Tensor | None, probs: Tensor | None, weight_bf16: bool,
    num_rows: int, dtype: torch.dtype, need_rows: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of rows ([num_rows, H] of `dtype`) and of probs (fp32 [T, K]); each may be empty where not asked for.

    Every rounding of the forward counts as the identity. A row gets its token's gradient, times its weight with one
    fp32 rounding, cast once to `dtype`; a row without a slot gets 0. A weight gets the dot product of its row and the
    gradient: fp64 products, added by halves over H padded to a power of two, rounded once to fp32.
    rows: given where the gradient of probs is asked for.
    """
    tokens, slots = places.shape
    hidden = grad.shape[1]
    d_rows = torch.zeros(num_rows if need_rows else 0, hidden, dtype=dtype, device=grad.device)
    d_probs = torch.zeros(places.shape if rows is not None else (0, 0), dtype=torch.float32, device=grad.device)
    step = max(1, _CHUNK // max(1, hidden))
    for start in range(0, tokens, step):
        for place in range(slots):
            here = places[start : start + step, place].long()
            token = (here >= 0).nonzero()[:, 0]
            row = here[token]
            token = token + start
            slot = torch.full_like(token, place) if tags is None else (tags[token, place] & SLOT).long()
            g = grad[token].float()
            if rows is not None:
                d_probs[token, slot] = _dot(rows[row], g)
            if need_rows:
                if probs is not None:
                    weight = probs[token, slot].float()
                    g = (weight.bfloat16().float() if weight_bf16 else weight).unsqueeze(-1) * g
                d_rows[row] = canonical_nan_(g.to(dtype))
    return d_rows, canonical_nan_(d_probs)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    products = a.double() * b.double()
    width = 1 << max(0, products.shape[1] - 1).bit_length()
    products = torch.nn.functional.pad(products, (0, width - products.shape[1]))
    while width > 1:
        width //= 2
        products = products[:, :width] + products[:, width:]
    return products.sum(1).float()  # of one column, or of none


def rounded(x: Tensor, out_dtype: torch.dtype) -> Tensor:
    """An fp32 result in the type asked for, NaN canonical."""
    return x if out_dtype == x.dtype else canonical_nan_(x.to(out_dtype))
