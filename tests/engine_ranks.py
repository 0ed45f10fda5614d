"""An engine on real ranks, and its mirror in each of them: what test_mirror_ranks.py and its GPU twin run."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import bicomm
from bicomm.contract import Contract
from bicomm.partial import partial_sum
from bicomm.presets import PARTIALS
from families import FAMILIES
from mirror_cases import Case, bits, make_case

MODES = ("ordered", "exact", "fp64", "multimem", "window(16,95,86)")
TOKENS, TOPK, HIDDEN = 16, 6, 52


def cases(few: bool) -> list[Case]:
    """One layer of every family; two of them where barriers are slow."""
    families = ["tie_dust", "split_cancellation"] if few else list(FAMILIES)
    return [make_case(family, seed, TOKENS, TOPK, HIDDEN) for seed, family in enumerate(families)]


def partial_of(case: Case, rank: int, contract: Contract) -> torch.Tensor:
    """What one engine rank adds up for every token: its own rows, in the order of its tree. fp32 [T, H]."""
    tree = contract.partial
    assert tree is not None
    here = case.rank_of_slot == rank
    order = case.order_of_slot if tree.order == "expert" else torch.arange(case.row_of_slot.shape[1]).expand_as(here)
    steps = order.long().masked_fill(~here, 1 << 40).argsort(dim=1, stable=True)
    rows = case.row_of_slot.gather(1, steps)
    addends = case.rows[rows.clamp(min=0)].transpose(0, 1)
    weights = case.probs.gather(1, steps).t() if tree.probability == "combine" else None
    return partial_sum(addends, tree, present=here.gather(1, steps).t(), weights=weights)


def engine_and_mirror(few: bool) -> dict[str, Any]:
    """Combine on all ranks in every mode and preset's tree; the mirror of this rank's tokens, computed here alone.

    Returns the pairs (mode, tree, family number) in which a bit differs, and how many were compared.
    """
    world = bicomm.init()
    comm = bicomm.Communicator(max_tokens=TOKENS, hidden=HIDDEN, timeout=60.0)
    splits = (5, 0, 3, 1, 0, 4, 2, 1)[: world.size]
    mine = slice(sum(splits[: world.rank]), sum(splits[: world.rank + 1]))
    trees = ["megatron-vllm-swiglu", "megatron-deepgemm"] if few else list(PARTIALS)
    wrong, compared = [], 0
    for number, case in enumerate(cases(few)):
        for name in trees:
            tree = Contract("ordered", partial=PARTIALS[name])
            partials = partial_of(case, world.rank, tree).to(comm.device)
            mirrored: dict[Contract, torch.Tensor] = {}
            for mode in MODES:
                contract = dataclasses.replace(comm.plan(mode).contract, partial=tree.partial)
                got = comm.combine(partials, mode, splits=splits).cpu()
                if contract not in mirrored:  # multimem's is that of another mode
                    mirrored[contract] = case.to(comm.device.type).mirror(contract).cpu()[mine]
                compared += 1
                if not torch.equal(bits(got), bits(mirrored[contract])):
                    wrong.append((mode, name, number))
        # owner: each rank holds the rows of its slots, in an order of its own
        held = case.rank_of_slot == world.rank
        rows = case.rows[case.row_of_slot[held]]
        position = torch.full(held.shape, -1)
        for rank in range(world.size):
            at = case.rank_of_slot == rank
            position[at] = torch.arange(int(at.sum()))
        maps = [m[mine].to(comm.device) for m in (position, case.rank_of_slot)]
        for name in ("owner",) if few else ("owner", "owner/1+slot-exact-combine-fp32-fp32/1"):
            contract = Contract.parse(name)
            weights = None if contract.partial is None else case.probs[mine].to(comm.device)
            got = comm.combine_rows(rows.to(comm.device), *maps, weights=weights).cpu()
            want = case.to(comm.device.type).mirror(contract).cpu()[mine]
            compared += 1
            if not torch.equal(bits(got), bits(want)):
                wrong.append(("owner", name, number))
    return {"wrong": wrong, "compared": compared, "naive differs": _naive_differs(cases(few), world.size)}


def _naive_differs(layers: list[Case], size: int) -> bool:
    """Whether adding the ranks' partials from the last rank on would show in some layer."""
    contract = dataclasses.replace(Contract("ordered"), partial=PARTIALS["megatron-vllm-swiglu"])
    for case in layers:
        partials = [partial_of(case, rank, contract) for rank in range(size)]
        backwards = contract.cross_rank.sum(partials[::-1])
        if not torch.equal(bits(backwards), bits(case.mirror(contract))):
            return True
    return False
