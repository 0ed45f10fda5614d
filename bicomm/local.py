"""A local world: several ranks in one process, each to be driven by its own thread (CPU) or stream (GPU)."""

from __future__ import annotations

import numpy as np
import torch

from bicomm.agreement.flags import FlagSync, control_bytes
from bicomm.arguments import Mode
from bicomm.communicator import Communicator, LocalRank
from bicomm.errors import NoRoom
from bicomm.plan import Facts
from bicomm.symmem.buffer import SymmetricBuffer, align
from bicomm.transports.cpu import CpuTransport


def local_world(
    size: int,
    *,
    mode: Mode | None = None,
    device: torch.device | str = "cpu",
    timeout: float = 30.0,
    debug: bool = False,
) -> list[Communicator]:
    """W communicators in this process: for tests, for timing on one GPU, and for notebooks without a launcher.

    On a CPU, call each from its own thread, since a collective waits for the others. On a GPU each has its own stream,
    `comm.stream`, and one thread can issue all of them (see local_gpu.rehearsal). debug: as for `Communicator`.

        comms = bicomm.local_world(8, mode="exact")
        with ThreadPoolExecutor(8) as pool:
            outs = list(pool.map(lambda comm: comm.combine(partials[comm.rank]), comms))
    """
    if size < 1:
        raise ValueError(f"a world has at least one rank, got {size}")
    where = torch.device(device)
    if where.type == "cuda":
        from bicomm.local_gpu import local_gpu_world

        return local_gpu_world(size, mode, where, timeout, debug)
    control = np.zeros(control_bytes(size), np.uint8)
    world = _Arena(size)
    facts = Facts("cpu", size, "", "the ranks work on CPUs")
    comms = []
    for rank in range(size):
        sync = FlagSync(control, rank, size, timeout, _THREADS)
        transport = CpuTransport(sync, lambda nbytes, rank=rank, sync=sync: world.allocate(rank, sync, nbytes))  # type: ignore[misc]
        comms.append(LocalRank(transport, facts, where).communicator(rank, mode, debug))
    return comms


_THREADS = "In a local world call each rank's communicator from a thread of its own, all at the same time. "


class _Arena:
    """Buffers side by side in ordinary memory: rank 0 makes each, the others find it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._whole = torch.empty(0, dtype=torch.uint8, device="cpu")

    def allocate(self, rank: int, sync: FlagSync, nbytes: int) -> SymmetricBuffer:
        stride = align(nbytes)
        failure = ""
        if rank == 0:
            try:
                self._whole = torch.empty(self._size * stride, dtype=torch.uint8, device="cpu")
            except RuntimeError as error:
                failure = str(error).splitlines()[0]
        failure = sync.exchange(failure.encode())[0].decode()
        whole = self._whole
        sync.exchange(b"")
        if failure:
            raise NoRoom(f"rank 0 cannot allocate {self._size * stride:,} bytes: {failure}")
        peers = [whole[r * stride : (r + 1) * stride] for r in range(self._size)]
        return SymmetricBuffer(local=peers[rank], peers=peers, owner=whole)
