"""Ranks that make a communicator at different times: what they are told, and that they can make it again."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks

import bicomm
from bicomm import front
from bicomm.transports import establish

pytestmark = pytest.mark.timeout(60)
SIZE = 3


def _told(make: Callable[[], Any]) -> str:
    """Whether what was made combines; or what was raised."""
    try:
        comm = make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    x = torch.arange(SIZE * 4.0).view(SIZE, 4)
    return str(torch.equal(comm.combine(x, "exact"), SIZE * x[comm.rank : comm.rank + 1]))


def _wait_at_most(seconds: float) -> None:
    establish._MEETING = seconds
    os.environ["BICOMM_TIMEOUT"] = str(seconds)


def _alone_first(share_memory: bool) -> list[str]:
    world = bicomm.init(device="cpu")
    _wait_at_most(1)

    def make() -> Any:
        return bicomm.Communicator(max_tokens=SIZE, hidden=4, share_memory=share_memory)

    told = []
    for _ in range(2):
        told.append(_told(make) if world.rank == 1 else "")
        world.group.barrier().wait()
    _wait_at_most(20)
    return [*told, _told(make), _told(make)]


@pytest.mark.parametrize("share_memory", [True, False])
def test_a_rank_that_made_one_alone_makes_the_next_with_all(share_memory: bool) -> None:
    for result in run_ranks(SIZE, _alone_first, share_memory, launcher="fork"):
        assert result.value[2:] == ["True", "True"], result.value
        for text in result.value[:2]:
            assert text == ("" if result.rank != 1 else "PeerTimeout: " + _MISSING.format(ranks="ranks 0, 2"))


_MISSING = "{ranks} did not make this communicator within 1 s; make it again, on all ranks together"


def _late() -> list[str]:
    world = bicomm.init(device="cpu")
    _wait_at_most(1)
    told = [_told(bicomm.default_communicator)] if world.rank != 2 else []
    world.group.barrier().wait()
    _wait_at_most(20)
    return [*told, _told(bicomm.default_communicator)]


def test_a_rank_that_is_late_meets_the_others_when_they_try_again() -> None:
    first, second, late = (result.value for result in run_ranks(SIZE, _late, launcher="fork"))
    assert first == second == ["PeerTimeout: " + _MISSING.format(ranks="rank 2"), "True"] and late == ["True"]


def _first_call() -> list[str]:
    world = bicomm.init(device="cpu")
    _wait_at_most(1)
    x = torch.ones(SIZE, 4)
    told = []
    for ranks in ([1], [0, 2], [0, 1, 2], [0, 1, 2]):
        if len(ranks) == SIZE:
            _wait_at_most(20)
        try:
            told.append(str(bicomm.combine(x, "exact").tolist()) if world.rank in ranks else "")
        except bicomm.PeerTimeout as error:
            told.append(str(error))
        world.group.barrier().wait()
    assert len(front._made) == 1
    bicomm.shutdown()
    bicomm.init(device="cpu")
    return [*told, str(bicomm.combine(x, "exact").tolist())]


def test_a_first_combine_on_some_ranks_alone() -> None:
    right = str([[3.0] * 4])
    for result in run_ranks(SIZE, _first_call, launcher="fork"):
        alone = _MISSING.format(ranks="ranks 0, 2") if result.rank == 1 else ""
        apart = "" if result.rank == 1 else _MISSING.format(ranks="rank 1")
        assert result.value == [alone, apart, right, right, right]


def _refused_alone() -> list[str]:
    world = bicomm.init(device="cpu")
    _wait_at_most(1)
    told = [_told(lambda: bicomm.Communicator(max_tokens=-1)) if world.rank == 0 else ""]
    world.group.barrier().wait()
    _wait_at_most(20)
    return [*told, _told(bicomm.Communicator)]


def test_bad_arguments_on_a_rank_that_is_alone_are_what_it_is_told() -> None:
    results = run_ranks(SIZE, _refused_alone, launcher="fork")
    assert [result.value[1] for result in results] == ["True"] * SIZE
    assert results[0].value[0].startswith("ValueError") and "max_tokens" in results[0].value[0]
