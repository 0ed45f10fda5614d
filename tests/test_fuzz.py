"""Long random sequences of good calls, bad calls, mismatches, growths and faults: what is returned is always right."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

import bicomm
from bicomm.communicator import Communicator
from bicomm.contract import Contract
from bicomm.errors import Aborted, CallMismatch, PeerRefused, PeerTimeout
from combine_cases import addends_of, partials, rows_case, want
from worlds import local_ranks, same_bits

pytestmark = [pytest.mark.timeout(120)]
SIZE = 3


def _combine(comm: Communicator, chance: random.Random, held: ExitStack) -> bool:
    splits = [chance.randrange(5) for _ in range(SIZE)]
    hidden = chance.choice([1, 4, 33])
    family, mode = chance.choice(["spread", "cancellation"]), chance.choice(["ordered", "exact"])
    x = partials(family, SIZE, sum(splits), hidden, chance.randrange(1000))
    mine = x[comm.rank]
    if chance.random() < 0.4:
        mine = held.enter_context(comm.acquire(sum(splits), hidden)).copy_(mine)
    got = comm.combine(mine, mode, splits=splits)
    return same_bits(got, want(Contract.parse(mode), x, splits, comm.rank))


def _gradient(comm: Communicator, chance: random.Random, held: ExitStack) -> bool:
    asking = [chance.random() < 0.7 for _ in range(SIZE)]
    x = torch.ones(2 * SIZE, 3, requires_grad=asking[comm.rank])
    out = comm.combine(x, "exact")
    if out.requires_grad:
        (out * (comm.rank + 1)).sum().backward()
    expected = torch.arange(1.0, SIZE + 1).repeat_interleave(2).unsqueeze(1).expand(-1, 3)
    return out.requires_grad == any(asking) and (x.grad is None or torch.equal(x.grad, expected))


def _dispatch(comm: Communicator, chance: random.Random, held: ExitStack) -> bool:
    counts = [chance.choice([0, 1, 3, 200]) for _ in range(SIZE)]
    every = torch.arange(sum(counts) * 2).view(-1, 2) + chance.randrange(100)
    first = sum(counts[: comm.rank])
    told = counts if chance.random() < 0.5 else None
    return torch.equal(comm.dispatch(every[first : first + counts[comm.rank]], splits=told), every)


def _rows(comm: Communicator, chance: random.Random, held: ExitStack) -> bool:
    case = rows_case(SIZE, chance.randrange(50), chance.randrange(4), torch.bfloat16)
    got = comm.combine_rows(case["rows"][comm.rank], *case["maps"][comm.rank])
    return same_bits(got, Contract("owner").sum(addends_of(case, comm.rank, True, torch.float32)))


def _held(comm: Communicator, chance: random.Random, held: ExitStack) -> bool:
    """Buffers stay out over several calls, and come back in any order."""
    held.enter_context(comm.acquire(chance.randrange(50), chance.choice([1, 40])))
    return True


GOOD = (_combine, _combine, _gradient, _dispatch, _rows, _held)
BAD: dict[str, Callable[[Communicator], Any]] = {
    "refuses": lambda comm: comm.combine(torch.ones(2), "exact"),
    "another call": lambda comm: comm.dispatch(torch.ones(7, 9)),
    "another contract": lambda comm: comm.combine(torch.ones(SIZE, 2), "fp64"),
    "more memory": lambda comm: comm.combine(torch.ones(SIZE, 3000), "exact"),
    "a bad map": lambda comm: comm.combine_rows(torch.ones(1, 2), torch.tensor([[9]]), torch.tensor([[0]])),
    "aborts": lambda comm: comm.abort("by chance") or comm.combine(torch.ones(SIZE, 2), "exact"),
    "does not come": lambda comm: None,
    "throws": lambda comm: 1 // 0,
}
ENDS = ("aborts", "does not come", "throws")  # after these, the ranks must recover


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """torch imports its compiler in the first call of any operator, which takes seconds."""
    (comm,) = bicomm.local_world(1)
    comm.combine(torch.ones(1, 1, requires_grad=True), "exact").sum().backward()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("debug", [False, True])
def test_whatever_happens_what_is_returned_is_right(seed: int, debug: bool) -> None:
    with local_ranks(SIZE, timeout=2.0, debug=debug) as ranks:
        plan = random.Random(seed)
        stacks = [ExitStack() for _ in range(SIZE)]
        for step in range(120):
            number, culprit = plan.randrange(10**9), plan.randrange(SIZE)
            kind = plan.choice(list(BAD)) if plan.random() < 0.25 else ""
            if kind in ("does not come", "throws") and plan.random() < 0.7:
                kind = ""  # each costs a time-out

            def call(comm: Communicator, number: int = number, culprit: int = culprit, kind: str = kind) -> Any:
                chance = random.Random(number)
                good = chance.choice([g for g in GOOD if g is not _held] if kind else GOOD)
                if kind and comm.rank == culprit:
                    return BAD[kind](comm)
                with ExitStack() as short:
                    right = good(comm, chance, stacks[comm.rank] if good is _held else short)
                return right

            outcomes = ranks.outcomes(call)
            told = f"seed {seed}, step {step}, {kind or 'good'}: {outcomes}"
            if not kind:
                assert outcomes == [True] * SIZE, told
            elif kind in ENDS:
                others = [o for r, o in enumerate(outcomes) if r != culprit]
                assert all(isinstance(o, (PeerTimeout, Aborted)) for o in others), told
                ranks(lambda comm: comm.recover())
            else:
                for outcome in outcomes:
                    assert isinstance(outcome, (CallMismatch, PeerRefused, ValueError, IndexError)), told
            if plan.random() < 0.3:
                ranks(lambda comm: stacks[comm.rank].close())
            if plan.random() < 0.05 and not any(len(comm._acquired) for comm in ranks.members):
                ranks(lambda comm: comm.suspend())
        ranks(lambda comm: stacks[comm.rank].close())
        x: Tensor = torch.ones(SIZE, 2)
        assert all(torch.equal(o, torch.full((1, 2), 3.0)) for o in ranks(lambda comm: comm.combine(x, "exact")))
