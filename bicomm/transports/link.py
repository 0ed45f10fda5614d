"""How the hosts of a GPU group agree on what the devices cannot: memory, recovery, and the text of a refusal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from bicomm.agreement.store import StoreSync
from bicomm.errors import CallMismatch, NoRoom, NoSharedMemory
from bicomm.symmem import cuda
from bicomm.symmem.buffer import SymmetricBuffer


@dataclasses.dataclass(frozen=True)
class Reached:
    """How far a rank came before it recovers.

    generation  of its last good call; it may have pushed flags of the next.
    made        arenas it ever made. layouts: of those it has, the number and a check sum of what is handed out.
    """

    generation: int
    made: int
    layouts: dict[int, int]


Advance = Callable[[Sequence[Reached]], None]


class Link(Protocol):
    """One rank's side."""

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        """A buffer of zeros on all ranks; asked for by all of them. Raises NoRoom on all where one has too little."""

    def recover(self, reached: Reached, advance: Advance) -> None:
        """Once all ranks are here and their devices idle, run `advance` on each with what each reached, by rank, and go
        on when all are done."""

    def post(self, text: str) -> None:
        """Leave a text that other ranks may read later."""

    def read(self, rank: int) -> str:
        """What a rank left last."""


class StoreLink:
    """Processes that share a torch.distributed store."""

    def __init__(self, sync: StoreSync, group: dist.ProcessGroup, device: torch.device) -> None:
        self._sync, self._group, self._device = sync, group, device

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        asked = [int(text) for text in self._sync.exchange(str(nbytes).encode())]
        if len(set(asked)) > 1:
            other = next(rank for rank, size in enumerate(asked) if size != asked[0])
            raise CallMismatch(
                f"ranks asked for symmetric memory of different sizes: rank 0 for {asked[0]:,} bytes, rank {other} for "
                f"{asked[other]:,}. Every rank of the group must make the same calls in the same order"
            )
        if self._sync.size == 1:  # nobody to share it with
            return cuda.make_local_buffers(1, self._device, nbytes)[0]
        # In torch's rendezvous, ranks wait long for one that does not come: so they meet here before.
        failure = ""
        try:
            local = cuda.reserve(self._device, nbytes)
        except NoSharedMemory as error:
            failure = f"{'full' if isinstance(error, NoRoom) else 'none'} {error}"
        told = [text.decode().partition(" ") for text in self._sync.exchange(failure.encode())]
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, (kind, _, reason) in enumerate(told) if kind)
        if reasons:
            raise (NoSharedMemory if any(kind == "none" for kind, _, _ in told) else NoRoom)(reasons)
        return cuda.share(self._group, self._device, local)

    def recover(self, reached: Reached, advance: Advance) -> None:
        self._sync.recover()
        mine = [reached.generation, reached.made, [list(pair) for pair in reached.layouts.items()]]
        told = [json.loads(text) for text in self._sync.exchange(json.dumps(mine).encode())]
        advance([Reached(generation, made, dict(pairs)) for generation, made, pairs in told])
        self._sync.exchange(b"")

    def post(self, text: str) -> None:
        self._sync.post(text)

    def read(self, rank: int) -> str:
        return self._sync.read(rank)


class LocalWorld:
    """What the ranks of a local world on one GPU share. Nobody waits here: one thread drives all ranks in turn."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.buffers: dict[int, dict[int, SymmetricBuffer]] = {}  # until a rank takes its own
        self.texts = [""] * size
        self.asked = [0] * size  # buffers, by each rank
        self.recovering: dict[int, tuple[Reached, Advance]] = {}


class LocalLink:
    """One rank of a local world."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._world, self._rank = world, rank

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        world, number = self._world, self._world.asked[self._rank]
        if number not in world.buffers:
            world.buffers[number] = dict(enumerate(cuda.make_local_buffers(world.size, world.device, nbytes)))
            torch.cuda.synchronize(world.device)
        mine = world.buffers[number].pop(self._rank)
        if not world.buffers[number]:
            del world.buffers[number]
        if mine.capacity < nbytes:
            raise CallMismatch(
                f"rank {self._rank} asked for {nbytes:,} bytes of symmetric memory where another rank asked for "
                f"{mine.capacity:,}: every rank must make the same calls in the same order"
            )
        world.asked[self._rank] += 1
        return mine

    def recover(self, reached: Reached, advance: Advance) -> None:
        world = self._world
        world.recovering[self._rank] = (reached, advance)
        if len(world.recovering) == world.size:  # the last rank opens the epoch for all
            waiting, world.recovering = world.recovering, {}
            world.asked = [max(world.asked)] * world.size
            world.buffers.clear()  # what some ranks asked for and others did not
            everyone = [waiting[rank][0] for rank in range(world.size)]
            for _, go in waiting.values():
                go(everyone)

    def post(self, text: str) -> None:
        self._world.texts[self._rank] = text

    def read(self, rank: int) -> str:
        return self._world.texts[rank]
