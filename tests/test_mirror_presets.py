"""Each preset against a plain transcription of what its engine does: loops over ranks, experts and slots. Pairs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ranks import ROOT
from torch import Tensor

import oracle
from bicomm import mirror
from bicomm.contract import Contract, Partial
from bicomm.presets import PARTIALS, PRESETS
from families import FAMILIES
from mirror_cases import bits

T, K, H, E, W = 6, 4, 10, 12, 4
PLACEMENT = mirror.Placement.counts([5, 0, 4, 3])


class Inputs:
    """ids [T, K]; one row a slot [T, K, H]; probs [T, K]; also laid out as a trainer has them."""

    def __init__(self, family: str, seed: int, topk: int = K, hidden: int = H) -> None:
        rng = np.random.default_rng(seed)
        self.ids = torch.from_numpy(np.argsort(rng.random((T, E)), axis=1)[:, :topk].copy())
        self.ids[2, 1] = -1
        rows = FAMILIES[family](rng, topk, T * hidden).reshape(topk, T, hidden).transpose(1, 0, 2)
        self.slots = torch.from_numpy(np.ascontiguousarray(rows)).bfloat16()
        self.probs = torch.from_numpy(rng.random((T, topk)).astype(np.float32))

    def mirror(self, contract: Contract, ep_size: int = W, out_dtype: torch.dtype = torch.float32) -> Tensor:
        tree = contract.partial
        slots = mirror.inverse_map(self.ids, E, align=2)
        rows = torch.full((slots.num_rows, self.slots.shape[2]), float("nan"), dtype=torch.bfloat16)
        rows[slots.row_of_slot[self.ids >= 0]] = self.slots[self.ids >= 0]
        placement = PLACEMENT if ep_size == W else mirror.Placement.even(E, ep_size)
        return mirror.unpermute(
            rows, slots.row_of_slot, rank_of_slot=mirror.rank_of_slot(self.ids, placement),
            order_of_slot=mirror.order_of_slot(self.ids, placement) if tree and tree.order == "expert" else None,
            ep_size=ep_size, contract=contract, out_dtype=out_dtype,
            probs=self.probs if tree and tree.probability == "combine" else None,
        )  # fmt: skip


def slot_chain(x: Inputs, experts: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One rank's partial: its slots in top-k order, added in `dtype`."""
    out = torch.zeros(T, H, dtype=dtype)
    for token, slot in itertools.product(range(T), range(K)):
        if int(x.ids[token, slot]) in experts:
            out[token] = out[token] + x.slots[token, slot].to(dtype)
    return out.float()


def expert_chain(x: Inputs, experts: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One rank's partial: index_add over its experts in ascending order."""
    out = torch.zeros(T, H, dtype=dtype)
    for expert in experts:
        token, slot = torch.where(x.ids == expert)
        out.index_add_(0, token, x.slots[token, slot].to(dtype))
    return out.float()


def across(partial_of: Callable[[tuple[int, ...]], Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """The ranks' partials in ascending rank, from +0, in `dtype`; one rounding to fp32 at the end."""
    out = torch.zeros(T, H, dtype=dtype)
    for experts in PLACEMENT.experts_of_rank:
        out = out + partial_of(experts).to(dtype)
    return out.float()


def fma_chain(x: Inputs, experts: tuple[int, ...]) -> Tensor:
    out = torch.zeros(T, H)
    for token, slot, column in itertools.product(range(T), range(K), range(H)):
        if int(x.ids[token, slot]) in experts:
            operands = (x.probs[token, slot], x.slots[token, slot, column], out[token, column])
            out[token, column] = oracle.fused_multiply_add(*(v.item() for v in operands))
    return out


def all_experts_bf16(x: Inputs) -> Tensor:
    """A Qwen3MoE block: weights in the model's bf16, every weighted row rounded, index_add in bf16 by expert id."""
    out = torch.zeros(T, H, dtype=torch.bfloat16)
    for expert in range(E):
        token, slot = torch.where(x.ids == expert)
        out.index_add_(0, token, x.slots[token, slot] * x.probs.bfloat16()[token, slot, None])
    return out


def all_experts_fp32(x: Inputs) -> Tensor:
    """Mixtral, DeepSeek-V3: weights in fp32, added in fp32 by expert id, one rounding to the model's type."""
    out = torch.zeros(T, H)
    for expert in range(E):
        token, slot = torch.where(x.ids == expert)
        out.index_add_(0, token, x.slots[token, slot].float() * x.probs[token, slot, None])
    return out


def token_owner_fp32(x: Inputs) -> Tensor:
    """slime, verl, SkyRL: rows travel to the token, which adds them in slot order in fp32."""
    out = torch.zeros(T, H)
    for slot in range(K):
        routed = (x.ids[:, slot] >= 0)[:, None]
        out = torch.where(routed, out + x.slots[:, slot].float() * x.probs[:, slot, None], out)
    return out


def owner(x: Inputs) -> Tensor:
    out = torch.zeros(T, H)
    for token, column in itertools.product(range(T), range(H)):
        out[token, column] = oracle.owner(x.slots[token, x.ids[token] >= 0, column].tolist())
    return out


EP_ENGINES: dict[str, Callable[[Inputs], Tensor]] = {
    "megatron-vllm-swiglu": lambda x: across(lambda e: slot_chain(x, e, torch.float64)),
    "megatron-vllm-swiglu-fp64": lambda x: across(lambda e: slot_chain(x, e, torch.float64), torch.float64),
    "megatron-vllm-squared-relu": lambda x: across(lambda e: slot_chain(x, e, torch.float32)),
    "megatron-vllm-squared-relu-fma": lambda x: across(lambda e: fma_chain(x, e)),
    "megatron-deepgemm": lambda x: across(lambda e: expert_chain(x, e, torch.float32)),
    "megatron-training-mirror": lambda x: across(lambda e: expert_chain(x, e, torch.float64)),
    "megatron-training-mirror-fp64": lambda x: across(lambda e: expert_chain(x, e, torch.float64), torch.float64),
    "owner": owner,
}
ONE_PROCESS: dict[str, tuple[Callable[[Inputs], Tensor], torch.dtype]] = {
    "transformers-bf16": (all_experts_bf16, torch.bfloat16),
    "transformers-fp32": (all_experts_fp32, torch.float32),
    "slot-fp32": (token_owner_fp32, torch.float32),
}
# Chains that overflow or meet NaN agree too, but torch's scalar loops here make payloads that are not the point.
CASES = [name for name in FAMILIES if name != "specials"]


def canonical(x: Tensor) -> Tensor:
    return bits((x + 0.0).masked_fill(x.isnan(), float("nan")))


def test_every_preset_has_a_transcription() -> None:
    assert set(EP_ENGINES) | set(ONE_PROCESS) == set(PRESETS)


def test_the_page_of_the_mirror_names_them_all() -> None:
    page = (ROOT / "docs" / "mirror.md").read_text()
    for name in {*PRESETS, *PARTIALS, *mirror.CANNOT_MIRROR} - {
        "megatron-training-mirror-fp64"
    }:  # there as "(`-fp64`)"
        assert f"`{name}`" in page or f"+{name}/1" in page, name


@pytest.mark.parametrize("name", EP_ENGINES)
def test_preset_equals_its_engine_at_ep_4(name: str) -> None:
    for seed, family in enumerate(CASES):
        x = Inputs(family, seed)
        assert torch.equal(bits(x.mirror(PRESETS[name])), canonical(EP_ENGINES[name](x))), family


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_preset_equals_its_engine_in_one_process(name: str) -> None:
    engine, dtype = ONE_PROCESS[name]
    for seed, family in enumerate(CASES):
        x = Inputs(family, seed)
        got = x.mirror(PRESETS[name], ep_size=1, out_dtype=dtype)
        assert torch.equal(canonical(got), canonical(engine(x))), family


@pytest.mark.parametrize("name", ["vllm-bf16", "vllm-fp32"])
def test_vllm_within_a_rank(name: str) -> None:
    # Across ranks vLLM sums inside ncclReduce, which cannot be mirrored; one rank can.
    for seed, family in enumerate(CASES):
        x = Inputs(family, seed)
        want = slot_chain(x, tuple(range(E)), torch.bfloat16 if name == "vllm-bf16" else torch.float32)
        assert torch.equal(bits(x.mirror(Contract.parse(f"ordered/1+{name}/1"), ep_size=1)), canonical(want)), family


def pair_differs(a: str, b: str, family: str, ep_size: int = W) -> bool:
    """Whether two presets give different bits; a tree that weighs at the activation gets rows that hold the weight."""
    results = []
    for name in (a, b):
        x = Inputs(family, 3, topk=9, hidden=200)
        tree = PRESETS[name].partial
        if tree is None or tree.probability == "activation":
            x.slots = (x.slots.float() * x.probs[:, :, None]).bfloat16()
        results.append(bits(x.mirror(PRESETS[name], ep_size)))
    return not torch.equal(*results)


WEIGHED = {"megatron-vllm-squared-relu-fma", "transformers-bf16", "transformers-fp32", "slot-fp32"}


def test_a_wrong_pairing_of_presets_shows() -> None:
    same_on_normal, same_everywhere = set(), set()
    for a, b in itertools.combinations(PRESETS, 2):
        if PRESETS[a] == PRESETS[b]:
            continue
        if not pair_differs(a, b, "normal"):
            same_on_normal.add(frozenset((a, b)))
        hard = itertools.product(("spread", "tie_dust", "cancellation"), (W, 1))
        if not any(pair_differs(a, b, family, ep_size) for family, ep_size in hard):
            same_everywhere.add(frozenset((a, b)))
    assert not same_everywhere
    # On plain data an order within a rank does not show in fp64, nor an fp64 sum against the exact one. So bits that
    # agree on such data do not prove the setting: the contract's id does.
    fp64 = {"megatron-vllm-swiglu-fp64", "megatron-training-mirror-fp64"}
    assert frozenset(("megatron-vllm-swiglu", "megatron-training-mirror")) in same_on_normal
    assert frozenset(fp64) in same_on_normal
    for pair in same_on_normal:
        assert not pair & WEIGHED or pair <= WEIGHED, pair  # where the weight enters always shows


def test_differences_are_named() -> None:
    a, b = PRESETS["megatron-vllm-swiglu"], PRESETS["megatron-deepgemm"]
    assert mirror.differences(a, b) == ["partial.order: slot / expert", "partial.accumulator: fp64 / fp32"]
    assert mirror.differences(a, a) == []
    assert mirror.differences(Contract("exact"), Contract("window", (16, 95, 86))) == [
        "rule: exact / window", "parameters: () / (16, 95, 86)",
    ]  # fmt: skip
    assert mirror.differences(a, Contract("ordered"))[0].startswith("partial: ")


def test_the_engines_json_is_accepted_and_a_mismatch_is_an_error_that_shows_both() -> None:
    engine = PRESETS["megatron-vllm-swiglu"].json()
    assert mirror.check(engine, "megatron-vllm-swiglu") == PRESETS["megatron-vllm-swiglu"]
    x = Inputs("spread", 1)
    assert torch.equal(bits(x.mirror(mirror.resolve(engine))), bits(x.mirror(PRESETS["megatron-vllm-swiglu"])))
    with pytest.raises(mirror.ContractMismatch) as caught:
        mirror.check(engine, "megatron-deepgemm")
    text = str(caught.value)
    assert isinstance(caught.value, ValueError)
    for part in ("ordered/1+megatron-vllm-swiglu/1", "ordered/1+megatron-deepgemm/1", "partial.order: slot / expert"):
        assert part in text
    assert "spelled" not in text and "slot-fp64" not in text
    with pytest.raises(mirror.ContractMismatch, match=r"partial: megatron-vllm-swiglu/1 / none"):
        mirror.check(engine, "ordered")
    with pytest.raises(ValueError, match="version 1"):
        mirror.check('{"rule": "exact"}', "exact")


def test_the_engines_contract_may_be_an_object_and_other_things_are_told_what_to_be() -> None:
    for contract in (PRESETS["megatron-deepgemm"], Contract("window", (16, 95, 86))):
        assert mirror.check(json.loads(contract.json()), contract) == contract == mirror.check(contract, contract)
    with pytest.raises(ValueError, match="version 1"):
        mirror.check({"rule": "exact"}, "exact")
    with pytest.raises(ValueError, match="unknown keys"):
        mirror.check({"rule": "exact", "version": 1, "more": object()}, "exact")
    wrong: Any
    for wrong in (b"exact", 3, None, ["exact"]):
        with pytest.raises(TypeError, match=r"Contract\.json\(\) gave .* got " + type(wrong).__name__):
            mirror.check(wrong, "exact")


def test_a_contract_without_a_tree_is_told_one_that_works() -> None:
    x = Inputs("spread", 1)
    with pytest.raises(ValueError, match="tree within a rank") as caught:
        x.mirror(Contract("exact"))
    named = str(caught.value).split("'")[1]
    assert named == "exact/1+megatron-vllm-swiglu/1"
    assert mirror.resolve(named).partial == PRESETS["megatron-vllm-swiglu"].partial


@pytest.mark.parametrize("name", mirror.CANNOT_MIRROR)
def test_what_cannot_be_mirrored_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be mirrored") as caught:
        mirror.resolve(name)
    assert mirror.CANNOT_MIRROR[name] in str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_describe_says_the_tree_in_words(name: str) -> None:
    contract, text = PRESETS[name], mirror.describe(name)
    assert contract.id in text and name in text
    tree = contract.partial
    if tree is None:
        assert "no expert parallel size" in text
        return
    assert ("ascending top-k slot" in text) == (tree.order == "slot")
    assert ("fused multiply-add" in text) == (tree.product == "fma")
    assert ("since the activation" in text) == (tree.probability == "activation")
    assert ("rounding to bf16 at each addition" in text) == (tree.accumulator == "bf16")
    assert ("across ranks" in text) and ("ascending rank" in text)


def test_describe_covers_every_rule() -> None:
    assert "2^(A-95)" in mirror.describe(Contract("window", (16, 95, 86), Partial()))
    assert "within a rank: not said" in mirror.describe("exact")
    assert "summed exactly" in mirror.describe(Contract("exact", partial=Partial()))
    assert len({mirror.describe(c) for c in PRESETS.values()}) == len(set(PRESETS.values()))
