"""Host agreement over a torch.distributed store: the same exchange as flags.py for ranks that share no memory.

A communicator uses it once, when it is made; a group of several hosts uses it at every call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from bicomm.agreement.flags import error_of, lost_record, short
from bicomm.errors import PeerTimeout
from bicomm.ranks.alive import Process
from bicomm.ranks.peers import boot_id

R = TypeVar("R")
_SLICE = 0.25  # seconds between two looks at the abort key and at the processes that are waited for
_PAUSE = 0.01  # seconds between two questions to the store, at most: 100 a second and rank are little to it


class StoreSync:
    """One rank's side: `exchange`, `check`, `abort`, `recover` and `close` mean what they mean in `flags.FlagSync`."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self._store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self._epoch, self._count = 1, 0
        self._set(f"process/{rank}", json.dumps([boot_id(), *dataclasses.astuple(Process.this())]).encode())

    @property
    def epoch(self) -> int:
        """1, and one more after each `recover`; equal on all ranks."""
        return self._epoch

    def exchange(self, message: bytes) -> list[bytes]:
        """Give every rank this rank's message and get all of them, by rank. A full barrier."""
        self.check()
        self._count += 1
        self._set(self._key(self._count, self.rank), message)
        keys = [self._key(self._count, rank) for rank in range(self.size)]
        self._wait(keys, recovering=False)
        messages = self._call(lambda: self._store.multi_get(keys))
        if self._count > 2:  # all ranks have read the exchange before the last
            self._call(lambda: self._store.delete_key(self._key(self._count - 2, self.rank)))
        return [bytes(message) for message in messages]

    def check(self) -> None:
        """Raise if this epoch is lost."""
        if self._has(self._lost()):
            raise error_of(json.loads(self._get(self._lost())), "this communicator's calls")

    def abort(self, reason: str) -> None:
        """End this epoch for all ranks."""
        self._lose({"kind": "abort", "waiting": self.rank, "reason": short(reason)})

    def recover(self) -> None:
        """Open the next epoch; entered by all ranks."""
        self._set(f"recover/{self._epoch}/{self.rank}", b"1")
        self._wait([f"recover/{self._epoch}/{rank}" for rank in range(self.size)], recovering=True)
        self._epoch, self._count = self._epoch + 1, 0

    def close(self) -> None:
        """Tell the others that this rank will not come again: they need not wait for the time-out."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it everybody who would ask
            self._store.set(f"closed/{self.rank}", "1")

    def post(self, text: str) -> None:
        """Leave a text that other ranks may read later."""
        self._set(f"text/{self.rank}", text.encode(errors="replace") or b" ")

    def read(self, rank: int) -> str:
        """What a rank left last; waits briefly for it."""
        for _ in range(200):
            if self._has(f"text/{rank}"):
                return self._get(f"text/{rank}").decode()
            time.sleep(_PAUSE)
        return "its reason did not arrive"

    def _key(self, count: int, rank: int) -> str:
        return f"{self._epoch}/{count}/{rank}"

    def _lost(self) -> str:
        return f"{self._epoch}/lost"

    def _wait(self, keys: list[str], *, recovering: bool) -> None:
        # Not `store.wait`: it prints a warning, on every rank, each time that it runs out of time.
        last = time.monotonic()
        deadline, look, pause = last + self.timeout, last + _SLICE, 100e-6
        while not self._has(*keys):
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE)
            now = time.monotonic()
            if now - last > 1.0:  # this process was stopped; so were the others, perhaps: they get that time too
                deadline += now - last
            last = now
            if now < min(look, deadline):
                continue
            look = now + _SLICE
            missing = [rank for rank, key in enumerate(keys) if not self._has(key)]
            if not missing:
                return
            if not recovering:
                self.check()
            for kind, gone in (("died", self._is_dead), ("closed", self._has_closed)):
                if any(map(gone, missing)):
                    self._give_up(kind, [rank for rank in missing if gone(rank)], recovering)
            if now > deadline:
                self._give_up("late", missing, recovering)

    def _is_dead(self, rank: int) -> bool:
        if not self._has(f"process/{rank}"):
            return False
        boot, *process = json.loads(self._get(f"process/{rank}"))
        return boot == boot_id() and Process(*process).is_dead()

    def _has_closed(self, rank: int) -> bool:
        return self._has(f"closed/{rank}")

    def _give_up(self, kind: str, missing: list[int], recovering: bool) -> NoReturn:
        record = lost_record(kind, self.rank, missing, self._count, self.timeout)
        if recovering:
            raise error_of(record, "recover()")
        self._lose(record)
        raise error_of(record, "this communicator's calls")

    def _lose(self, record: Mapping[str, Any]) -> None:
        if not self._has(self._lost()):
            self._set(self._lost(), json.dumps(record).encode())

    def _has(self, *keys: str) -> bool:
        return self._call(lambda: self._store.check(list(keys)))

    def _get(self, key: str) -> bytes:
        return bytes(self._call(lambda: self._store.get(key)))

    def _set(self, key: str, value: bytes) -> None:
        self._call(lambda: self._store.set(key, value))  # type: ignore[arg-type]  # bytes go in as they are

    def _call(self, work: Callable[[], R]) -> R:
        return _asked(self.rank, work)


def meet(
    store: dist.Store, rank: int, size: int, timeout: float, message: bytes
) -> tuple[StoreSync, dist.Store, list[bytes]]:
    """A new agreement of these ranks, the part of the store that it uses, and what each said in its first exchange.

    Each attempt has a part of the store of its own. Which one is next stands in the store, and whoever leaves an
    attempt moves that on: so a rank that took no part in an attempt which was given up meets the others in the next
    one all the same. Raises PeerTimeout on the ranks that took part.
    """

    def leave(attempt: int) -> None:
        _asked(rank, lambda: store.compare_set("attempt", str(attempt), str(attempt + 1)))

    while True:
        number = _asked(rank, lambda: store.add("attempt", 0))
        own = dist.PrefixStore(str(number), store)
        sync = StoreSync(own, rank, size, timeout)
        try:
            return sync, own, sync.exchange(message)
        except PeerTimeout as error:
            if rank not in error.missing:  # else: the others gave up before this rank came
                raise
        finally:
            leave(number)


def _asked(rank: int, work: Callable[[], R]) -> R:
    try:
        return work()
    except RuntimeError as error:
        raise PeerTimeout(
            f"rank {rank} lost the group's store, which lives in the launcher or on rank 0 ({error}): "
            f"that process has died or cannot be reached; start the job again"
        ) from error
