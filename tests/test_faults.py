"""What goes wrong around a communicator: ranks killed, stopped, late, interrupted, throwing; and what is left then."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
from ranks import RankResult, RanksFailed, run_ranks

import bicomm
from bicomm import world
from bicomm.communicator import Communicator
from bicomm.contract import Contract
from bicomm.errors import Aborted, BicommError, PeerTimeout
from combine_cases import partials, want
from worlds import local_ranks, same_bits

pytestmark = [pytest.mark.timeout(120)]
SIZE = 3


def _right(comm: Communicator, seed: int = 0) -> bool:
    x = partials("spread", comm.size, 2 * comm.size, 4, seed)
    return same_bits(comm.combine(x[comm.rank]), want(Contract("exact"), x, [2] * comm.size, comm.rank))


def _outcome(call: Any) -> str:
    start = time.monotonic()
    try:
        return f"gave {call()}"
    except BicommError as error:
        return f"{time.monotonic() - start:4.1f} s {type(error).__name__}: {error}"


def _killed(by: str, moment: str) -> list[str]:
    world.init(device="cpu")
    comm = Communicator(mode="exact", timeout=20, share_memory=by == "shared memory")
    assert _right(comm)
    if comm.rank == 1 and moment == "between calls":
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 1 and moment == "while the others read":
        transport: Any = comm.transport
        transport._calls._step = lambda work: os.kill(os.getpid(), signal.SIGKILL)
    told = [
        _outcome(lambda: _right(comm)),
        _outcome(lambda: _right(comm)),
        _outcome(comm.check),
        _outcome(comm.recover),
    ]
    comm.close()
    return told


@pytest.mark.parametrize("by", ["shared memory", "all-to-all"])
@pytest.mark.parametrize("moment", ["between calls", "while the others read"])
def test_a_killed_rank_is_named_long_before_the_time_out(by: str, moment: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(SIZE, _killed, by, moment, launcher="fork")
    results: list[RankResult] = caught.value.results
    assert [r.returncode for r in results] == [0, None, 0], [r.error for r in results]
    for result in results[::2]:
        for text in result.value:
            assert "PeerTimeout: rank 1 died" in text and float(text.split()[0]) < 6, result.value
        assert "comm" in result.value[0] and "new communicator" in result.value[0]


def _stopped(by: str) -> list[str]:
    world.init(device="cpu")
    comm = Communicator(mode="exact", timeout=2, share_memory=by == "shared memory")
    told = [_outcome(lambda: _right(comm))]
    pids = [int(n) for n in comm.dispatch(torch.tensor([[os.getpid()]]))[:, 0]]
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    told.append(_outcome(lambda: _right(comm)))
    told.append(_outcome(lambda: _right(comm)))
    if comm.rank == 0:
        time.sleep(1.0)
        os.kill(pids[1], signal.SIGCONT)
    time.sleep(0.5)
    comm.recover()
    told += [_outcome(lambda seed=seed: _right(comm, seed)) for seed in range(5)]
    world.shutdown()
    return told


@pytest.mark.parametrize("by", ["shared memory", "all-to-all"])
def test_a_stopped_rank_gets_the_error_too_and_after_recover_all_is_well(by: str) -> None:
    for result in run_ranks(SIZE, _stopped, by, launcher="fork"):
        first, *errors = result.value[:3]
        assert first == "gave True" and result.value[3:] == ["gave True"] * 5
        for text in errors:
            assert "PeerTimeout: rank 1 has not arrived within 2 s" in text and float(text.split()[0]) < 8, text


def test_a_rank_that_is_late_by_less_than_the_time_out_is_waited_for() -> None:
    with local_ranks(SIZE, mode="exact", timeout=10) as ranks:

        def work(comm: Communicator) -> bool:
            time.sleep(2.0 if comm.rank == 2 else 0)
            return _right(comm)

        assert ranks(work) == [True] * SIZE


def test_a_rank_that_comes_after_the_others_gave_up_gets_the_error_and_no_data() -> None:
    """Also where it makes another call than the one that the others gave up: it must not meet their next one."""
    with local_ranks(SIZE, mode="exact", timeout=0.5) as ranks:

        def work(comm: Communicator) -> Any:
            if comm.rank == 1:
                time.sleep(2)
                return comm.combine(torch.full((3, 2), 1e9))
            with pytest.raises(PeerTimeout):
                comm.combine(torch.ones(3, 2))
            return comm.combine(torch.zeros(3, 2))

        for outcome in ranks.outcomes(work):
            assert isinstance(outcome, PeerTimeout) and outcome.missing == (1,)
        ranks(lambda comm: comm.recover())
        assert ranks(_right) == [True] * SIZE


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_an_exception_between_two_calls_of_one_rank(calls: int) -> None:
    """The rank that threw is a call behind the others, which learn at the next one what each of them called."""
    with local_ranks(SIZE, mode="exact", timeout=1) as ranks:

        def work(comm: Communicator) -> Any:
            for step in range(calls):
                assert _right(comm, step)
            if comm.rank == 1:
                raise ArithmeticError("the router of rank 1")
            return comm.combine(torch.ones(3, 2))

        outcomes = ranks.outcomes(work)
        assert isinstance(outcomes[1], ArithmeticError)
        assert all(isinstance(outcomes[rank], PeerTimeout) and outcomes[rank].missing == (1,) for rank in (0, 2))
        ranks(lambda comm: comm.recover())
        assert ranks(_right) == [True] * SIZE


def test_an_interrupt_ends_the_call_for_all_and_can_be_recovered_from() -> None:
    """Ctrl-C in a notebook: where the rank was interrupted is unknown; its next call may not be taken for this one."""
    for where in ("waiting", "summing"):
        with local_ranks(SIZE, mode="exact", timeout=20) as ranks:
            calls: Any = ranks.members[1].transport._calls  # type: ignore[attr-defined]
            sync = calls.sync
            real = sync._wait

            def interrupted(word: int, mark: int, *, recovering: bool = False, real: Any = real) -> None:
                if not recovering:
                    raise KeyboardInterrupt
                real(word, mark, recovering=True)

            def work(comm: Communicator) -> Any:
                if comm.rank == 1 and where == "summing":
                    return calls.run(_header(comm), _interrupt, lambda _, __: None)
                return comm.combine(torch.ones(3, 2))

            if where == "waiting":
                sync._wait = interrupted
            outcomes = ranks.outcomes(work)
            sync._wait = real
            assert isinstance(outcomes[1], KeyboardInterrupt)
            for rank in (0, 2):
                assert isinstance(outcomes[rank], Aborted) and "rank 1 aborted" in str(outcomes[rank])
                assert "KeyboardInterrupt" in str(outcomes[rank])
            assert all(isinstance(o, Aborted) for o in ranks.outcomes(_right))
            ranks(lambda comm: comm.recover())
            assert ranks(_right) == [True] * SIZE


def _header(comm: Communicator) -> Any:
    import dataclasses

    transport: Any = comm.transport
    return dataclasses.replace(transport.header("combine", torch.ones(3, 2), (1, 1, 1)), contract="exact/1")


def _interrupt(_: Any) -> None:
    raise KeyboardInterrupt


def test_an_abort_by_one_rank_reaches_all_and_names_it() -> None:
    with local_ranks(SIZE, mode="exact", timeout=20) as ranks:
        start = time.monotonic()

        def work(comm: Communicator) -> Any:
            if comm.rank == 2:
                time.sleep(0.2)
                comm.abort("the loss is NaN")
                return comm.check()
            return _right(comm)

        outcomes = ranks.outcomes(work)
        assert time.monotonic() - start < 5
        assert all(
            isinstance(o, Aborted) and "rank 2 aborted" in str(o) and "the loss is NaN" in str(o) for o in outcomes
        )
        assert all(isinstance(o, Aborted) for o in ranks.outcomes(lambda comm: comm.check()))
        ranks(lambda comm: comm.recover())
        ranks(lambda comm: comm.check())
        assert ranks(_right) == [True] * SIZE


def test_a_fault_in_the_middle_of_a_growth_is_recovered_from() -> None:
    """Some ranks may have the new memory and some not: after recover() they must agree again."""
    with local_ranks(SIZE, mode="exact", timeout=1) as ranks:
        assert ranks(_right) == [True] * SIZE
        transport: Any = ranks.members[1].transport
        real = transport._arenas._allocate

        def lose(nbytes: int) -> Any:
            buffer = real(nbytes)
            if transport.rank == 1:
                raise Exception("this rank alone failed after all have mapped the memory")
            return buffer

        transport._arenas._allocate = lose
        outcomes = ranks.outcomes(lambda comm: comm.combine(torch.ones(3, 10_000)))
        assert "this rank alone failed" in str(outcomes[1]) and "rank 1 could not do its part" in str(outcomes[0])
        transport._arenas._allocate = real
        assert all("held=" in str(o) for o in ranks.outcomes(_right))  # told, and nothing read from the wrong place
        ranks(lambda comm: comm.recover())
        assert ranks(_right) == [True] * SIZE
        outs = ranks(lambda comm: comm.combine(torch.ones(3, 10_000)))
        assert all(torch.equal(out, torch.full((1, 10_000), 3.0)) for out in outs)


def _forked(by: str) -> list[str]:
    """One rank forks a child that does all it can with what it inherited, and ends with its parent's exit functions."""
    w = world.init(device="cpu")
    comm = Communicator(mode="exact", timeout=20, share_memory=by == "shared memory")
    default = bicomm.default_communicator()
    assert _right(comm) and same_bits(bicomm.combine(torch.ones(SIZE, 1), "exact"), torch.full((1, 1), 3.0))
    told: list[str] = []
    if w.rank == 1:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            calls = (lambda: _right(comm), comm.check, comm.abort, comm.recover, lambda: comm.acquire(1, 1).__enter__())
            fronts = (world.init, Communicator, lambda: bicomm.combine(torch.ones(SIZE, 1), "exact"))
            lines = [_outcome(call) for call in (*calls, *fronts)]
            comm.close()
            world.shutdown()
            os.write(write, "\n".join(lines).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as text:
            told = text.read().splitlines()
        os.waitpid(pid, 0)
    else:
        time.sleep(0.5)  # a rank that waits looks whether the others have closed
    assert same_bits(default.combine(torch.ones(SIZE, 1), "exact"), torch.full((1, 1), 3.0))
    assert _right(comm, 1) and _right(Communicator(mode="exact", timeout=20), 3)
    world.shutdown()
    return told


@pytest.mark.parametrize("by", ["shared memory", "all-to-all"])
def test_a_fork_of_a_rank_is_no_rank(by: str) -> None:
    _, told, _ = (r.value for r in run_ranks(SIZE, _forked, by, launcher="fork"))
    assert len(told) == 8
    assert all("was forked from process" in line and "is no" in line.replace("none itself", "no") for line in told), (
        told
    )


def test_random_delays_aborts_and_recoveries() -> None:
    """Whatever happens, a result that is returned is right."""
    with local_ranks(SIZE, mode="exact", timeout=20) as ranks:
        gate = threading.Barrier(SIZE)

        def work(comm: Communicator) -> tuple[int, int]:
            chance, wrong, lost = random.Random(comm.rank), 0, 0
            for epoch in range(25):
                for step in range(8):
                    try:
                        if chance.random() < 0.15:
                            time.sleep(chance.random() * 2e-3)
                        if chance.random() < 0.03:
                            comm.abort("chance")
                        wrong += not _right(comm, 100 * epoch + step)
                    except BicommError:
                        lost += 1
                        break
                gate.wait(20)
                comm.recover()
            return wrong, lost

        outcomes = ranks(work)
        assert [wrong for wrong, _ in outcomes] == [0] * SIZE and min(lost for _, lost in outcomes) > 2


# ------------------------------------------------------------------------------------------------------ what is left


def _made_and_destroyed(by: str, count: int, how: str) -> dict[str, Any]:
    w = world.init(device="cpu")

    def once(step: int) -> None:
        comm = Communicator(mode="exact", max_tokens=64, hidden=64, timeout=30, share_memory=by == "shared memory")
        assert _right(comm, step)
        if how == "closed" or (how == "some closed" and (step + w.rank) % 2):
            comm.close()

    def usage() -> dict[str, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            segments = sum("bicomm-" in line for line in maps)
        names = sum(name.startswith("bicomm-") for name in os.listdir("/dev/shm"))
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "segments": segments,
            "names": names,
        }

    for step in range(3):
        once(step)
    before = usage()
    for step in range(count):
        once(step)
    after = usage()
    world.shutdown()
    return {"before": before, "after": after}


@pytest.mark.parametrize(
    ("by", "count", "how"),
    [("shared memory", 200, "closed"), ("shared memory", 40, "dropped"), ("all-to-all", 40, "closed"),
     ("all-to-all", 20, "some closed")],
)  # fmt: skip
def test_communicators_made_and_destroyed_leave_nothing(by: str, count: int, how: str) -> None:
    for result in run_ranks(SIZE, _made_and_destroyed, by, count, how, launcher="fork", timeout=100):
        assert all(result.value["after"][what] <= count for what, count in result.value["before"].items()), result.value
        assert result.value["after"]["segments"] == result.value["after"]["names"] == 0
