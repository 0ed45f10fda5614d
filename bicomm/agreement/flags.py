"""Host synchronisation over flags in shared memory: an exchange of small messages that is also a full barrier.

Every rank owns one word that counts its arrivals and two message slots that it uses in turn. An exchange writes the
message, advances the word, and waits until no rank's word is behind. A rank writes a slot again two exchanges later,
which it can only reach after every rank has read the first message, so nothing is overwritten unread.

The words carry an epoch in their upper bits. The first time-out, or `abort`, marks the epoch as lost; from then on
every call of every rank raises, until all ranks enter `recover`, which opens the next epoch. A late rank therefore
never takes an old flag for a new one. Plain stores are seen in order on x86-64 only: other processors use the store
(store.py).
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from bicomm.errors import Aborted, BicommError, PeerTimeout
from bicomm.ranks.alive import Process

_LINE = 64  # a rank's words lie on their own cache line
_EPOCH = 40  # bits below the epoch: 10**12 exchanges
_SPINS = 200  # yields before sleeping: 61-74 us a barrier of 8 ranks on 2 cores, against 4 ms with gloo
_LOOK = 0.2  # seconds between two looks at the clock and at the processes that are waited for
_ARRIVED, _LOST, _RECOVER, _PID, _STARTED, _SPACE, _CLOSED = range(7)


def ordered_stores() -> bool:
    """Whether this processor keeps plain stores in order, which the flags rely on."""
    return platform.machine().lower() in ("x86_64", "amd64")


def message_bytes(size: int) -> int:
    """Bytes of a message slot: a header with the splits of `size` ranks and a refusal fits."""
    return 4096 + _LINE * size


def _record_bytes(size: int) -> int:
    return 2048 + _LINE * size  # who is missing may be nearly everyone


def control_bytes(size: int) -> int:
    """Bytes of shared memory that the flags and message slots of `size` ranks take. Must be zero at first."""
    return size * (_LINE + _record_bytes(size) + 2 * message_bytes(size))


class FlagSync:
    """One rank's side of the flags.

    memory: uint8 array of `control_bytes(size)` bytes that all ranks map, zero when the first of them begins.
    timeout: seconds that an exchange waits before it gives up for the whole group. hint: what to say besides then.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], rank: int, size: int, timeout: float, hint: str = "") -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        words, records = size * _LINE, size * _record_bytes(size)
        self._words = memory[:words].view(np.int64).reshape(size, _LINE // 8)
        self._records = memory[words : words + records].reshape(size, -1)
        self._slots = memory[words + records :].reshape(2, size, -1)
        self._hint = hint
        self._epoch, self._count = 1, 0
        self._losing = threading.Lock()  # abort() may come from another thread
        me = Process.this()
        self._words[rank, [_STARTED, _SPACE, _PID]] = me.started, me.space, me.pid

    def exchange(self, message: bytes) -> list[bytes]:
        """Give every rank this rank's message and get all of them, by rank. A full barrier.

        Raises ValueError for a message that is too long, before anything is sent; PeerTimeout or Aborted.
        """
        slot = self._slots[self._count % 2]
        if len(message) > slot.shape[1] - 4:
            raise ValueError(f"a message between ranks has at most {slot.shape[1] - 4} bytes, got {len(message)}")
        self.check()
        _write(slot[self.rank], message)
        self._count += 1
        mark = (self._epoch << _EPOCH) + self._count
        self._words[self.rank, _ARRIVED] = mark
        self._wait(_ARRIVED, mark)
        return [_read(slot[rank]) for rank in range(self.size)]

    def check(self) -> None:
        """Raise if this epoch is lost: PeerTimeout or Aborted, with the record that the first rank left."""
        lost = np.flatnonzero(self._words[:, _LOST] >= self._epoch)
        if lost.size:
            raise error_of(json.loads(_read(self._records[lost[0]])), "this communicator's calls")

    def abort(self, reason: str) -> None:
        """End this epoch for all ranks: they raise Aborted with this reason until they recover."""
        self._lose({"kind": "abort", "waiting": self.rank, "reason": short(reason)})

    def recover(self) -> None:
        """Open the next epoch; entered by all ranks. Raises PeerTimeout, and changes nothing, if some do not come."""
        following = self._epoch + 1
        self._words[self.rank, _RECOVER] = following
        self._wait(_RECOVER, following, recovering=True)
        self._epoch, self._count = following, 0

    def close(self) -> None:
        """Tell the others that this rank will not come again: they need not wait for the time-out."""
        self._words[self.rank, _CLOSED] = 1

    def _wait(self, word: int, mark: int, *, recovering: bool = False) -> None:
        last = time.monotonic()
        deadline, look, spins = last + self.timeout, last + _LOOK, 0
        while True:
            behind = self._words[:, word] < mark
            if not behind.any():  # also if the epoch was lost since: the messages stay until all ranks recover
                return
            if not recovering:
                self.check()
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
                continue
            time.sleep(50e-6 if spins < 2000 else 1e-3)
            now = time.monotonic()
            if now - last > 1.0:  # this process was stopped; so were the others, perhaps: they get that time too
                deadline += now - last
            last = now
            if now < min(look, deadline):
                continue
            look = now + _LOOK
            missing = [int(rank) for rank in np.flatnonzero(behind)]
            for kind, gone in (("died", self._is_dead), ("closed", self._has_closed)):
                if any(map(gone, missing)):
                    self._give_up(kind, [rank for rank in missing if gone(rank)], recovering)
            if now > deadline:
                self._give_up("late", missing, recovering)

    def _is_dead(self, rank: int) -> bool:
        pid, started, space = (int(self._words[rank, word]) for word in (_PID, _STARTED, _SPACE))
        return bool(pid) and Process(pid, started, space).is_dead()

    def _has_closed(self, rank: int) -> bool:
        return bool(self._words[rank, _CLOSED])

    def _give_up(self, kind: str, missing: list[int], recovering: bool) -> NoReturn:
        record = lost_record(kind, self.rank, missing, self._count, self.timeout)
        if self._hint and kind == "late":
            record["hint"] = self._hint
        if recovering:
            raise error_of(record, "recover()")
        self._lose(record)
        raise error_of(record, "this communicator's calls")

    def _lose(self, record: Mapping[str, Any]) -> None:
        with self._losing:
            if self._words[self.rank, _LOST] < self._epoch:  # the first record stays: others may be reading it
                _write(self._records[self.rank], json.dumps(record, ensure_ascii=False).encode())
                self._words[self.rank, _LOST] = self._epoch


def _write(slot: npt.NDArray[np.uint8], data: bytes) -> None:
    slot[4 : 4 + len(data)] = np.frombuffer(data, np.uint8)
    slot[:4].view(np.int32)[0] = len(data)


def _read(slot: npt.NDArray[np.uint8]) -> bytes:
    return slot[4 : 4 + int(slot[:4].view(np.int32)[0])].tobytes()


def short(text: str) -> str:
    """One line of at most 900 bytes of UTF-8 that JSON at most doubles."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line.encode(errors="replace")[:900].decode(errors="ignore")


def lost_record(kind: str, waiting: int, missing: list[int], sequence: int, seconds: float) -> dict[str, Any]:
    """What the rank that gives up leaves for the others. kind: "late", "died" or "closed"."""
    return {"kind": kind, "waiting": waiting, "missing": missing, "sequence": sequence, "seconds": seconds}


def error_of(record: Mapping[str, Any], where: str) -> BicommError:
    """The exception for the record that the rank which gave up first left behind."""
    waiting, missing = int(record["waiting"]), tuple(record.get("missing", ()))
    if record["kind"] == "abort":
        return Aborted(f"rank {waiting} aborted this communicator: {record['reason']}. {AGAIN}")
    has = "has" if len(missing) == 1 else "have"
    told = {
        "late": f"{has} not arrived within {record['seconds']:g} s",
        "died": "died",
        "closed": f"{has} closed this communicator",
    }[record["kind"]]
    then = AGAIN if record["kind"] == "late" else _WITHOUT
    return PeerTimeout(
        f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} {told} (rank {waiting} waited in "
        f"{where}, exchange {record['sequence']}). {record.get('hint', '')}{then}",
        missing=missing,
        waiting=waiting,
        sequence=int(record["sequence"]),
        kind=record["kind"],
        seconds=record["seconds"],
    )


AGAIN = (
    "Every call raises this until all ranks call comm.recover() together "
    "(bicomm.default_communicator().recover() for bicomm.combine)"
)
_WITHOUT = "Every call raises this: go on with a new communicator of the ranks that are left"
