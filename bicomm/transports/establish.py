"""How a group becomes able to combine: the ranks agree, once, on what they have; the transport follows from that."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from bicomm.agreement.header import first_line
from bicomm.agreement.store import StoreSync, meet
from bicomm.errors import NoRoom, NoSharedMemory, PeerRefused, PeerTimeout
from bicomm.plan import Facts
from bicomm.symmem.shared import make_buffer, make_flags
from bicomm.transports.alltoall import AllToAllTransport, Wire
from bicomm.transports.base import Transport
from bicomm.transports.cpu import CpuTransport
from bicomm.transports.request import Request


def establish(group: dist.ProcessGroup, device: torch.device, request: Request | Exception) -> tuple[Transport, Facts]:
    """The transport of this group, and the facts that `plan` works on; the same on every rank. Collective.

    request: what this rank asks for; or the reason why it does not, which is published, so that nobody waits for it,
    and raised. Raises PeerTimeout where ranks do not come, after which all can try again; PeerRefused where another
    rank refused its arguments, ValueError where the ranks ask for different things, NoRoom where there is too little
    shared memory.
    """
    where = "-".join(map(str, dist.get_process_group_ranks(group)))
    # A sub-group's store has its own prefix, but torch may give two groups one name in turn.
    store = dist.PrefixStore(f"bicomm/{where}", _get_process_group_store(group))
    with _one_at_a_time.setdefault(group.group_name, threading.Lock()), _making():
        return _establish(group, store, device, request)


def _establish(
    group: dist.ProcessGroup, shared: dist.Store, device: torch.device, request: Request | Exception
) -> tuple[Transport, Facts]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if isinstance(request, Exception):
        with contextlib.suppress(PeerTimeout):  # who does not come has no need of the reason
            meet(shared, rank, size, _MEETING, b"!" + first_line(request).encode())
        raise request
    sync, store, told = meet(shared, rank, size, max(request.timeout, _MEETING), request.encode())
    refusals = [f"rank {r}: {text[1:].decode()}" for r, text in enumerate(told) if text.startswith(b"!")]
    if refusals:
        raise PeerRefused(f"no communicator was made, because its arguments were refused: {'; '.join(refusals)}")
    Request.check([Request(**json.loads(text)) for text in told])
    sync.timeout = request.timeout

    def make_wire() -> Wire:
        where = dist.PrefixStore(f"wire/{sync.epoch}", store)
        return _wire(group, device, where, rank, size, timedelta(seconds=request.timeout))

    if device.type == "cuda":
        from bicomm.transports.gpu_group import establish_gpu

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
_one_at_a_time: dict[str, threading.Lock] = {}  # by the group's name: attempts of two threads would be taken for one


@contextlib.contextmanager
def _making() -> Iterator[None]:
    """Where ranks do not come, there is no communicator yet that could recover: say what helps instead."""
    try:
        yield
    except PeerTimeout as error:
        if not error.kind:
            raise
        who = f"rank{'s' if len(error.missing) > 1 else ''} {', '.join(map(str, error.missing))}"
        if error.kind == "late":
            limit = f"within {error.seconds:g} s"
            text = f"{who} did not make this communicator {limit}; make it again, on all ranks together"
        else:
            text = f"{who} {error.kind} while this communicator was made; make one of the ranks that are left"
        raise PeerTimeout(
            text,
            missing=error.missing,
            waiting=error.waiting,
            sequence=error.sequence,
            kind=error.kind,
            seconds=error.seconds,
        ) from None
