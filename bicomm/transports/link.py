"""How the hosts of a GPU group agree on what the devices cannot: memory, recovery, and the text of a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from bicomm.agreement.store import StoreSync
from bicomm.errors import CallMismatch
from bicomm.symmem import cuda
from bicomm.symmem.buffer import SymmetricBuffer


class Link(Protocol):
    """One rank's side."""

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        """A buffer of zeros on all ranks; asked for by all of them."""

    def recover(self, generation: int, advance: Callable[[int], None]) -> None:
        """Once all ranks are here and their devices idle, run `advance` on each with a generation beyond every flag,
        and go on when all are done. generation: of this rank's last good call; it may have pushed flags of the next."""

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
        return cuda.make_buffer(self._group, self._device, nbytes)

    def recover(self, generation: int, advance: Callable[[int], None]) -> None:
        self._sync.recover()
        advance(1 + max(int(text) for text in self._sync.exchange(str(generation).encode())))
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
        self.recovering: dict[int, tuple[int, Callable[[int], None]]] = {}


class LocalLink:
    """One rank of a local world."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._world, self._rank, self._asked = world, rank, 0

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        world, number = self._world, self._asked
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
        self._asked += 1
        return mine

    def recover(self, generation: int, advance: Callable[[int], None]) -> None:
        self._world.recovering[self._rank] = (generation, advance)
        if len(self._world.recovering) == self._world.size:  # the last rank opens the epoch for all
            waiting, self._world.recovering = self._world.recovering, {}
            beyond = 1 + max(reached for reached, _ in waiting.values())
            for _, go in waiting.values():
                go(beyond)

    def post(self, text: str) -> None:
        self._world.texts[self._rank] = text

    def read(self, rank: int) -> str:
        return self._world.texts[rank]
