"""Routings and rows for the mirror's tests: adversarial families laid over top-k slots, with padding rows as poison."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bicomm import mirror
from bicomm.contract import Contract, Partial
from families import FAMILIES

TREES = [
    Partial(order, accumulator)  # type: ignore[arg-type]
    for order, accumulator in itertools.product(("slot", "expert"), ("exact", "fp64", "fp32", "bf16"))
]
TREES += [
    Partial("slot", accumulator, "combine", product, weight)  # type: ignore[arg-type]
    for accumulator, product, weight in itertools.product(
        ("exact", "fp64", "fp32", "bf16"), ("fp32", "bf16"), ("fp32", "bf16")
    )
]
TREES += [Partial("slot", "fp32", "combine", "fma", "fp32"), Partial("expert", "fp32", "combine", "fma", "bf16")]
RULES = [Contract("ordered"), Contract("fp64"), Contract("exact"), Contract("window", (16, 95, 86))]
OWNERS = [Contract("owner")] + [
    Contract("owner", partial=Partial("slot", "exact", "combine", product))  # type: ignore[arg-type]
    for product in ("fp32", "bf16")
]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@dataclasses.dataclass
class Case:
    """rows [R, H] with NaN where no slot points; maps [T, K]; probs fp32 [T, K], NaN where not routed."""

    rows: Tensor
    row_of_slot: Tensor
    rank_of_slot: Tensor
    order_of_slot: Tensor
    probs: Tensor
    ep_size: int

    def to(self, device: str) -> Case:
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return Case(**moved)

    def arguments(self, contract: Contract) -> dict[str, Any]:
        """What `mirror.unpermute` takes beside the rows and their map; a tree in slot order gets no order."""
        tree = contract.partial
        return {
            "rank_of_slot": self.rank_of_slot,
            "order_of_slot": self.order_of_slot if tree is not None and tree.order == "expert" else None,
            "ep_size": self.ep_size,
            "contract": contract,
            "probs": self.probs if tree is not None and tree.probability == "combine" else None,
        }

    def mirror(self, contract: Contract, out_dtype: torch.dtype = torch.float32) -> Tensor:
        return mirror.unpermute(self.rows, self.row_of_slot, **self.arguments(contract), out_dtype=out_dtype)


def make_case(
    family: str, seed: int, tokens: int, topk: int, hidden: int, *, ep_size: int = 8, experts: int = 32,
    dtype: torch.dtype = torch.bfloat16, drop: float = 0.1,
) -> Case:  # fmt: skip
    """Slots of each token hold one column of the family each, shuffled over a larger row buffer; the rest is NaN."""
    rng = np.random.default_rng(seed)
    families = FAMILIES.values() if family == "all" else [FAMILIES[family]]
    share = hidden // len(families)  # "all": a run of columns for each family
    columns = np.concatenate([f(rng, topk, tokens * share).reshape(topk, tokens, share) for f in families], axis=2)
    hidden = columns.shape[2]
    ids = torch.from_numpy(np.argsort(rng.random((tokens, experts)), axis=1)[:, :topk].copy())
    ids[torch.from_numpy(rng.random((tokens, topk)) < drop)] = -1
    if tokens > 2:
        ids[1] = -1  # a padded token
    placement = mirror.Placement.counts(_uneven(experts, ep_size))
    rows = torch.full((tokens * topk + 7, hidden), float("nan"), dtype=dtype)
    where = torch.from_numpy(rng.permutation(rows.shape[0])[: tokens * topk]).view(tokens, topk)
    row_of_slot = torch.where(ids >= 0, where, -1)
    values = torch.from_numpy(columns).transpose(0, 1).to(dtype)
    rows[row_of_slot[ids >= 0]] = values[ids >= 0]
    probs = torch.from_numpy(rng.random((tokens, topk)).astype(np.float32)).masked_fill(ids < 0, float("nan"))
    return Case(
        rows, row_of_slot, mirror.rank_of_slot(ids, placement), mirror.order_of_slot(ids, placement), probs, ep_size
    )


def _uneven(experts: int, ranks: int) -> list[int]:
    """Sizes that differ, one of them 0 where there are enough ranks."""
    sizes = [experts // ranks] * ranks
    if ranks > 2:
        sizes[0] += sizes[1]
        sizes[1] = 0
    sizes[-1] += experts - sum(sizes)
    return sizes
