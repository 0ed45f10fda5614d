"""Is the process of another rank still there? Known at once on one host, never guessed elsewhere."""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class Process:
    """A process, told from a later one with the same number by its start.

    started   clock ticks after boot, 0 where unknown.
    space     the PID namespace, 0 where unknown: numbers mean nothing in another one, so a process there is never taken
              for dead.
    """

    pid: int
    started: int
    space: int

    @classmethod
    def this(cls) -> Process:
        """The calling process."""
        return cls(os.getpid(), _started(os.getpid()), _space())

    def is_dead(self) -> bool:
        """Whether it certainly has ended. False where that cannot be known from here."""
        if not (self.started and self.space and self.space == _space()):
            return False
        return _started(self.pid) != self.started


def _started(pid: int) -> int:
    """When a process started; 0 if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _space() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
