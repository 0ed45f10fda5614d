"""Symmetric buffers of processes on one host, and the flags beside them."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
import torch

from bicomm.agreement.flags import FlagSync, control_bytes, ordered_stores
from bicomm.errors import NoRoom, NoSharedMemory
from bicomm.symmem import posix
from bicomm.symmem.buffer import SymmetricBuffer, align

Exchange = Callable[[bytes], list[bytes]]


def _map_together(exchange: Exchange, rank: int, nbytes: int) -> mmap.mmap:
    """Rank 0 makes a segment, all map it, and its name is gone: or NoSharedMemory on every rank, NoRoom for want of it.

    Two exchanges, whatever happens on a rank, so that the ranks stay in step.
    """
    path, mapping, failure = "", None, ""
    try:
        if rank == 0:
            try:
                path, mapping = posix.create(nbytes)
            except Exception as error:
                failure = f"{'full' if isinstance(error, NoRoom) else 'none'} {error}"
        told = exchange((failure or path).encode())[0].decode()
        if not told.startswith("/"):
            kind, _, reason = told.partition(" ")
            raise (NoRoom if kind == "full" else NoSharedMemory)(f"rank 0: {reason}")
        path = told  # whoever knows the name takes it away: rank 0 may be killed
        try:
            mapping = mapping or posix.attach(path, nbytes)
        except Exception as error:
            failure = str(error) or type(error).__name__
        failures = {r: text.decode() for r, text in enumerate(exchange(failure.encode())) if text}
    finally:
        if path:
            posix.unlink(path)
    if failures:
        raise NoSharedMemory("; ".join(f"rank {r}: {text}" for r, text in failures.items()))
    assert mapping is not None
    return mapping


def make_flags(exchange: Exchange, rank: int, size: int, timeout: float) -> FlagSync:
    """The flags of a group whose processes share a host. `exchange` agrees over a store, since there are no flags yet.

    Raises NoSharedMemory on every rank, with the reason, where some rank cannot map the memory.
    """
    mine = "" if ordered_stores() else "plain stores are not seen in order on this processor, and the flags rely on it"
    reasons = {r: text.decode() for r, text in enumerate(exchange(mine.encode())) if text}
    if reasons:
        raise NoSharedMemory("; ".join(f"rank {r}: {text}" for r, text in reasons.items()))
    mapping = _map_together(exchange, rank, control_bytes(size))
    sync = FlagSync(np.frombuffer(mapping, np.uint8), rank, size, timeout)
    exchange(b"")  # no rank looks at another's words before they are written
    return sync


def make_buffer(exchange: Exchange, rank: int, size: int, capacity: int) -> SymmetricBuffer:
    """A buffer of `capacity` bytes a rank, all ranks together. Raises NoSharedMemory on every rank."""
    stride = align(capacity)
    mapping = _map_together(exchange, rank, size * stride)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    peers = [whole[r * stride : (r + 1) * stride] for r in range(size)]
    return SymmetricBuffer(local=peers[rank], peers=peers, owner=mapping)
