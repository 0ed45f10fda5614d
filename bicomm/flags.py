"""Host synchronisation over flags in shared memory: an exchange of small messages that is also a full barrier.

Every rank owns one word that counts its arrivals and two message slots that it uses in turn. An exchange writes the
message, advances the word, and waits until no rank's word is behind. A rank writes a slot again two exchanges later,
which it can only reach after every rank has read the first message, so nothing is overwritten unread.

The words carry an epoch in their upper bits. The first time-out, or `abort`, marks the epoch as lost; from then on every
call of every rank raises, until all ranks enter `recover`, which opens the next epoch. A late rank therefore never takes
an old flag for a new one. Plain stores are seen in order on x86-64 only: other processors use the store (agree.py).
"""

from __future__ import annotations

import json
import os
import platform
import time
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from bicomm.errors import Aborted, BicommError, PeerTimeout

MESSAGE = 4096  # bytes of a message slot; a header of 128 ranks' splits fits
_RECORD = 1536
_LINE = 64  # a rank's words lie on their own cache line
_EPOCH = 40  # bits below the epoch: 10**12 exchanges
_SPINS = 200  # yields before sleeping: 61-74 us a barrier of 8 ranks on 2 cores, against 4 ms with gloo
_ARRIVED, _LOST, _RECOVER, _PID, _STARTED = range(5)


def ordered_stores() -> bool:
    """Whether this processor keeps plain stores in order, which the flags rely on."""
    return platform.machine().lower() in ("x86_64", "amd64")


def control_bytes(size: int) -> int:
    """Bytes of shared memory that the flags and message slots of `size` ranks take. Must be zero at first."""
    return size * (_LINE + _RECORD + 2 * MESSAGE)


def _process_start(pid: int) -> int:
    """When a process started, in clock ticks; 0 if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


class FlagSync:
    """One rank's side of the flags.

    memory: uint8 array of `control_bytes(size)` bytes that all ranks map, zero when the first of them begins.
    timeout: seconds that an exchange waits before it gives up for the whole group.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        words, records = size * _LINE, size * _RECORD
        self._words = memory[:words].view(np.int64).reshape(size, _LINE // 8)
        self._records = memory[words : words + records].reshape(size, _RECORD)
        self._slots = memory[words + records :].reshape(2, size, MESSAGE)
        self._epoch, self._count = 1, 0
        self._words[rank, _STARTED] = _process_start(os.getpid())
        self._words[rank, _PID] = os.getpid()

    def exchange(self, message: bytes) -> list[bytes]:
        """Give every rank this rank's message (at most 4,092 bytes) and get all of them, by rank. A full barrier."""
        if len(message) > MESSAGE - 4:
            raise ValueError(f"a message between ranks has at most {MESSAGE - 4} bytes, got {len(message)}")
        self.check()
        slot = self._slots[self._count % 2]
        slot[self.rank, 4 : 4 + len(message)] = np.frombuffer(message, np.uint8)
        slot[self.rank, :4].view(np.int32)[0] = len(message)
        self._count += 1
        mark = (self._epoch << _EPOCH) + self._count
        self._words[self.rank, _ARRIVED] = mark
        self._wait(_ARRIVED, mark)
        lengths = slot[:, :4].copy().view(np.int32)[:, 0]
        return [slot[r, 4 : 4 + lengths[r]].tobytes() for r in range(self.size)]

    def check(self) -> None:
        """Raise if this epoch is lost: PeerTimeout or Aborted, with the record that the first rank left."""
        lost = self._words[:, _LOST] >= self._epoch
        if lost.any():
            self._raise_lost(int(np.flatnonzero(lost)[0]))

    def abort(self, reason: str) -> None:
        """End this epoch for all ranks: they raise Aborted with this reason until they recover."""
        self._lose({"kind": "abort", "waiting": self.rank, "reason": reason[:1000]})

    def recover(self) -> None:
        """Open the next epoch; entered by all ranks. Raises PeerTimeout, and changes nothing, if some do not come."""
        following = self._epoch + 1
        self._words[self.rank, _RECOVER] = following
        self._wait(_RECOVER, following, recovering=True)
        self._epoch, self._count = following, 0

    def _wait(self, word: int, mark: int, *, recovering: bool = False) -> None:
        deadline = time.monotonic() + self.timeout
        spins, look = 0, time.monotonic() + 0.2
        while True:
            if not recovering and (self._words[:, _LOST] >= self._epoch).any():
                self.check()
            behind = self._words[:, word] < mark
            if not behind.any():
                return
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
                continue
            time.sleep(50e-6 if spins < 2000 else 1e-3)
            now = time.monotonic()
            if now < look:
                continue
            look = now + 0.2
            missing = [int(r) for r in np.flatnonzero(behind)]
            dead = [r for r in missing if self._is_dead(r)]
            if dead or now > deadline:
                self._give_up(dead or missing, bool(dead), recovering)

    def _is_dead(self, rank: int) -> bool:
        pid, started = int(self._words[rank, _PID]), int(self._words[rank, _STARTED])
        return bool(pid and started) and _process_start(pid) != started

    def _give_up(self, missing: list[int], died: bool, recovering: bool) -> NoReturn:
        record = {
            "kind": "died" if died else "late",
            "waiting": self.rank,
            "missing": missing,
            "sequence": self._count,
            "seconds": self.timeout,
        }
        if recovering:
            raise _error(record, recovering=True)
        self._lose(record)
        raise _error(record)

    def _lose(self, record: dict[str, object]) -> None:
        data = json.dumps(record).encode()[: _RECORD - 4]
        mine = self._records[self.rank]
        mine[4 : 4 + len(data)] = np.frombuffer(data, np.uint8)
        mine[:4].view(np.int32)[0] = len(data)
        self._words[self.rank, _LOST] = self._epoch

    def _raise_lost(self, rank: int) -> NoReturn:
        length = int(self._records[rank, :4].view(np.int32)[0])
        raise _error(json.loads(self._records[rank, 4 : 4 + length].tobytes()))


def _error(record: dict[str, object], recovering: bool = False) -> BicommError:
    return error_of(record, "recover()" if recovering else "this communicator's calls")


def error_of(record: dict[str, object], where: str) -> BicommError:
    """The exception for the record that the rank which gave up first left behind."""
    waiting = record["waiting"]
    if record["kind"] == "abort":
        return Aborted(f"rank {waiting} aborted this communicator: {record['reason']}. {_THEN}")
    missing = record["missing"]
    assert isinstance(missing, list)
    names = ", ".join(map(str, missing)) + (" has" if len(missing) == 1 else " have")
    told = f"rank{'s' if len(missing) > 1 else ''} {names} "
    told += "died" if record["kind"] == "died" else f"not arrived within {record['seconds']:g} s"
    return PeerTimeout(
        f"{told} (rank {waiting} waited in {where}, exchange {record['sequence']}). {_THEN}",
        missing=tuple(missing),
        waiting=int(str(waiting)),
        sequence=int(str(record["sequence"])),
    )


_THEN = "Every call raises this until all ranks call comm.recover() together; without a dead rank, make a new communicator"
