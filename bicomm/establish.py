"""How a group becomes able to combine: the ranks agree, once, on what they have, and the transport follows from that."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from bicomm.agree import StoreSync
from bicomm.alltoall import AllToAllTransport
from bicomm.cpu import CpuTransport
from bicomm.errors import NoSharedMemory
from bicomm.plan import Facts
from bicomm.symmem.shared import make_buffer, make_flags
from bicomm.transport import Transport



@dataclasses.dataclass(frozen=True)
class Request:
    """What every rank must ask for alike."""

    max_tokens: int
    hidden: int
    mode: str
    strict: bool
    device: str
    share_memory: bool
    timeout: float
    debug: bool = False

    def check(self, others: list[Request]) -> None:
        """Raise ValueError, the same on every rank, where two ranks ask for different things."""
        for rank, other in enumerate(others):
            for field in dataclasses.fields(self):
                first, theirs = getattr(others[0], field.name), getattr(other, field.name)
                if first != theirs:
                    raise ValueError(
                        f"ranks made this communicator with different arguments: {field.name} is {first!r} on rank 0 "
                        f"and {theirs!r} on rank {rank}. All ranks of a group make the same communicators in one order"
                    )


def establish(group: dist.ProcessGroup, device: torch.device, request: Request) -> tuple[Transport, Facts]:
    """The transport of this group, and the facts that `plan` works on; the same on every rank. Collective."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ranks = dist.get_process_group_ranks(group)
    # A sub-group's store has its own prefix; the number tells the communicators of one group apart.
    number = _number_in(group)
    store = dist.PrefixStore(f"bicomm/{'-'.join(map(str, ranks))}/{number}", _get_process_group_store(group))
    sync = StoreSync(store, rank, size, max(request.timeout, 60.0))
    told = sync.exchange(json.dumps(dataclasses.asdict(request)).encode())
    request.check([Request(**json.loads(text)) for text in told])
    sync.timeout = request.timeout

    def make_group() -> dist.ProcessGroup:
        limit = timedelta(seconds=request.timeout)
        made = dist.new_group(ranks, limit, backend=dist.get_backend(group), use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        return made

    if device.type == "cuda":
        from bicomm.gpu_group import establish_gpu

        reserve = request.max_tokens * request.hidden * 4
        return establish_gpu(group, device, request.share_memory, request.timeout, reserve, sync, make_group)
    memory = ""
    transport: Transport | None = None
    if not request.share_memory:
        memory = "the communicator was made with share_memory=False"
    else:
        try:
            transport = _shared(sync, request)
        except NoSharedMemory as error:
            memory = str(error)
    if transport is None:
        transport = AllToAllTransport(sync, make_group, device)
    return transport, Facts("cpu", size, memory, "the ranks work on CPUs")


def _shared(sync: StoreSync, request: Request) -> CpuTransport:
    flags = make_flags(sync.exchange, sync.rank, sync.size, request.timeout)
    transport = CpuTransport(flags, lambda nbytes: make_buffer(flags.exchange, sync.rank, sync.size, nbytes))
    capacity = request.max_tokens * request.hidden * 4
    if capacity:
        transport.release(transport.take(capacity))
    return transport


_numbers: dict[str, Callable[[], int]] = {}


def _number_in(group: dist.ProcessGroup) -> int:
    counter = _numbers.setdefault(group.group_name, itertools.count().__next__)
    return counter()
