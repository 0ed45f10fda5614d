"""The device protocol of bicomm/kernels/barrier.py, proved by enumeration: three ranks, two consecutive calls, every
interleaving, at most one rank that gives up at any wait, and the recovery after it.

compute-sanitizer's race checker sees shared memory only, so the barriers are checked here as a model. A rank's steps
are those of the kernels: write the operand, push an arrival to each peer, wait, read each peer's operand, push a
leave to each peer, wait. Safety: what is read is what that peer wrote for this very call. Liveness: no state is
stuck. Each rule of the protocol is then removed in turn, and the enumeration must find the harm.
"""

from __future__ import annotations

import dataclasses

import pytest

RANKS, CALLS, EPOCHS = 3, 2, 2
PEERS = {r: tuple(p for p in range(RANKS) if p != r) for r in range(RANKS)}
WRITE, ARRIVE, WAIT_ALL, READ, LEAVE, WAIT_LEFT, TELL, LOST, RECOVERED, DONE = range(10)


@dataclasses.dataclass(frozen=True)
class Rules:
    """The protocol, rule by rule."""

    trailing: bool = True  # nobody writes again before all have read
    tell: bool = True  # who gives up writes LOST to all ranks
    new_epoch: bool = True  # recovery makes every later generation larger than all old ones
    together: bool = True  # recovery waits for all ranks
    wait: bool = True  # nobody reads before all have arrived


@dataclasses.dataclass(frozen=True)
class Rank:
    """step: where it stands; peer: which peer the step is at; epoch and call: which call it is in."""

    step: int = WRITE
    peer: int = 0
    epoch: int = 1
    call: int = 1
    operand: tuple[int, int] = (0, 0)  # (epoch, call) of what lies in its buffer
    arrivals: tuple[int, ...] = (0,) * RANKS  # in its own memory, written by its peers
    leaves: tuple[int, ...] = (0,) * RANKS
    lost: int = 0


World = tuple[tuple[Rank, ...], int]  # the ranks, and how many may still give up


def generation(rank: Rank, rules: Rules) -> int:
    return (rank.epoch if rules.new_epoch else 1) * 100 + rank.call


def put(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def change(ranks: tuple[Rank, ...], r: int, **fields: object) -> tuple[Rank, ...]:
    return (*ranks[:r], dataclasses.replace(ranks[r], **fields), *ranks[r + 1 :])  # type: ignore[arg-type]


def onward(ranks: tuple[Rank, ...], r: int, step: int) -> tuple[Rank, ...]:
    """The same step at the next peer, or the next step."""
    last = ranks[r].peer + 1 == len(PEERS[r])
    return change(ranks, r, step=step if last else ranks[r].step, peer=0 if last else ranks[r].peer + 1)


def next_call(ranks: tuple[Rank, ...], r: int) -> tuple[Rank, ...]:
    if ranks[r].call == CALLS:
        return change(ranks, r, step=DONE)
    return change(ranks, r, step=WRITE, call=ranks[r].call + 1)


def steps_of(world: World, r: int, rules: Rules) -> list[World]:
    """Every state that one step of rank r can lead to. Raises AssertionError where it reads what it must not."""
    ranks, may_give_up = world
    me = ranks[r]
    number = generation(me, rules)
    gone = me.lost >= me.epoch
    if me.step == WRITE:
        if gone:
            return [(change(ranks, r, step=LOST), may_give_up)]
        return [(change(ranks, r, step=ARRIVE, operand=(me.epoch, me.call)), may_give_up)]
    if me.step == ARRIVE:
        peer = PEERS[r][me.peer]
        told = change(ranks, peer, arrivals=put(ranks[peer].arrivals, r, number))
        return [(onward(told, r, WAIT_ALL if rules.wait else READ), may_give_up)]
    if me.step in (WAIT_ALL, WAIT_LEFT):
        flags = me.arrivals if me.step == WAIT_ALL else me.leaves
        if all(flags[p] >= number for p in PEERS[r]):
            passed = change(ranks, r, step=READ) if me.step == WAIT_ALL else next_call(ranks, r)
            return [(passed, may_give_up)]
        if gone:
            return [(change(ranks, r, step=LOST), may_give_up)]
        if may_give_up:
            return [(change(ranks, r, step=TELL, lost=me.epoch), may_give_up - 1)]
        return []
    if me.step == READ:
        peer = PEERS[r][me.peer]
        read_now, due = ranks[peer].operand, (me.epoch, me.call)
        assert read_now == due, f"rank {r} read {read_now} in {due}"
        read = onward(ranks, r, LEAVE)
        if read[r].step == LEAVE and not rules.trailing:
            read = next_call(read, r)
        return [(read, may_give_up)]
    if me.step == LEAVE:
        peer = PEERS[r][me.peer]
        told = change(ranks, peer, leaves=put(ranks[peer].leaves, r, number))
        return [(onward(told, r, WAIT_LEFT), may_give_up)]
    if me.step == TELL:
        peer = PEERS[r][me.peer]
        told = change(ranks, peer, lost=max(ranks[peer].lost, me.epoch)) if rules.tell else ranks
        return [(onward(told, r, LOST), may_give_up)]
    if me.step == DONE and gone and me.epoch < EPOCHS:
        return [(change(ranks, r, step=LOST), may_give_up)]  # its next host call raises
    if me.step == LOST and me.epoch < EPOCHS:  # the host's recover(): its device is idle
        return [(change(ranks, r, step=RECOVERED), may_give_up)]
    if me.step == RECOVERED:
        # All ranks' hosts have met at the store once each is here; then each goes on by itself.
        here = all(ranks[p].step == RECOVERED or ranks[p].epoch > me.epoch for p in PEERS[r])
        if here or not rules.together:
            return [(change(ranks, r, step=WRITE, epoch=me.epoch + 1, call=1), may_give_up)]
    return []


def explore(rules: Rules, faults: int) -> tuple[int, list[World]]:
    """All states that can be reached: their number, and those where nothing moves though some rank is not done."""
    start: World = (tuple(Rank() for _ in range(RANKS)), faults)
    seen, front, stuck = {start}, [start], []
    while front:
        world = front.pop()
        after = [state for r in range(RANKS) for state in steps_of(world, r, rules)]
        if not after and any(rank.step != DONE for rank in world[0]):
            stuck.append(world)
        for state in after:
            if state not in seen:
                seen.add(state)
                front.append(state)
    return len(seen), stuck


@pytest.mark.parametrize("faults", [0, 1])
def test_every_interleaving_reads_the_right_operand_and_ends(faults: int) -> None:
    states, stuck = explore(Rules(), faults)
    assert not stuck
    assert states > 500


def test_without_the_leading_wait_a_rank_reads_too_early() -> None:
    with pytest.raises(AssertionError, match="read"):
        explore(Rules(wait=False), 0)


def test_without_the_trailing_barrier_an_operand_is_overwritten_unread() -> None:
    with pytest.raises(AssertionError, match="read"):
        explore(Rules(trailing=False), 0)


def test_without_a_new_epoch_a_late_flag_passes_for_a_new_one() -> None:
    with pytest.raises(AssertionError, match="read"):
        explore(Rules(new_epoch=False), 1)


def test_without_the_lost_word_the_others_wait_for_ever() -> None:
    _, stuck = explore(Rules(tell=False), 1)
    assert stuck


def test_without_meeting_in_recovery_a_rank_that_is_not_lost_yet_is_waited_for() -> None:
    """The late rank still works in the old epoch: a wait of the new one then runs out, and nobody may give up again."""
    try:
        _, stuck = explore(Rules(together=False), 1)
    except AssertionError:
        return
    assert stuck
