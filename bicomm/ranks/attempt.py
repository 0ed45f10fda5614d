"""How ranks that share a store meet: in attempts, each of which succeeds on all ranks or fails on all."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

import torch.distributed as dist

from bicomm.errors import LaunchError

_PAUSE = 0.02  # seconds between two questions to the store, at most: 50 a second and rank are little to it
_WORTH = 1.0  # seconds that must be left for another attempt


def meet(store: dist.Store, rank: int, size: int, message: bytes, timeout: float) -> tuple[dist.Store, list[bytes]]:
    """A part of the store that only this meeting uses, and what each rank said in it, by rank.

    Which attempt is next stands in the store, and whoever leaves an attempt moves that on: so a rank that was left
    alone, gave up and comes again finds the others, however often each of them tried. The first rank that sees all
    others, or that gives up, decides the attempt for all; a rank with more patience goes on to the next one.

    Raises LaunchError where the others do not come in time, or another process is the same rank.
    """
    deadline = time.monotonic() + timeout
    while True:
        number = store.add("attempt", 0)
        part = dist.PrefixStore(str(number), store)
        if part.add(f"claim/{rank}", 1) > 1:
            raise LaunchError(
                f"another process is rank {rank} already (this one is {os.getpid()} on {socket.gethostname()}): two "
                f"jobs use one MASTER_ADDR and MASTER_PORT, or two processes were given one rank"
            )
        verdict: dict[str, Any] = {"by": rank, "why": "was interrupted"}
        try:
            part.set(f"said/{rank}", message)  # type: ignore[arg-type]  # bytes go in as they are
            verdict = _wait(part, rank, size, timeout, deadline)
        finally:
            verdict = _decide(part, verdict)
            store.compare_set("attempt", str(number), str(number + 1))
        if "by" not in verdict:
            return part, [bytes(part.get(f"said/{other}")) for other in range(size)]
        if verdict["by"] == rank:
            raise LaunchError(f"rank {rank} of {size} {verdict['why']}")
        if deadline - time.monotonic() < _WORTH:
            raise LaunchError(f"rank {rank} of {size} stopped waiting, because rank {verdict['by']} {verdict['why']}")


def _wait(part: dist.Store, rank: int, size: int, timeout: float, deadline: float) -> dict[str, Any]:
    # Not `store.wait`: it prints a warning when it runs out of time.
    keys, pause = [f"said/{other}" for other in range(size)], 1e-3
    while not part.check(keys):
        if part.check(["verdict"]):
            break
        if time.monotonic() > deadline:
            missing = [other for other in range(size) if not part.check([keys[other]])]
            return {"by": rank, "why": f"waited {timeout:g} s for ranks {missing} to call init"}
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE)
    return {}


def _decide(part: dist.Store, verdict: dict[str, Any]) -> dict[str, Any]:
    """The verdict of whoever was first."""
    decided: dict[str, Any] = json.loads(bytes(part.compare_set("verdict", "", json.dumps(verdict))))
    return decided
