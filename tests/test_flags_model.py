"""The protocol of agreement/flags.py, enumerated: three ranks, two exchanges, one abort at any moment, one recovery.

Every state that any interleaving can reach is visited. A rank may only ever read messages of the exchange it is in, may
only raise in an epoch that was lost, and the ranks must always come to an end. Each rule of the protocol is then taken
away in turn, and the search must find what goes wrong.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bicomm.agreement.flags import FlagSync, control_bytes
from bicomm.errors import Aborted
from worlds import Ranks

RANKS = 3
EXCHANGES = 2


@dataclasses.dataclass(frozen=True)
class Rules:
    slots: int = 2  # message slots used in turn
    epochs: bool = True  # arrivals carry the epoch
    message_first: bool = True  # the message is written before the arrival
    watch: bool = True  # who waits looks at the lost words
    lost_by_epoch: bool = True  # a lost word counts for its own epoch only
    recover_together: bool = True  # recovery waits for all ranks


@dataclasses.dataclass(frozen=True)
class Rank:
    """at: where in the protocol; done: exchanges since the last recovery; read: messages read in this exchange."""

    at: str = "check"
    epoch: int = 1
    count: int = 0
    done: int = 0
    read: int = 0


@dataclasses.dataclass(frozen=True)
class State:
    ranks: tuple[Rank, ...] = (Rank(),) * RANKS
    arrived: tuple[tuple[int, int], ...] = ((0, 0),) * RANKS
    lost: tuple[int, ...] = (0,) * RANKS
    recover: tuple[int, ...] = (0,) * RANKS
    slots: tuple[tuple[tuple[int, int], ...], ...] = (((0, 0),) * RANKS,) * 2
    aborts: int = 1


class Wrong(Exception):
    """A state that must not be."""


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _is_lost(state: State, rank: Rank, rules: Rules) -> bool:
    lost = any(word >= rank.epoch if rules.lost_by_epoch else word > 0 for word in state.lost)
    if lost and rank.epoch not in state.lost:
        raise Wrong(f"a rank raises in epoch {rank.epoch}, which nobody lost")
    return lost


def _step(state: State, r: int, rules: Rules) -> State | None:
    """The next step of one rank; None where it waits, or has come to its end."""
    me = state.ranks[r]

    def go(**changes: Any) -> State:
        shared = {name: changes.pop(name) for name in ("arrived", "recover", "slots") if name in changes}
        return dataclasses.replace(state, ranks=_put(state.ranks, r, dataclasses.replace(me, **changes)), **shared)

    def write(**changes: Any) -> State:
        slot = me.count % rules.slots if changes.pop("early") else (me.count - 1) % rules.slots
        message = (me.epoch, me.count + 1 if rules.message_first else me.count)
        return go(slots=_put(state.slots, slot, _put(state.slots[slot], r, message)), **changes)

    def arrive(**changes: Any) -> State:
        return go(arrived=_put(state.arrived, r, (me.epoch, me.count + 1)), count=me.count + 1, **changes)

    if me.at == "check":
        return go(at="raise") if _is_lost(state, me, rules) else go(at="first")
    if me.at == "first":
        return write(early=True, at="second") if rules.message_first else arrive(at="second")
    if me.at == "second":
        return arrive(at="wait") if rules.message_first else write(early=False, at="wait")
    if me.at == "wait":
        mark = (me.epoch, me.count) if rules.epochs else (0, me.count)
        here = all((epoch if rules.epochs else 0, count) >= mark for epoch, count in state.arrived)
        return go(at="read") if here else go(at="watch")
    if me.at == "watch":
        return go(at="raise") if rules.watch and _is_lost(state, me, rules) else go(at="wait")
    if me.at == "read":
        message = state.slots[(me.count - 1) % rules.slots][me.read]
        if message != (me.epoch, me.count):
            raise Wrong(f"rank {r} takes {message} of rank {me.read} for its message of {(me.epoch, me.count)}")
        if me.read + 1 < RANKS:
            return go(read=me.read + 1)
        return go(at="check" if me.done + 1 < EXCHANGES else "end", read=0, done=me.done + 1)
    if me.at == "end":  # its next call would raise
        return go(at="raise") if _is_lost(state, me, rules) else None
    if me.at == "raise":
        return go(at="recover", recover=_put(state.recover, r, me.epoch + 1), read=0)
    assert me.at == "recover"
    if rules.recover_together and min(state.recover) < me.epoch + 1:
        return None
    return go(at="check", epoch=me.epoch + 1, count=0, done=0)


def _successors(state: State, rules: Rules) -> Iterator[State]:
    for r in range(RANKS):
        following = _step(state, r, rules)
        if following is not None:
            yield following
        if state.aborts:
            lost = _put(state.lost, r, max(state.lost[r], state.ranks[r].epoch))
            yield dataclasses.replace(state, lost=lost, aborts=0)


def explore(rules: Rules) -> tuple[int, set[int]]:
    """Visit every reachable state: their number, and the epochs in which all ranks ended. Raises Wrong."""
    seen, left, ends = {State()}, [State()], set()
    back: dict[State, list[State]] = {}
    finished = []
    while left:
        state = left.pop()
        if all(rank.at == "end" for rank in state.ranks) and not any(w >= state.ranks[0].epoch for w in state.lost):
            finished.append(state)
            ends.add(state.ranks[0].epoch)
        for following in _successors(state, rules):
            back.setdefault(following, []).append(state)
            if following not in seen:
                seen.add(following)
                left.append(following)
    # From every state some way must lead to the end: else ranks can wait for ever.
    good, left = set(finished), finished
    while left:
        for state in back.get(left.pop(), ()):
            if state not in good:
                good.add(state)
                left.append(state)
    if good != seen:
        raise Wrong(f"{len(seen - good)} states from which the ranks never come to an end: {next(iter(seen - good))}")
    return len(seen), ends


def test_no_interleaving_breaks_the_protocol() -> None:
    states, ends = explore(Rules())
    assert states > 20_000 and ends == {1, 2}


@pytest.mark.parametrize(
    ("rule", "value", "what"),
    [
        ("slots", 1, "takes"),
        ("epochs", False, "takes"),
        ("message_first", False, "takes"),
        ("watch", False, "never come to an end"),
        ("lost_by_epoch", False, "nobody lost"),
        ("recover_together", False, "takes|never come to an end"),
    ],
)
def test_every_rule_is_needed(rule: str, value: Any, what: str) -> None:
    with pytest.raises(Wrong, match=what):
        explore(dataclasses.replace(Rules(), **{rule: value}))


def test_the_real_flags_under_random_delays_and_aborts() -> None:
    """The model's property, on the code itself: threads that switch as often as they can, delays, aborts."""
    memory = np.zeros(control_bytes(RANKS), np.uint8)
    ranks = Ranks([FlagSync(memory, rank, RANKS, 20.0) for rank in range(RANKS)])
    interval, stop = sys.getswitchinterval(), threading.Event()
    aborted, progress = [0] * RANKS, [0] * RANKS

    def watchdog() -> None:
        chance = random.Random(7)
        # Not in the last exchanges: a rank that has left would not come to the recovery.
        while not stop.wait(chance.random() * 0.02) and max(progress) < 350:
            chance.choice(ranks.members).abort("chance")

    def work(sync: FlagSync) -> int:
        chance, wrong, number = random.Random(sync.rank), 0, 0
        while number < 400:
            try:
                # The number of the exchange alone would not show messages of an earlier epoch.
                told = [message.decode().split() for message in sync.exchange(f"{sync._epoch} {number}".encode())]
                wrong += told != [[str(sync._epoch), str(number)]] * RANKS
                number += 1
                progress[sync.rank] = number
                if chance.random() < 0.05:
                    stop.wait(chance.random() * 1e-3)
            except Aborted:
                aborted[sync.rank] += 1
                sync.recover()
                # A rank may have been through one more exchange than another: go on from where the last one is.
                number = max(int(text) for text in _until_it_holds(sync, str(number).encode()))
        return wrong

    sys.setswitchinterval(1e-6)
    dog = threading.Thread(target=watchdog)
    dog.start()
    try:
        assert ranks(work) == [0] * RANKS
    finally:
        stop.set()
        dog.join()
        sys.setswitchinterval(interval)
    assert min(aborted) > 3


def _until_it_holds(sync: FlagSync, message: bytes) -> list[bytes]:
    while True:
        try:
            return sync.exchange(message)
        except Aborted:
            sync.recover()
