"""Fabrics of no class are never trusted; variants of a class are named; what no contract depends on is written down."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bicomm.certify.candidates import TRUSTED, VERDICTS
from bicomm.certify.emulate import Emulated
from bicomm.certify.families import FAMILIES
from bicomm.certify.measure import measure
from bicomm.certify.rounding import chain_from, exact_toward_zero, pairwise_tree
from bicomm.certify.verdict import Result
from bicomm.contract import Contract, exact, fp64, ordered


def verdict_of(reduction: Any, world: int = 8, channels: int = 2000) -> Result:
    return measure(Emulated("test", world, reduction), channels=channels)


@pytest.mark.parametrize(
    ("reduction", "verdict", "varies"),
    [
        (lambda x, rank, call, blocks, alignment: exact(x) if blocks != 32 else fp64(x), "flaky", ("blocks", "repeat")),
        (lambda x, rank, call, blocks, offset: exact(x) if offset != 4 else fp64(x), "flaky", ("alignment", "repeat")),
        (lambda x, rank, call, blocks, alignment: exact(x) if rank != 3 else ordered(x), "unknown", ("rank",)),
        (lambda x, rank, call, blocks, alignment: fp64(x.roll(-rank, 0)), "unknown", ("rank",)),
        (lambda x, rank, call, blocks, alignment: exact(x).clamp(-3.4e38, 3.4e38), "unknown", ()),
        (lambda x, rank, call, blocks, alignment: torch.nan_to_num(exact(x), nan=0.0), "unknown", ()),
        (lambda x, rank, call, blocks, alignment: x.sum(0).bfloat16().float(), "unknown", ()),
        (lambda x, rank, call, blocks, alignment: pairwise_tree(x.flip(0)).mul(1.0), "unknown", ()),
    ],
    ids=["blocks", "alignment", "one rank", "fp64 from own rank", "no infinity", "no NaN", "bf16", "another tree"],
)  # fmt: skip
def test_a_fabric_of_no_class_is_never_trusted(reduction: Any, verdict: str, varies: tuple[str, ...]) -> None:
    # six ranks: the tree of the reversed addends is another one there
    result = verdict_of(reduction, world=6, channels=5000)
    assert result.verdict == verdict
    assert set(varies) <= set(result.varies)
    assert result.contract is None
    assert result.verdict not in TRUSTED
    if verdict == "unknown":
        assert all(result.examples[name] for name in VERDICTS[:-2])
        assert result.closest is not None


def test_a_fabric_that_changes_rarely_is_caught_by_the_second_read() -> None:
    calls = []

    def reduction(x: torch.Tensor, rank: int, call: int, blocks: int, alignment: int) -> torch.Tensor:
        calls.append(call)
        return exact(x) if call != once else ordered(x)

    once = -1
    assert verdict_of(reduction, 4).verdict == "exact"
    once = calls[-len(FAMILIES) * 2]  # one read of many, long after the first look
    result = verdict_of(reduction, 4)
    assert (result.verdict, result.varies) == ("flaky", ("repeat",))


@pytest.mark.parametrize(
    ("reduction", "variant"),
    [
        (lambda x, rank, call, blocks, at: chain_from(x, 3, 1), "fp32 chain, ascending from rank 3"),
        (lambda x, rank, call, blocks, at: chain_from(x, 7, -1), "fp32 chain, descending from rank 7"),
        (lambda x, rank, call, b, at: chain_from(x, rank + 1, 1), "fp32 chain, ascending from the reading rank + 1"),
        (lambda x, rank, call, blocks, at: chain_from(x, rank, -1), "fp32 chain, descending from the reading rank"),
    ],
)  # fmt: skip
def test_the_start_of_a_chain_is_found(reduction: Any, variant: str) -> None:
    result = verdict_of(reduction)
    assert (result.verdict, result.variant) == ("rotated", variant)


def test_what_is_not_part_of_a_contract_is_noted() -> None:
    """Every executor ends with +0 and the canonical NaN, so a fabric may have its own; what it has is written down."""

    def odd(x: torch.Tensor, rank: int, call: int, blocks: int, alignment: int) -> torch.Tensor:
        total = exact(x)
        total = torch.where((total == 0) & (x.view(torch.int32) < 0).all(0), -0.0, total)
        return torch.where(torch.isnan(total), torch.tensor(-1, dtype=torch.int32).view(torch.float32), total)

    result = verdict_of(odd)
    assert result.verdict == "exact"
    assert result.observed == {"all addends -0": "0x80000000", "zeros of both signs": "0x00000000", "nan": "0xffffffff"}


def test_truncation_takes_many_forms() -> None:
    def chain(x: torch.Tensor, rank: int, call: int, blocks: int, alignment: int) -> torch.Tensor:
        acc = torch.zeros_like(x[0])
        for row in x:
            acc = exact_toward_zero(torch.stack([acc, row]))
        return acc

    result = verdict_of(chain, world=3)
    assert (result.verdict, result.variant) == ("truncating", "fp32 chain, truncated")
    x = torch.tensor([[1.0, -1.0, 3e38, -3e38], [2.0**-24, -(2.0**-24), 3e38, -3e38], [2.0**-30, -(2.0**-40), 0, 0]])
    assert exact_toward_zero(x).tolist() == [1.0, -1.0, torch.finfo(torch.float32).max, torch.finfo(torch.float32).min]
    assert exact(x).tolist() == [1 + 2.0**-23, -1 - 2.0**-23, float("inf"), float("-inf")]


@pytest.mark.parametrize("base", [Contract("ordered"), Contract("fp64"), Contract("window", (16, 95, 86))], ids=str)
@pytest.mark.parametrize("where", ["addends", "sums"])
def test_flushed_subnormals_are_seen_under_any_sum(base: Contract, where: str) -> None:
    def flush(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.abs() < 2.0**-126, 0.0, x)

    def reduction(x: torch.Tensor, rank: int, call: int, blocks: int, alignment: int) -> torch.Tensor:
        return base.sum(flush(x)) if where == "addends" else flush(base.sum(x))

    result = verdict_of(reduction)
    assert (result.verdict, result.variant) == ("ftz", f"{base.id}, subnormal {where} flushed")
