"""Agreement over a store: the same words as the flags, for ranks that share no memory."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bicomm.agreement import store as store_module
from bicomm.agreement.store import StoreSync
from bicomm.errors import Aborted, PeerTimeout
from worlds import Ranks

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)


def _syncs(store: dist.Store, size: int, timeout: float = 5.0) -> Ranks[StoreSync]:
    def client() -> dist.Store:  # each rank its own connection, as in real life: a wait blocks the one it is on
        return dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=30))  # type: ignore[attr-defined]

    return Ranks([StoreSync(dist.PrefixStore("one", client()), rank, size, timeout) for rank in range(size)])


@pytest.mark.parametrize("size", [1, 3, 5])
def test_every_rank_gets_every_message(store: dist.Store, size: int) -> None:
    ranks = _syncs(store, size)

    def talk(sync: StoreSync) -> bool:
        chance = random.Random(sync.rank)
        for number in range(20):
            if chance.random() < 0.2:
                time.sleep(chance.random() * 0.01)
            told = sync.exchange(f"{sync.rank}:{number}\0\xff".encode("latin1") if number else b"")
            if number and told != [f"{rank}:{number}\0\xff".encode("latin1") for rank in range(size)]:
                return False
        return True

    assert ranks(talk) == [True] * size


def test_the_store_does_not_grow_with_the_calls(store: dist.Store) -> None:
    ranks = _syncs(store, 3)
    ranks(lambda sync: [sync.exchange(b"x") for _ in range(5)])
    before = store.num_keys()
    ranks(lambda sync: [sync.exchange(b"x") for _ in range(50)])
    assert store.num_keys() == before


def test_a_rank_that_does_not_come_is_named_and_comes_too_late(store: dist.Store) -> None:
    ranks = _syncs(store, 3, timeout=0.6)
    ranks(lambda sync: sync.exchange(b"first"))

    def work(sync: StoreSync) -> list[bytes]:
        if sync.rank == 2:
            time.sleep(1.5)
        return sync.exchange(b"second")

    start = time.monotonic()
    outcomes = ranks.outcomes(work)
    assert time.monotonic() - start < 4
    for outcome in outcomes:
        assert isinstance(outcome, PeerTimeout) and outcome.missing == (2,) and outcome.sequence == 2
    assert all(isinstance(o, PeerTimeout) for o in ranks.outcomes(lambda sync: sync.exchange(b"third")))
    ranks(lambda sync: sync.recover())
    assert ranks(lambda sync: sync.exchange(b"%d" % sync.rank)) == [[b"0", b"1", b"2"]] * 3
    assert [sync.epoch for sync in ranks.members] == [2] * 3


def test_an_abort_reaches_those_that_wait_and_those_that_come(store: dist.Store) -> None:
    ranks = _syncs(store, 3)

    def work(sync: StoreSync) -> Any:
        if sync.rank == 0:
            time.sleep(0.1)
            sync.abort("the loss is \u221e\n")
        elif sync.rank == 1:
            time.sleep(0.4)
        return sync.exchange(b"")

    outcomes = ranks.outcomes(work)
    assert all(isinstance(o, Aborted) and "rank 0 aborted" in str(o) and "\u221e" in str(o) for o in outcomes)
    with pytest.raises(Aborted):
        ranks.members[1].check()
    ranks(lambda sync: sync.recover())
    ranks.members[1].check()


def test_recovering_needs_all_ranks_and_can_be_tried_again(store: dist.Store) -> None:
    ranks = _syncs(store, 3, timeout=0.5)
    ranks.members[1].abort("x")
    outcomes = ranks.outcomes(lambda sync: sync.recover() if sync.rank else None)
    assert all(isinstance(o, PeerTimeout) and o.missing == (0,) for o in outcomes[1:])
    ranks(lambda sync: sync.recover())
    assert ranks(lambda sync: sync.exchange(b"a")) == [[b"a"] * 3] * 3


def test_whoever_came_at_the_last_moment_is_not_missing(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends without the last rank, which arrives before anybody looks who is missing."""
    (alone,) = _syncs(store, 1).members

    class NeverInTime:
        looks = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def check(self, keys: list[str]) -> bool:
            self.looks += "1/1/0" in keys
            return self.looks != 1 and real.check(keys)

    real, alone._store = alone._store, NeverInTime()  # type: ignore[assignment]
    monkeypatch.setattr(store_module, "_SLICE", 0.0)
    alone.timeout = -1.0
    assert alone.exchange(b"here") == [b"here"]


def test_a_rank_that_closed_is_not_waited_for(store: dist.Store) -> None:
    ranks = _syncs(store, 3, timeout=30)
    start = time.monotonic()
    outcomes = ranks.outcomes(lambda sync: sync.close() if sync.rank == 1 else sync.exchange(b""))
    assert time.monotonic() - start < 5
    assert all(isinstance(o, PeerTimeout) and o.missing == (1,) and "closed" in str(o) for o in outcomes[::2])


def test_a_dead_process_is_noticed_long_before_the_time_out(store: dist.Store) -> None:
    ranks = _syncs(store, 3, timeout=30)
    process = subprocess.Popen(["sleep", "60"])
    sync = ranks.members[0]
    words = sync._get("process/2").decode().split(",")
    started = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    sync._set("process/2", ",".join([words[0], f" {process.pid}", f" {started}", words[3]]).encode())
    process.kill()
    process.wait()
    start = time.monotonic()
    outcomes = ranks.outcomes(lambda sync: sync.exchange(b"") if sync.rank < 2 else None)
    assert time.monotonic() - start < 5
    assert all(isinstance(o, PeerTimeout) and o.missing == (2,) and "rank 2 died" in str(o) for o in outcomes[:2])


def test_a_store_that_is_gone_is_an_error_that_says_so() -> None:
    script = (
        "import sys, time; import torch.distributed as d; from datetime import timedelta as t\n"
        "s = d.TCPStore('127.0.0.1', 0, None, True, t(seconds=9), wait_for_workers=False)\n"
        "print(s.port, flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    port = int(holder.stdout.readline())
    sync = StoreSync(dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=9)), 0, 2, 10.0)
    holder.kill()
    holder.wait()
    with pytest.raises(PeerTimeout, match="lost the group's store"):
        sync.exchange(b"")
    sync.close()  # nobody is left to be told


def test_a_text_is_left_and_read(store: dist.Store) -> None:
    one, two = _syncs(store, 2).members
    one.post("TypeError: x is bfloat16 \ud800")
    assert two.read(0) == "TypeError: x is bfloat16 ?"
