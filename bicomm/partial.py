"""The tree within a rank as plain torch: how the rows that one token's experts made become the rank's fp32 partial.

`Partial` (contract.py) names a tree; the functions here are its definition and its CPU executor. Addends come stacked
in the order in which they are added: the caller sorts them by slot or by local expert index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bicomm.as_written import as_written, rounded_sum
from bicomm.contract import Partial, _add_round_to_odd, canonical_nan_, exact


@as_written
def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """RN32(a * b + c) with one rounding, for fp32 tensors (bf16 and fp16 are widened) that broadcast. Returns fp32.

    The product of two fp32 numbers is exact in fp64; its sum with c is rounded to odd there, which keeps the rounding
    to fp32 from being a second one (53 bits are more than 24 + 2). In the backward pass it counts as the identity.
    """
    product, addend = torch.broadcast_tensors(a.double() * b.double(), c.double())

    def run() -> Tensor:
        plain = product + addend
        total = _add_round_to_odd(product, addend)
        return torch.where(torch.isfinite(plain), total, plain).float()

    return rounded_sum(run, product, addend)


@as_written
def weighted(rows: Tensor, weights: Tensor, tree: Partial) -> Tensor:
    """The addends weight * row of a tree that weighs in the combine: fp32, the product rounded as `tree` says.

    rows: [..., H] bf16 or fp32; weights: [...], any floating type, rounded to `tree.weight` first. Not for
    product="fma", where the product is never rounded by itself.
    """
    scale = _rounded_weight(weights, tree).unsqueeze(-1)
    product = scale * rows.float()
    return _through_bf16(product) if tree.product == "bf16" else product


def _rounded_weight(weights: Tensor, tree: Partial) -> Tensor:
    return _through_bf16(weights.float()) if tree.weight == "bf16" else weights.float()


def _through_bf16(x: Tensor) -> Tensor:
    return rounded_sum(lambda: x.bfloat16().float(), x)


@as_written
def partial_sum(
    addends: Tensor, tree: Partial, *, present: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """One rank's partial: N stacked addends summed in the order they are stacked in. Returns fp32 [T, H].

    addends: [N, T, H], bf16 or fp32, N >= 0. present: bool [N, T], False where a token has no such addend (what is
    stored there is never used, not even NaN); None means all. weights: [N, T], required if tree.probability is
    "combine" and refused otherwise. A sum of no addends is +0; a zero is +0, a NaN the canonical one.
    Raises ValueError for shapes or weights that do not fit, TypeError for another dtype.
    """
    _check(addends, tree, present, weights)
    mask = None if present is None else present.unsqueeze(-1)
    fused = tree.product == "fma"
    if mask is not None:
        addends = torch.where(mask, addends, 0.0)
    if weights is not None and not fused:
        addends = weighted(addends, weights, tree)
    if mask is not None and weights is not None and not fused:
        addends = torch.where(mask, addends, 0.0)  # an absent slot's weight may be NaN
    if tree.accumulator == "exact":
        return exact(addends) if addends.shape[0] else addends.new_zeros(addends.shape[1:], dtype=torch.float32)

    acc = addends.new_zeros(addends.shape[1:], dtype=torch.float64 if tree.accumulator == "fp64" else torch.float32)
    scale = _rounded_weight(weights, tree).unsqueeze(-1) if fused and weights is not None else None
    for i in range(addends.shape[0]):
        if scale is not None:
            total = fused_multiply_add(scale[i], addends[i], acc)
        else:
            total = acc + addends[i]  # in acc's type: bf16 and fp32 addends widen without loss
            if tree.accumulator == "bf16":
                total = _through_bf16(total)
        acc = total if mask is None else torch.where(mask[i], total, acc)
    return canonical_nan_(acc.to(torch.float32) + 0.0)


def _check(addends: Tensor, tree: Partial, present: Tensor | None, weights: Tensor | None) -> None:
    if addends.dim() != 3:
        raise ValueError(f"addends are stacked as [N, T, H], got shape {tuple(addends.shape)}")
    if addends.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"addends are bf16 or fp32, got {addends.dtype}")
    for name, given in (("present", present), ("weights", weights)):
        if given is not None and given.shape != addends.shape[:2]:
            raise ValueError(f"{name} is [N, T] = {tuple(addends.shape[:2])}, got {tuple(given.shape)}")
    if (weights is not None) != (tree.probability == "combine"):
        rule = "needs weights" if weights is None else "takes no weights: they entered at the activation"
        raise ValueError(f"the tree {tree.id} {rule}")
