"""How a group becomes able to combine: the ranks agree, once, on what they have; the transport follows from that."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from bicomm.agree import StoreSync
from bicomm.alltoall import AllToAllTransport, Wire
from bicomm.cpu import CpuTransport
from bicomm.errors import NoRoom, NoSharedMemory, PeerRefused
from bicomm.header import first_line
from bicomm.plan import Facts
from bicomm.request import Request
from bicomm.symmem.shared import make_buffer, make_flags
from bicomm.transport import Transport


def establish(group: dist.ProcessGroup, device: torch.device, request: Request | Exception) -> tuple[Transport, Facts]:
    """The transport of this group, and the facts that `plan` works on; the same on every rank. Collective.

    request: what this rank asks for; or the reason why it does not, which is published, so that nobody waits for it,
    and raised. Raises PeerRefused where another rank did that, ValueError where the ranks ask for different things,
    NoRoom where there is too little shared memory.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ranks = dist.get_process_group_ranks(group)
    # A sub-group's store has its own prefix; the number tells the communicators of one group apart.
    number = _number_in(group)
    store = dist.PrefixStore(f"bicomm/{'-'.join(map(str, ranks))}/{number}", _get_process_group_store(group))
    sync = StoreSync(store, rank, size, _MEETING)
    if isinstance(request, Exception):
        sync.exchange(b"!" + first_line(request).encode())
        raise request
    sync.timeout = max(request.timeout, _MEETING)
    told = sync.exchange(request.encode())
    refusals = [f"rank {r}: {text[1:].decode()}" for r, text in enumerate(told) if text.startswith(b"!")]
    if refusals:
        raise PeerRefused(f"no communicator was made, because its arguments were refused: {'; '.join(refusals)}")
    Request.check([Request(**json.loads(text)) for text in told])
    sync.timeout = request.timeout

    def make_wire() -> Wire:
        where = dist.PrefixStore(f"wire/{sync.epoch}", store)
        return _wire(group, device, where, rank, size, timedelta(seconds=request.timeout))

    if device.type == "cuda":
        from bicomm.gpu_group import establish_gpu

        return establish_gpu(group, device, request, sync, make_wire)
    memory = "" if request.share_memory else "the communicator was made with share_memory=False"
    transport: Transport | None = None
    if not memory:
        try:
            transport = _shared(sync, request)
        except NoRoom:
            raise
        except NoSharedMemory as error:
            memory = str(error)
    if transport is None:
        transport = AllToAllTransport(sync, make_wire, device)
    return transport, Facts("cpu", size, memory, "the ranks work on CPUs")


def _shared(sync: StoreSync, request: Request) -> CpuTransport:
    flags = make_flags(sync.exchange, sync.rank, sync.size, request.timeout)
    transport = CpuTransport(flags, lambda nbytes: make_buffer(flags.exchange, sync.rank, sync.size, nbytes))
    capacity = request.max_tokens * request.hidden * 4
    if capacity:
        transport.release(transport.take(capacity))
    return transport


def _wire(
    group: dist.ProcessGroup, device: torch.device, store: dist.Store, rank: int, size: int, limit: timedelta
) -> Wire:
    """Connections of these ranks alone, by the back-end that the group has for the device.

    Not a `new_group`: torch keeps those until they are destroyed, and names them by what else it keeps, which differs
    between ranks once one of them has been quicker to drop a communicator.
    """
    if "nccl" in group._get_backend(device).name():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return cast(Wire, dist.ProcessGroupNCCL(store, rank, size, options))
    return cast(Wire, dist.ProcessGroupGloo(store, rank, size, limit))


_MEETING = 60.0  # seconds at least to wait for the others to make their communicator: they may still be importing
_numbers: dict[str, Callable[[], int]] = {}


def _number_in(group: dist.ProcessGroup) -> int:
    counter = _numbers.setdefault(group.group_name, itertools.count().__next__)
    return counter()
