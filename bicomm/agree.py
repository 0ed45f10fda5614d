"""Host agreement over a torch.distributed store: the same exchange as flags.py for ranks that share no memory.

A communicator uses it once, when it is made; a group of several hosts uses it at every call.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from bicomm.errors import PeerTimeout
from bicomm.flags import error_of

_SLICE = 0.25  # seconds between two looks at the abort key


class StoreSync:
    """One rank's side: `exchange`, `check`, `abort` and `recover` mean what they mean in `flags.FlagSync`."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self._store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self._epoch, self._count = 1, 0

    def exchange(self, message: bytes) -> list[bytes]:
        """Give every rank this rank's message and get all of them, by rank. A full barrier."""
        self.check()
        self._count += 1
        self._call(lambda: self._store.set(self._key(self._count, self.rank), message))
        keys = [self._key(self._count, rank) for rank in range(self.size)]
        self._wait(keys, recovering=False)
        messages = self._call(lambda: self._store.multi_get(keys))
        if self._count > 2:  # all ranks have read the exchange before the last
            self._call(lambda: self._store.delete_key(self._key(self._count - 2, self.rank)))
        return [bytes(message) for message in messages]

    def check(self) -> None:
        """Raise if this epoch is lost."""
        if self._call(lambda: self._store.check([self._lost()])):
            raise error_of(json.loads(self._store.get(self._lost())), "this communicator's calls")

    def abort(self, reason: str) -> None:
        """End this epoch for all ranks."""
        self._lose({"kind": "abort", "waiting": self.rank, "reason": reason[:1000]})

    def recover(self) -> None:
        """Open the next epoch; entered by all ranks."""
        self._call(lambda: self._store.set(f"recover/{self._epoch}/{self.rank}", b"1"))
        self._wait([f"recover/{self._epoch}/{rank}" for rank in range(self.size)], recovering=True)
        self._epoch, self._count = self._epoch + 1, 0

    def post(self, text: str) -> None:
        """Leave a text that other ranks may read later."""
        self._call(lambda: self._store.set(f"text/{self.rank}", text or " "))

    def read(self, rank: int) -> str:
        """What a rank left last; waits briefly for it."""
        try:
            self._store.wait([f"text/{rank}"], timedelta(seconds=2))
            return bytes(self._store.get(f"text/{rank}")).decode()
        except RuntimeError:
            return "its reason did not arrive"

    def _key(self, count: int, rank: int) -> str:
        return f"{self._epoch}/{count}/{rank}"

    def _lost(self) -> str:
        return f"{self._epoch}/lost"

    def _wait(self, keys: list[str], *, recovering: bool) -> None:
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=_SLICE))
                return
            except RuntimeError as error:  # a slice of the wait went by, or the store is gone
                if time.monotonic() > deadline:
                    self._give_up(keys, recovering)
                if not recovering:
                    self.check()
                elif not isinstance(error, dist.DistStoreError):
                    self._call(lambda: self._store.check(keys))

    def _give_up(self, keys: list[str], recovering: bool) -> NoReturn:
        missing = [rank for rank, key in enumerate(keys) if not self._call(lambda key=key: self._store.check([key]))]  # type: ignore[misc]
        record: dict[str, object] = {
            "kind": "late",
            "waiting": self.rank,
            "missing": missing,
            "sequence": self._count,
            "seconds": self.timeout,
        }
        if recovering:
            raise error_of(record, "recover()")
        self._lose(record)
        raise error_of(record, "this communicator's calls")

    def _lose(self, record: dict[str, object]) -> None:
        if not self._call(lambda: self._store.check([self._lost()])):
            self._call(lambda: self._store.set(self._lost(), json.dumps(record)))

    def _call(self, work):  # type: ignore[no-untyped-def]
        try:
            return work()
        except RuntimeError as error:
            raise PeerTimeout(
                f"rank {self.rank} lost the group's store, which lives in the launcher or on rank 0 ({error}): "
                f"that process has died or cannot be reached; start the job again"
            ) from error
