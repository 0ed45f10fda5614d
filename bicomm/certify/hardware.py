"""The NVLink switch as a `Fabric`: this process's GPU reads sums of all ranks' values through `multimem.ld_reduce`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from bicomm.certify.measure import BATCH
from bicomm.certify.trust import sorted_machine
from bicomm.errors import BicommError
from bicomm.symmem.buffer import SymmetricBuffer

VECTOR = 4  # fp32 elements of one multicast load
TILE = 1024  # elements of a block
COPIES, TRAFFIC = 8, 16 << 20  # copies of so many bytes keep a link of 400 GB/s busy for longer than a read takes


class Refused(BicommError):
    """There is no switch to measure; the message says why."""


class Switch:
    """One rank's side. Between writes and reads lie barriers of the hosts: slow, and beyond doubt.

    buffer    symmetric memory; its multicast address reaches all ranks.
    machine   what a certificate binds: one object a GPU of the world.
    meet      returns when all ranks have called it and their devices are idle.
    gather    an object of every rank to every rank.
    hardware  False leaves the instruction out, and adds in software what the ranks' own addresses hold.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        local_rank: int,
        buffer: SymmetricBuffer,
        machine: list[dict[str, str]],
        meet: Callable[[], None],
        gather: Callable[[Any], list[Any]],
        *,
        hardware: bool = True,
        parameters: tuple[int, ...] = (),
    ) -> None:
        self.name = "nvls" if hardware else "emulated:software"
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.device = buffer.local.device
        self.readers = (rank,)
        self.machine, self.gather = machine, gather
        self._buffer, self._meet = buffer, meet
        self._addresses = buffer.device_addresses
        self._hardware, self._parameters = hardware, parameters
        self._trusted = torch.ones(1, dtype=torch.int32, device=self.device)
        self._busy = False
        self._copies: tuple[torch.cuda.Stream, Tensor, Tensor] | None = None  # stream, the neighbour's memory, sink

    def reduce(self, addends: Tensor, *, rank: int, call: int, blocks: int, alignment: int) -> Tensor:
        """What this rank reads; see `Fabric`. `rank` is this rank, and `call` is only counted elsewhere."""
        self.place(addends[self.rank], alignment)
        self._meet()
        if self._busy:  # the next meeting waits for these copies too
            self._copy_meanwhile()
        read = self.read(addends.shape[1], blocks, alignment)
        self._meet()  # nobody writes what somebody still reads
        return read

    def place(self, values: Tensor, alignment: int) -> None:
        """Write this rank's values `alignment` bytes behind the start of its buffer, zeros around them."""
        first, total = _span(values.numel(), alignment)
        if 4 * total > self._buffer.local.numel():
            raise ValueError(f"{values.numel():,} columns do not fit a buffer of {self._buffer.local.numel():,} bytes")
        mine = self._buffer.local[: 4 * total].view(torch.float32)
        mine.zero_()
        mine[first : first + values.numel()].copy_(values)

    def read(self, n: int, blocks: int, alignment: int) -> Tensor:
        """n sums, by launches of `blocks` blocks. Whole vectors are read, so that the switch makes every sum itself."""
        from bicomm.kernels import multimem
        from bicomm.kernels.call import Reduce, Tile

        first, total = _span(n, alignment)
        out = torch.empty(1, total, dtype=torch.float32, device=self.device)
        step = blocks * TILE
        for start in range(0, total, step):
            part = out[:, start : start + step]
            call = Reduce(self._addresses, 0, self.rank, part.shape[1], part, start=start, count=part.shape[1])
            multimem.reduce(
                call,
                self._parameters,
                multicast=self._buffer.multicast,
                trusted=self._trusted,
                hardware=self._hardware,
                tile=Tile(TILE, 4, blocks),
            )
        return out[0, first : first + n]

    @contextlib.contextmanager
    def traffic(self) -> Iterator[None]:
        """In this block every read runs beside copies of the next rank's memory, on a stream of their own."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _copy_meanwhile(self) -> None:
        neighbour = _neighbour(self._buffer, self.rank, self.world_size)
        if neighbour is None:
            return
        if self._copies is None:
            self._copies = torch.cuda.Stream(self.device), neighbour, torch.empty_like(neighbour)
        side, source, sink = self._copies
        with torch.cuda.stream(side):
            for _ in range(COPIES):
                sink.copy_(source, non_blocking=True)


def open_switch() -> Switch:
    """The switch of this process's group (`bicomm.init`). Collective. Raises Refused, on every rank, without one.

    Nothing is allocated before every rank's attributes and environment allow multicast.
    """
    if not torch.cuda.is_available():
        raise Refused("torch sees no GPU")
    import bicomm
    from bicomm import capability
    from bicomm.symmem.cuda import make_buffer

    world = bicomm.init()
    device = world.device
    if world.size < 2:
        raise Refused(
            "there is one rank; start one process a GPU: torchrun --nproc-per-node 8 -m bicomm certify fabric"
        )
    if device.type != "cuda" or world.shares_gpu:
        raise Refused("each rank needs a GPU of its own")

    def gather(mine: Any) -> list[Any]:
        told: list[Any] = [None] * world.size
        dist.all_gather_object(told, mine, group=world.group)
        return told

    def meet() -> None:
        torch.cuda.synchronize(device)
        gather(None)

    def agree(reason: str) -> None:
        reasons = [f"rank {rank}: {text}" for rank, text in enumerate(gather(reason)) if text]
        if reasons:
            raise Refused("; ".join(reasons))

    index = torch.cuda.current_device() if device.index is None else device.index
    agree(capability.reason(index))
    buffer = make_buffer(world.group, device, 4 * BATCH["cuda"] + 16)
    agree(capability.multicast_refusal(buffer.multicast, device))
    machine = sorted_machine(gather(capability.identity(index)))
    return Switch(world.rank, world.size, world.local_rank, buffer, machine, meet, gather)


def _neighbour(buffer: SymmetricBuffer, rank: int, world_size: int) -> Tensor | None:
    """The next rank's memory as a tensor, where torch's handle gives one."""
    if buffer.owner is None or not hasattr(buffer.owner, "get_buffer"):
        return None
    size = min(buffer.capacity, TRAFFIC)
    return cast(Tensor, buffer.owner.get_buffer((rank + 1) % world_size, (size,), torch.uint8))


def _span(n: int, alignment: int) -> tuple[int, int]:
    """(elements before the data, elements of all vectors that hold them)."""
    first = alignment // 4
    return first, -(-(first + n) // VECTOR) * VECTOR
