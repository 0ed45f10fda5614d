"""A local world on one GPU: several ranks in one process, a stream each, so that barriers cost microseconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from bicomm.arguments import Mode
from bicomm.communicator import Communicator, LocalRank
from bicomm.kernels import barrier
from bicomm.plan import Facts
from bicomm.symmem.cuda import make_local_buffers
from bicomm.transports.gpu import GpuTransport
from bicomm.transports.link import LocalLink, LocalWorld


def local_gpu_world(
    size: int, mode: Mode | None, device: torch.device, timeout: float, debug: bool
) -> list[Communicator]:
    """W communicators on one GPU, each with its own stream: see `bicomm.local_world`."""
    device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    world = LocalWorld(size, device)
    controls = make_local_buffers(size, device, 8 * barrier.control_words(size))
    facts = Facts("cuda", size, "", "a local world has no multicast memory")
    comms = []
    for rank in range(size):
        transport = GpuTransport(rank, size, device, controls[rank], LocalLink(world, rank), timeout, timeout)
        transport.blocks_limit = max(1, torch.cuda.get_device_properties(device).multi_processor_count // size)
        transport.rotate = 0  # there are no links, and each value would be one more compilation in this process
        comm = LocalRank(transport, facts, device).communicator(rank, mode, debug)
        comm.stream = torch.cuda.Stream(device)
        comms.append(comm)
    return comms


@contextmanager
def rehearsal(comms: Sequence[Communicator]) -> Iterator[None]:
    """For a local world on a GPU: calls in this block compile and load their kernels and grow the memory, and wait for
    nobody; their results are NaN.

    CUDA may load a kernel only while no other runs, so the first call of one rank would wait for another rank's kernel
    that waits for it. Make each call once, on every rank, in a rehearsal before the first one that counts.
    """
    transports = [comm.transport for comm in comms]
    torch.cuda.synchronize(comms[0].device)
    for transport in transports:
        assert isinstance(transport, GpuTransport)
        transport.begin_rehearsal()
    try:
        yield
    finally:
        torch.cuda.synchronize(comms[0].device)
        for comm in comms:
            comm.recover()
