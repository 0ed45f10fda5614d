"""An engine at EP 8, emulated rank by rank, against trainers at EP 1, 2 and 4 with the same rows in other places."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from bicomm import mirror
from bicomm.contract import Contract, Partial
from bicomm.partial import partial_sum
from bicomm.presets import PARTIALS
from families import FAMILIES
from mirror_cases import OWNERS, RULES, bits

T, K, H, E, EP = 9, 6, 5, 40, 8
HARD = [name for name in FAMILIES if name not in ("normal", "any_bits")]


@dataclasses.dataclass
class Routed:
    """One layer's routing and every slot's expert row: what engine and trainer have in common."""

    ids: Tensor  # [T, K], -1 not routed
    slots: Tensor  # [T, K, H]
    probs: Tensor

    @classmethod
    def make(cls, family: str, seed: int, dtype: torch.dtype) -> Routed:
        rng = np.random.default_rng(seed)
        ids = torch.from_numpy(np.argsort(rng.random((T, E)), axis=1)[:, :K].copy())
        ids[torch.from_numpy(rng.random((T, K)) < 0.1)] = -1
        ids[4] = -1  # a padded token
        columns = FAMILIES[family](rng, K, T * H).reshape(K, T, H).transpose(1, 0, 2)
        probs = torch.from_numpy(rng.random((T, K)).astype(np.float32))
        return cls(ids, torch.from_numpy(np.ascontiguousarray(columns)).to(dtype), probs)


ENGINE = mirror.Placement.counts([9, 0, 3, 7, 5, 5, 10, 1])


def engine(x: Routed, contract: Contract) -> Tensor:
    """Eight ranks, each with its own partial of every token, then the contract across ranks."""
    if contract.rule == "owner":
        weighted = contract.partial is not None
        tree = contract.partial or Partial()
        addends, weights = x.slots.transpose(0, 1), x.probs.t() if weighted else None
        # One exact sum of all slots: a rank's exact partial, where one rank holds every expert.
        return partial_sum(addends, dataclasses.replace(tree), present=(x.ids >= 0).t(), weights=weights)
    tree = contract.partial
    assert tree is not None
    partials = []
    for experts in ENGINE.experts_of_rank:
        if tree.order == "slot":
            here = torch.isin(x.ids, torch.tensor(experts, dtype=torch.int64))
            addends, present, weights = x.slots.transpose(0, 1), here.t(), x.probs.t()
        else:  # one addend an expert, in ascending local index
            hit = torch.stack([x.ids == e for e in experts]) if experts else torch.zeros(0, T, K, dtype=torch.bool)
            slot = hit.int().argmax(2)  # [experts, T]
            token = torch.arange(T).expand_as(slot)
            addends, present, weights = x.slots[token, slot], hit.any(2), x.probs[token, slot]
        weights = weights if tree.probability == "combine" else None
        partials.append(partial_sum(addends, tree, present=present, weights=weights))
    return contract.cross_rank.sum(partials)


def trainer(x: Routed, contract: Contract, ep_size: int, seed: int, ranks: Tensor | None = None) -> Tensor:
    """The rows as a trainer at `ep_size` gets them back: by its own ranks and experts, aligned and padded with NaN."""
    rng = np.random.default_rng(seed)
    numbering = torch.from_numpy(rng.permutation(E))  # its experts lie elsewhere, in another order
    relabelled = torch.where(x.ids >= 0, numbering[x.ids.clamp(min=0)], -1)
    slots = mirror.inverse_map(relabelled, E, align=max(1, 8 // ep_size))
    rows = torch.full((slots.num_rows, H), float("nan"), dtype=x.slots.dtype)
    rows[slots.row_of_slot[x.ids >= 0]] = x.slots[x.ids >= 0]
    tree = contract.partial
    return mirror.unpermute(
        rows, slots.row_of_slot, rank_of_slot=mirror.rank_of_slot(x.ids, ENGINE) if ranks is None else ranks,
        order_of_slot=mirror.order_of_slot(x.ids, ENGINE) if tree and tree.order == "expert" else None,
        ep_size=EP, contract=contract, probs=x.probs if tree and tree.probability == "combine" else None,
    )  # fmt: skip


CONTRACTS = [dataclasses.replace(rule, partial=tree) for rule in RULES for tree in [*PARTIALS.values(), Partial()]]


@pytest.mark.parametrize("contract", [*CONTRACTS, *OWNERS], ids=str)
def test_trainers_of_any_layout_give_the_engines_bits(contract: Contract) -> None:
    for seed, family in enumerate(HARD):
        x = Routed.make(family, seed, (torch.bfloat16, torch.float32)[seed % 2])
        want = bits(engine(x, contract))
        for ep_size in (1, 2, 4):
            assert torch.equal(bits(trainer(x, contract, ep_size, seed + ep_size)), want), (family, ep_size)


def test_the_trainers_own_layout_is_not_enough() -> None:
    """The twin: with the ranks of a trainer at EP 4 in place of the engine's, bits differ, except for `owner`."""
    for rule in RULES:
        contract = dataclasses.replace(rule, partial=PARTIALS["megatron-vllm-swiglu"])
        same = []
        for seed, family in enumerate(("normal", "tie_dust", "cancellation")):
            x = Routed.make(family, seed, torch.float32)
            own = mirror.rank_of_slot(x.ids, mirror.Placement.even(E, 4))
            same.append(torch.equal(bits(trainer(x, contract, 4, 0, own)), bits(engine(x, contract))))
        assert not all(same), rule
    x = Routed.make("spread", 5, torch.bfloat16)
    own = mirror.rank_of_slot(x.ids, mirror.Placement.even(E, 4))
    assert torch.equal(bits(trainer(x, Contract("owner"), 4, 0, own)), bits(engine(x, Contract("owner"))))


def test_combine_of_gathered_partials_is_the_contract() -> None:
    for seed, (rule, family) in enumerate(itertools.product(RULES, HARD)):
        rng = np.random.default_rng(seed)
        partials = torch.from_numpy(FAMILIES[family](rng, 8, 24)).view(8, 4, 6)
        for out_dtype in (torch.float32, torch.bfloat16):
            got = mirror.combine(partials, rule.id, out_dtype=out_dtype)
            assert torch.equal(bits(got), bits(rule.sum(partials, out_dtype=out_dtype)))


def test_owner_takes_no_layout() -> None:
    x = Routed.make("tie_dust", 1, torch.bfloat16)
    slots = mirror.inverse_map(x.ids, E)
    rows = torch.full((slots.num_rows, H), float("nan"), dtype=torch.bfloat16)
    rows[slots.row_of_slot[x.ids >= 0]] = x.slots[x.ids >= 0]
    assert torch.equal(
        bits(mirror.unpermute(rows, slots.row_of_slot, contract="owner")), bits(engine(x, Contract("owner")))
    )


def test_a_recorded_rank_of_replicated_experts() -> None:
    """Experts on two ranks: the engine's record decides, and the id alone is refused."""
    placement = mirror.Placement(((0, 1, 2), (2, 1, 3)), 4)
    ids = torch.tensor([[1, 2], [2, 3], [1, -1]])
    with pytest.raises(ValueError, match="several ranks"):
        mirror.rank_of_slot(ids, placement)
    recorded = torch.tensor([[0, 1], [1, 1], [1, -1]])
    assert mirror.order_of_slot(ids, placement, recorded).tolist() == [[1, 0], [0, 2], [1, -1]]
    rows = torch.tensor([[1.0], [2.0**-24], [2.0**-60], [4.0], [8.0], [0.0]])
    maps = torch.tensor([[0, 1], [2, 3], [4, -1]])
    out = mirror.unpermute(rows, maps, rank_of_slot=recorded, ep_size=2, contract="megatron-vllm-swiglu")
    assert out.flatten().tolist() == [1.0, 4.0, 8.0]
    wrong = mirror.order_of_slot(torch.tensor([[3, 2]]), placement, torch.tensor([[0, 1]]))  # rank 0 has no expert 3
    with pytest.raises(ValueError, match="does not hold its expert"):
        mirror.unpermute(
            rows, maps[:1], rank_of_slot=recorded[:1], order_of_slot=wrong, ep_size=2, contract="megatron-deepgemm"
        )
