"""Communicators of a local world: bits of every mode, shapes of every kind, zero-copy, plans, and what they refuse."""

from __future__ import annotations

import copy
import json
import pickle
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import bicomm
from bicomm import world
from bicomm.communicator import Communicator
from bicomm.contract import Contract
from bicomm.errors import BicommError, CallMismatch, NotInitialized, PeerRefused, PeerTimeout
from bicomm.transports.cpu import CpuTransport
from bicomm.transports.request import Request
from combine_cases import failures, partials, rows_case, want
from worlds import local_ranks, same_bits

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:mode='multimem' runs in software")]


@pytest.mark.parametrize("size", [1, 3, 6, 12])
def test_every_check_holds(size: int) -> None:
    with local_ranks(size, timeout=20) as ranks:
        assert ranks(failures) == [[]] * size


def test_a_naive_sum_fails_where_these_pass() -> None:
    """The twin: on the same data, torch's own sums have other bits, so the checks above can fail."""
    x = partials("tie_dust", 8, 64, 9)
    exact = Contract("exact").sum(x)
    assert not same_bits(x.sum(0), exact) and not same_bits(x.double().sum(0).float(), exact)
    shuffled = x[torch.randperm(8, generator=torch.Generator().manual_seed(0))]
    ordered = Contract("ordered")
    assert not same_bits(ordered.sum(shuffled), ordered.sum(x)) and same_bits(Contract("exact").sum(shuffled), exact)


def test_nothing_is_copied_from_an_acquired_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract's function reads the very addresses that the experts wrote."""
    read: dict[int, list[int]] = {}
    real = Contract.sum

    def spy(self: Contract, addends: Any, **options: Any) -> torch.Tensor:
        read[threading_rank()] = [x.data_ptr() for x in addends]
        return real(self, addends, **options)

    import threading

    names: dict[int, int] = {}

    def threading_rank() -> int:
        return names[threading.get_ident()]

    monkeypatch.setattr(Contract, "sum", spy)
    with local_ranks(3, mode="exact", timeout=10) as ranks:
        written: dict[int, int] = {}
        copies: list[int] = []

        def work(comm: Communicator) -> torch.Tensor:
            names[threading.get_ident()] = comm.rank
            with comm.acquire(6, 4) as buffer:
                written[comm.rank] = buffer.data_ptr()
                buffer.fill_(float(comm.rank))
                before = comm.memory()["in_use"]
                out = comm.combine(buffer)
                copies.append(comm.memory()["in_use"] - before)
                return out

        outs = ranks(work)
    assert all(torch.equal(out, torch.full((2, 4), 3.0)) for out in outs) and copies == [0, 0, 0]
    for rank in range(3):
        assert read[rank] == [written[peer] + 2 * rank * 16 for peer in range(3)]


def test_owner_has_the_same_bits_for_any_number_of_ranks_and_any_placement() -> None:
    """Experts move between ranks and their replicas take turns; tokens live on other ranks; the bits stay."""
    experts, tokens, slots, hidden = 12, 24, 4, 9
    chance = torch.Generator().manual_seed(3)
    chosen = torch.rand(tokens, experts, generator=chance).topk(slots, 1).indices
    weights = torch.rand(tokens, slots, generator=chance)
    made = partials("cancellation", experts, tokens, hidden, 1)  # the row of each expert for each token
    results, naive = [], []
    for size in (1, 2, 4, 8):
        for seed in range(3):
            chance = torch.Generator().manual_seed(100 * size + seed)
            homes = [torch.randperm(size, generator=chance)[: 1 + seed % 2].tolist() for _ in range(experts)]
            picked = torch.randint(2, (tokens, slots), generator=chance)
            bounds = sorted(torch.randint(tokens + 1, (size - 1,), generator=chance).tolist())
            splits = [b - a for a, b in zip([0, *bounds], [*bounds, tokens], strict=True)]
            rows: list[list[torch.Tensor]] = [[torch.full((hidden,), float("nan"))] for _ in range(size)]
            row, rank = torch.zeros(tokens, slots, dtype=torch.int64), torch.zeros(tokens, slots, dtype=torch.int64)
            for token in torch.randperm(tokens, generator=chance).tolist():
                for slot in range(slots):
                    expert = int(chosen[token, slot])
                    home = homes[expert][int(picked[token, slot]) % len(homes[expert])]
                    row[token, slot], rank[token, slot] = len(rows[home]), home
                    rows[home].append(made[expert, token])
            shares = [slice(sum(splits[:r]), sum(splits[: r + 1])) for r in range(size)]
            with local_ranks(size, timeout=10) as ranks:
                outs = ranks(
                    lambda comm, rows=rows, row=row, rank=rank, shares=shares: comm.combine_rows(
                        torch.stack(rows[comm.rank]),
                        row[shares[comm.rank]],
                        rank[shares[comm.rank]],
                        weights[shares[comm.rank]],
                    )
                )
            results.append(torch.cat(outs))
            parts = torch.zeros(size, tokens, hidden)  # what engines do: a partial on each rank, then a sum over ranks
            for token in range(tokens):
                for slot in range(slots):
                    value = rows[int(rank[token, slot])][int(row[token, slot])] * weights[token, slot]
                    parts[int(rank[token, slot]), token] += value
            naive.append(Contract("ordered").sum(parts))
    assert all(same_bits(result, results[0]) for result in results)
    assert not all(same_bits(result, naive[0]) for result in naive)


def test_the_same_partials_give_the_same_bits_at_every_position_and_on_every_rank() -> None:
    """The row of interest moves through the batch, last row included, and through the owners."""
    size, tokens, hidden = 8, 17, 6
    probe = partials("tie_dust", size, 1, hidden, 5)
    for mode in ("ordered", "exact"):
        with local_ranks(size, mode=mode, timeout=20) as ranks:
            bits = []
            for position in (0, 1, 8, 15, 16):
                x = partials("normal", size, tokens, hidden, position)
                x[:, position] = probe[:, 0]
                for owner in range(size):
                    splits = [0] * size
                    splits[owner], splits[(owner + 1) % size] = (position + 1, tokens - position - 1)
                    before = 0 if owner < size - 1 else splits[0]
                    order = torch.arange(tokens).roll(before) if before else torch.arange(tokens)
                    outs = ranks(lambda comm, x=x[:, order], splits=splits: comm.combine(x[comm.rank], splits=splits))
                    bits.append(torch.cat([*outs])[(order == position).nonzero().item()])
            assert all(same_bits(b, bits[0]) for b in bits)


def test_nan_in_unused_slots_and_rows_never_reaches_a_result() -> None:
    case = rows_case(3, 0, 4, torch.float32)
    with local_ranks(3, timeout=10) as ranks:
        outs = ranks(lambda comm: comm.combine_rows(case["rows"][comm.rank], *case["maps"][comm.rank]))
    assert not any(out.isnan().any() for out in outs)
    assert any(rows.isnan().any() for rows in case["rows"]) and any(maps[2].isnan().any() for maps in case["maps"])


# ------------------------------------------------------------------------------------------- what a communicator says


def test_a_plan_says_what_runs_and_why_nothing_faster() -> None:
    (comm,) = bicomm.local_world(1, mode="ordered")
    plan = comm.plan()
    assert str(plan) == (
        "mode ordered: contract ordered/1, by shared memory on the CPU (contract.py, torch ops)\n"
        "  not multimem (multimem.py, NVLink switch): the ranks work on CPUs"
    )
    assert comm.plan("multimem").contract == Contract("exact")
    assert comm.plan(Contract("window", (16, 95, 86))).mode == "window(16,95,86)/1"
    assert comm.contract == Contract("ordered") and "rank 0 of 1" in repr(comm) and "ordered/1" in repr(comm)
    (silent,) = bicomm.local_world(1)
    assert silent.contract is None and "no contract of its own" in repr(silent)
    with pytest.raises(ValueError, match="there is no silent default"):
        silent.plan()


def test_software_in_the_switchs_place_is_said_once_and_refused_where_strict() -> None:
    with local_ranks(2, timeout=5) as ranks:
        x = torch.ones(2, 3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                ranks(lambda comm: comm.combine(x, "multimem"))
        assert {w.filename for w in caught if "multimem" in str(w.message)} == {__file__}
        said = [str(w.message) for w in caught if "multimem" in str(w.message)]
        assert len(said) == 1 and "exact/1" in said[0] and "the ranks work on CPUs" in said[0]
    with local_ranks(2, timeout=5) as ranks:
        ranks(lambda comm: setattr(comm, "strict", True))
        for _ in range(2):
            for outcome in ranks.outcomes(lambda comm: comm.combine(x, "multimem")):
                assert isinstance(outcome, BicommError) and "strict=True" in str(outcome)
        ranks(lambda comm: comm.combine(x, "exact"))  # goes on


def test_a_local_world_called_by_one_thread_says_that_it_takes_one_for_each_rank() -> None:
    for comm in bicomm.local_world(3, mode="exact", timeout=0.3):
        with pytest.raises(PeerTimeout, match=r"call each rank's communicator from a thread of its own.*recover"):
            comm.combine(torch.ones(3, 2))


def test_a_world_of_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank, got 0"):
        bicomm.local_world(0)


def test_without_init_an_error_shows_the_two_lines() -> None:
    assert not torch.distributed.is_initialized()
    for call in (lambda: bicomm.combine(torch.ones(1, 1), "exact"), lambda: Communicator(mode="exact")):
        with pytest.raises(NotInitialized, match=r"import bicomm\n +bicomm.init\(\)"):
            call()
    assert world._current is None


def test_a_closed_communicator_says_so_here_and_to_those_who_wait() -> None:
    with local_ranks(3, mode="exact", timeout=30) as ranks:
        ranks(lambda comm: comm.combine(torch.ones(3, 2)))
        ranks.members[1].close()
        ranks.members[1].close()  # twice is once
        start = time.monotonic()
        outcomes = ranks.outcomes(lambda comm: comm.combine(torch.ones(3, 2)))
        assert time.monotonic() - start < 5
        assert "this communicator was closed" in str(outcomes[1])
        assert all("rank 1 has closed" in str(outcomes[r]) for r in (0, 2))


def test_nothing_can_be_had_of_a_closed_communicator() -> None:
    (comm,) = bicomm.local_world(1, mode="exact")
    with comm.acquire(2, 2):
        comm.close()  # what is held can still be given back
    calls = (lambda: comm.acquire(2, 2).__enter__(), lambda: comm.reserve(2, 2), lambda: comm.exchange_counts(1))
    for call in (*calls, comm.memory, comm.check, comm.recover, comm.suspend, comm.barrier, comm.plan):
        with pytest.raises(BicommError, match="was closed"):
            call()


def test_sizes_may_be_integers_of_any_library() -> None:
    for two in (np.int64(2), np.uint8(2), torch.tensor(2), torch.tensor([2])):
        with local_ranks(3, mode="exact", timeout=10) as ranks:

            def work(comm: Communicator, two: Any = two) -> list[Any]:
                comm.reserve(two, two)
                with comm.acquire(3, two) as buffer:  # every call tells the others what is held
                    buffer.fill_(1.0)
                    told = [comm.combine(buffer).tolist()]
                return [*told, comm.exchange_counts(two).tolist(), type(comm.memory()["held"])]

            assert ranks(work) == [[[[3.0, 3.0]], [2, 2, 2], int]] * 3
        made = Request.checked(two, two, "exact", False, torch.device("cpu"), True, None, None, two)
        assert Request(**json.loads(made.encode())).max_tokens == 2


def test_time_outs_come_from_the_caller_the_environment_or_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(timeout: float | None = None) -> tuple[float, float]:
        made = Request.checked(0, 0, "exact", False, torch.device("cpu"), True, timeout, None, 0)
        return made.timeout, made.first_timeout

    for name in ("BICOMM_TIMEOUT", "BICOMM_FIRST_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    assert seconds() == (30.0, 300.0) and seconds(5) == (5.0, 300.0)
    monkeypatch.setenv("BICOMM_TIMEOUT", "7")
    monkeypatch.setenv("BICOMM_FIRST_TIMEOUT", "900")
    assert seconds() == (7.0, 900.0) and seconds(5) == (5.0, 900.0)
    for wrong in ("soon", "inf", "nan", "0", "-3"):
        monkeypatch.setenv("BICOMM_FIRST_TIMEOUT", wrong)
        with pytest.raises(ValueError, match="number of seconds"):
            seconds()


def test_a_call_after_its_communicator_is_gone_says_so() -> None:
    (comm,) = bicomm.local_world(1, mode="exact")
    x = torch.ones(2, 3, requires_grad=True)
    loss = comm.combine(x).sum()
    del comm
    with pytest.raises(BicommError, match="keep it until the last backward pass"):
        loss.backward()


def test_two_threads_of_one_rank_are_refused() -> None:
    import threading

    with local_ranks(2, mode="exact", timeout=3) as ranks:
        first, outcome = ranks.members[0], []

        def wait() -> None:
            try:
                outcome.append(first.combine(torch.ones(2, 2)))
            except BicommError as error:
                outcome.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.3)
        with pytest.raises(RuntimeError, match="two threads of rank 0"):
            first.combine(torch.ones(2, 2))
        ranks.members[1].combine(torch.ones(2, 2))
        thread.join()
        assert torch.equal(outcome[0], torch.full((1, 2), 2.0))


# ----------------------------------------------------------------------------------------------------- buffers, watched


def test_writing_to_a_released_buffer_is_caught_in_debug_mode() -> None:
    with local_ranks(3, mode="exact", timeout=5, debug=True) as ranks:
        kept: dict[int, torch.Tensor] = {}

        def work(comm: Communicator) -> torch.Tensor:
            with comm.acquire(3, 2) as buffer:
                buffer.fill_(1.0)
                kept[comm.rank] = buffer
                return comm.combine(buffer)

        for _ in range(3):
            assert all(torch.equal(out, torch.full((1, 2), 3.0)) for out in ranks(work))
        kept[1].fill_(5.0)
        outcomes = ranks.outcomes(lambda comm: comm.combine(torch.ones(3, 2)))
        assert type(outcomes[1]) is RuntimeError and "was written after it was released" in str(outcomes[1])
        for rank in (0, 2):
            assert isinstance(outcomes[rank], PeerRefused) and "written after it was released" in str(outcomes[rank])
        assert all(torch.equal(out, torch.full((1, 2), 3.0)) for out in ranks(work))


def test_combining_a_released_buffer_is_refused() -> None:
    with local_ranks(2, mode="exact", timeout=5) as ranks:

        def work(comm: Communicator) -> torch.Tensor:
            with comm.acquire(2, 2) as buffer:
                pass
            return comm.combine(buffer)

        assert all("was released" in str(outcome) for outcome in ranks.outcomes(work))


def test_a_result_in_the_operands_own_buffer_is_refused() -> None:
    with local_ranks(2, mode="exact", timeout=5) as ranks:

        def work(comm: Communicator) -> torch.Tensor:
            with comm.acquire(4, 2) as buffer:
                buffer.fill_(1.0)
                return comm.combine(buffer, out=buffer[:2])

        assert all("out lies in the operand's own buffer" in str(outcome) for outcome in ranks.outcomes(work))

        def fine(comm: Communicator) -> torch.Tensor:
            with comm.acquire(4, 2) as buffer, comm.acquire(2, 2) as out:
                buffer.fill_(1.0)
                return comm.combine(buffer, out=out).clone()

        assert all(torch.equal(out, torch.full((2, 2), 2.0)) for out in ranks(fine))


def test_suspending_while_a_buffer_is_held_is_refused() -> None:
    (comm,) = bicomm.local_world(1)
    with comm.acquire(2, 2), pytest.raises(RuntimeError, match="1 acquired buffers are still in use"):
        comm.suspend()
    comm.suspend()
    with pytest.raises(ValueError, match="at least 0 rows"), comm.acquire(-1, 2):
        pass


def test_back_to_back_calls_of_one_buffer_read_what_was_there() -> None:
    """A rank that is ahead must not write over what a slower one still reads."""
    import random

    with local_ranks(3, mode="exact", timeout=20) as ranks:

        def work(comm: Communicator) -> bool:
            chance = random.Random(comm.rank)
            with comm.acquire(30, 40) as buffer:
                for step in range(60):
                    buffer.fill_(float(step * (comm.rank + 1)))
                    if chance.random() < 0.2:
                        time.sleep(chance.random() * 3e-3)
                    if not (comm.combine(buffer) == 6.0 * step).all():
                        return False
            return True

        assert ranks(work) == [True] * 3


def test_the_transport_is_shared_memory_and_a_communicator_can_be_found_by_its_operators() -> None:
    (comm,) = bicomm.local_world(1)
    assert isinstance(comm.transport, CpuTransport)
    from bicomm.operators import ops

    assert ops.of(comm.handle) is comm


def test_a_copied_model_keeps_its_communicator_and_a_pickled_one_is_told_why_not() -> None:
    (comm,) = bicomm.local_world(1, mode="exact")
    layer = torch.nn.Linear(2, 2)
    layer.comm = comm
    assert copy.deepcopy(layer).comm is comm
    with pytest.raises(TypeError, match="belongs to its process"):
        pickle.dumps(comm)


def test_ranks_in_another_order_of_calls_learn_both_sides() -> None:
    with local_ranks(3, mode="exact", timeout=5) as ranks:

        def work(comm: Communicator) -> torch.Tensor:
            x = torch.ones(3, 4)
            return comm.dispatch(x) if comm.rank == 2 else comm.combine(x)

        for outcome in ranks.outcomes(work):
            assert isinstance(outcome, CallMismatch)
            assert "rank 0 combine(contract=exact/1" in str(outcome) and "rank 2 dispatch(" in str(outcome)
        x = partials("normal", 3, 3, 4)
        outs = ranks(lambda comm: comm.combine(x[comm.rank]))
        assert same_bits(torch.cat(outs), torch.cat([want(Contract("exact"), x, [1] * 3, rank) for rank in range(3)]))
