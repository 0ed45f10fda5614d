"""Flags in shared memory: what an exchange gives, and what all ranks learn when one is late, aborts, dies or leaves."""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bicomm.agreement import flags
from bicomm.agreement.flags import FlagSync, control_bytes
from bicomm.errors import Aborted, PeerTimeout
from worlds import Ranks

pytestmark = pytest.mark.timeout(60)


def _flags(size: int, timeout: float = 5.0) -> Ranks[FlagSync]:
    memory = np.zeros(control_bytes(size), np.uint8)
    return Ranks([FlagSync(memory, rank, size, timeout) for rank in range(size)])


def _message(rank: int, number: int) -> bytes:
    return f"{rank}:{number}".encode() * (1 + (rank + number) % 5)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 12])
def test_every_rank_gets_every_message(size: int) -> None:
    ranks = _flags(size)

    def talk(sync: FlagSync) -> bool:
        return all(
            sync.exchange(_message(sync.rank, number)) == [_message(rank, number) for rank in range(size)]
            for number in range(50)
        )

    assert ranks(talk) == [True] * size


def test_messages_stay_apart_under_random_delays() -> None:
    ranks = _flags(3)

    def talk(sync: FlagSync) -> bool:
        chance = random.Random(sync.rank)
        for number in range(300):
            if chance.random() < 0.2:
                time.sleep(chance.random() * 2e-3)
            if sync.exchange(_message(sync.rank, number)) != [_message(rank, number) for rank in range(3)]:
                return False
        return True

    assert ranks(talk) == [True] * 3


def test_an_empty_and_the_longest_message() -> None:
    longest = b"x" * (flags.message_bytes(2) - 4)
    ranks = _flags(2)
    assert ranks(lambda sync: sync.exchange(longest if sync.rank else b"")) == [[b"", longest]] * 2
    # One byte more is refused before anything is sent, so the ranks are still in step.
    assert all(isinstance(o, ValueError) for o in ranks.outcomes(lambda sync: sync.exchange(longest + b"x")))
    assert ranks(lambda sync: sync.exchange(b"on")) == [[b"on", b"on"]] * 2


def test_a_rank_that_does_not_come_is_named_and_comes_too_late() -> None:
    ranks = _flags(4, timeout=0.4)
    ranks(lambda sync: sync.exchange(b"first"))
    late = threading.Event()

    def work(sync: FlagSync) -> list[bytes]:
        if sync.rank == 2:
            late.wait()
        else:
            try:
                return sync.exchange(b"second")
            finally:
                late.set()
        return sync.exchange(b"too late")

    start = time.monotonic()
    outcomes = ranks.outcomes(work)
    assert time.monotonic() - start < 3
    for outcome in outcomes:
        assert isinstance(outcome, PeerTimeout)
        assert outcome.missing == (2,) and outcome.sequence == 2 and outcome.waiting in (0, 1, 3)
        assert "rank 2 has not arrived within 0.4 s" in str(outcome)
    # Nobody gets through until all recover; then a new exchange gives new messages only.
    for outcome in ranks.outcomes(lambda sync: sync.exchange(b"third")):
        assert isinstance(outcome, PeerTimeout) and outcome.missing == (2,)
    ranks(lambda sync: sync.recover())
    assert ranks(lambda sync: sync.exchange(b"%d" % sync.rank)) == [[b"0", b"1", b"2", b"3"]] * 4


def test_several_missing_ranks_are_all_named() -> None:
    ranks = _flags(5, timeout=0.3)
    outcomes = ranks.outcomes(lambda sync: sync.exchange(b"") if sync.rank < 2 else None)
    assert [getattr(outcome, "missing", None) for outcome in outcomes] == [(2, 3, 4)] * 2 + [None] * 3
    assert "ranks 2, 3, 4 have not arrived" in str(outcomes[0])


@pytest.mark.parametrize("reason", ["the loss is NaN", '\u6e29\u5ea6 \u00e9\n\x00"quoted\\' * 300, "\ud800", ""])
def test_an_abort_reaches_those_that_wait_and_those_that_come(reason: str) -> None:
    ranks = _flags(3)
    waiting = threading.Event()

    def work(sync: FlagSync) -> Any:
        if sync.rank == 0:
            waiting.wait()
            time.sleep(0.05)
            sync.abort(reason)
        elif sync.rank == 1:
            waiting.set()
        else:
            time.sleep(0.3)
        return sync.exchange(b"")

    start = time.monotonic()
    outcomes = ranks.outcomes(work)
    assert time.monotonic() - start < 3
    told = reason[:4].strip("\ud800")
    assert all(isinstance(o, Aborted) and "rank 0 aborted" in str(o) and told in str(o) for o in outcomes)


def test_the_first_record_stays() -> None:
    ranks = _flags(2)
    ranks.members[0].abort("one")
    ranks.members[0].abort("two")
    with pytest.raises(Aborted, match="one"):
        ranks.members[1].check()


def test_recovering_needs_all_ranks_and_can_be_tried_again() -> None:
    ranks = _flags(3, timeout=0.3)
    ranks.members[1].abort("x")
    outcomes = ranks.outcomes(lambda sync: sync.recover() if sync.rank else None)
    assert outcomes[0] is None
    assert all(isinstance(o, PeerTimeout) and o.missing == (0,) and "recover()" in str(o) for o in outcomes[1:])
    # Still lost for everybody; then all come, in any order.
    assert all(isinstance(o, Aborted) for o in ranks.outcomes(lambda sync: sync.exchange(b"")))
    ranks(lambda sync: time.sleep(0.05 * sync.rank) or sync.recover())
    assert ranks(lambda sync: sync.exchange(b"a")) == [[b"a"] * 3] * 3


def test_a_rank_that_missed_a_recovery_gets_no_flag_of_the_next_epoch() -> None:
    """Ranks 0 and 1 give up on a recovery that rank 2 then finds complete: it must wait for them, not use old flags."""
    ranks = _flags(3, timeout=0.4)
    ranks(lambda sync: sync.exchange(b"old"))
    ranks.members[0].abort("x")
    ranks.outcomes(lambda sync: sync.recover() if sync.rank < 2 else None)

    def work(sync: FlagSync) -> Any:
        if sync.rank == 2:
            sync.recover()  # the others have been there
            return sync.exchange(b"new from 2")
        time.sleep(0.1)
        with pytest.raises(Aborted):
            sync.exchange(b"not yet")
        sync.recover()
        return sync.exchange(b"new from %d" % sync.rank)

    assert ranks(work) == [[b"new from 0", b"new from 1", b"new from 2"]] * 3


def test_epochs_pass_many_times() -> None:
    ranks = _flags(3)
    for epoch in range(20):
        ranks.members[epoch % 3].abort(str(epoch))
        ranks(lambda sync: sync.recover())
        for number in range(epoch % 3):
            assert ranks(lambda sync, n=number: sync.exchange(b"%d" % n)) == [[b"%d" % number] * 3] * 3


def test_a_rank_that_closed_is_not_waited_for() -> None:
    ranks = _flags(3, timeout=30)
    start = time.monotonic()
    outcomes = ranks.outcomes(lambda sync: sync.close() if sync.rank == 1 else sync.exchange(b""))
    assert time.monotonic() - start < 5
    assert all(isinstance(o, PeerTimeout) and o.missing == (1,) for o in outcomes[::2])
    assert "rank 1 has closed this communicator" in str(outcomes[0])


def test_closing_after_an_exchange_takes_nothing_from_the_others() -> None:
    for _ in range(50):
        ranks = _flags(3, timeout=10)

        def last(sync: FlagSync) -> list[bytes]:
            try:
                return sync.exchange(b"bye")
            finally:
                sync.close()

        assert ranks(last) == [[b"bye"] * 3] * 3
        ranks.close()


def test_a_clock_that_stood_still_for_the_whole_job_is_no_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z and fg stop every rank: the first to wake must not blame those that still sleep."""
    ranks = _flags(2, timeout=1.0)
    real, gap = time.monotonic, [0.0]
    monkeypatch.setattr(flags.time, "monotonic", lambda: real() + gap[0])

    def work(sync: FlagSync) -> list[bytes]:
        if sync.rank == 1:
            time.sleep(0.4)
            gap[0] = 3600.0
            time.sleep(0.3)
        return sync.exchange(b"awake")

    assert ranks(work) == [[b"awake"] * 2] * 2


# ------------------------------------------------------------------------------------------- processes of their own


def _forked(size: int, timeout: float, work: Callable[[FlagSync], None]) -> tuple[FlagSync, list[int]]:
    """Rank 0 here, the others in forked processes that run `work` and end."""
    memory = np.frombuffer(mmap.mmap(-1, control_bytes(size)), np.uint8)
    children = []
    for rank in range(1, size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work(FlagSync(memory, rank, size, timeout))
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    return FlagSync(memory, 0, size, timeout), children


def test_a_dead_process_is_noticed_long_before_the_time_out() -> None:
    def work(sync: FlagSync) -> None:
        sync.exchange(b"")
        if sync.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        sync.exchange(b"")

    sync, children = _forked(3, 30.0, work)
    sync.exchange(b"")
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"rank 2 died \(rank [01] waited") as caught:
        sync.exchange(b"")  # the dead child is a zombie until it is waited for, which counts as dead
    assert caught.value.missing == (2,) and time.monotonic() - start < 5
    with pytest.raises(PeerTimeout, match="died"):  # nor can it come back
        sync.recover()
    for pid in children:
        os.waitpid(pid, 0)


def test_a_stopped_process_is_late_and_not_dead() -> None:
    def work(sync: FlagSync) -> None:
        sync.exchange(b"")
        if sync.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(PeerTimeout, match="rank 1 has not arrived"):
            sync.exchange(b"")
        sync.recover()
        sync.exchange(b"%d" % sync.rank)

    sync, children = _forked(3, 1.0, work)
    sync.exchange(b"")
    with pytest.raises(PeerTimeout, match="rank 1 has not arrived within 1 s"):
        sync.exchange(b"")
    os.kill(children[0], signal.SIGCONT)
    sync.recover()
    assert sync.exchange(b"0") == [b"0", b"1", b"2"]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]


def test_a_process_of_another_pid_namespace_is_never_taken_for_dead() -> None:
    ranks = _flags(2, timeout=0.5)
    words = ranks.members[0]._words
    words[1, flags._PID] = 2**30  # no such process here, which says nothing if the number is of another namespace
    words[1, flags._SPACE] += 1
    outcome = ranks.outcomes(lambda sync: sync.exchange(b"") if sync.rank == 0 else None)[0]
    assert "has not arrived within" in str(outcome)
    words[1, flags._SPACE] -= 1
    ranks = _flags(2, timeout=30)
    ranks.members[0]._words[1, flags._PID] = 2**30
    outcome = ranks.outcomes(lambda sync: sync.exchange(b"") if sync.rank == 0 else None)[0]
    assert "rank 1 died" in str(outcome)
