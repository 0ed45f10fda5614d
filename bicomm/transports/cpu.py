"""The CPU transport: the contract's own torch function, over operands that the other ranks left in shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from bicomm.agreement.header import ACQUIRE, Header
from bicomm.arguments import check_gathered
from bicomm.contract import Contract, round_output
from bicomm.symmem.arenas import Arenas, Place
from bicomm.symmem.buffer import SymmetricBuffer
from bicomm.transports.base import Rows, Shares, Sync
from bicomm.transports.hostcalls import HostTransport
from bicomm.transports.slots import check_slots, sum_slots

R = TypeVar("R")


class CpuTransport(HostTransport):
    """Processes that share a host (POSIX shared memory), or threads of a local world.

    allocate(nbytes): makes a symmetric buffer on all ranks together, or raises NoSharedMemory on all of them.
    """

    name = "shared memory on the CPU, torch ops"

    def __init__(self, sync: Sync, allocate: Callable[[int], SymmetricBuffer]) -> None:
        super().__init__(sync)
        self._arenas = Arenas(allocate)

    def combine(
        self, x: Tensor, splits: Shares, contract: Contract, out: Tensor, place: Place | None, switch: bool = False
    ) -> None:
        first = int(sum(splits[: self.rank]))
        mine = slice(first, first + int(splits[self.rank]))
        shape = tuple(x.shape)

        def consume(_: list[Header], at: Place) -> None:
            addends = [at.view(shape, torch.float32, rank)[mine] for rank in range(self.size)]
            round_output(contract.sum(addends), out, out.dtype)

        header = dataclasses.replace(self.header("combine", x, splits, place), contract=contract.id)
        self._run(header, x, place, consume)

    def combine_rows(self, operands: Rows, contract: Contract, out: Tensor, place: Place | None) -> None:
        rows = operands.rows

        def consume(headers: list[Header], at: Place) -> None:
            peers = [at.view((h.rows, h.hidden), rows.dtype, rank) for rank, h in enumerate(headers)]
            sum_slots(peers, operands, contract, out)

        def check(headers: list[Header]) -> None:
            check_slots(operands, [h.rows for h in headers], self.rank)

        self._run(self.header_of_rows(operands, contract.id, place), rows, place, consume, check)

    def dispatch(self, x: Tensor, splits: Shares | None, out: Tensor | None, capacity: int | None) -> Tensor:
        def consume(headers: list[Header], at: Place) -> Tensor:
            return torch.cat([at.view((h.rows, h.hidden), x.dtype, rank) for rank, h in enumerate(headers)], out=out)

        def check(headers: list[Header]) -> None:
            check_gathered(out, x, sum(h.rows for h in headers))

        return self._run(self.header("dispatch", x, splits), x, None, consume, check)

    def _run(
        self,
        header: Header,
        x: Tensor,
        place: Place | None,
        consume: Callable[[list[Header], Place], R],
        check: Callable[[list[Header]], None] = lambda _: None,
    ) -> R:
        taken: list[Place] = []

        def publish(headers: list[Header]) -> Place:
            if place is None:  # first, since it may be collective
                rows = max(h.rows for h in headers)
                taken.append(self._take(rows * header.hidden * x.dtype.itemsize))
            check(headers)
            if place is not None:
                return place
            taken[0].view(tuple(x.shape), x.dtype).copy_(x)
            return taken[0]

        try:
            return self._calls.run(header, publish, consume)
        finally:
            for at in taken:
                self._arenas.release(at)

    def _take(self, nbytes: int) -> Place:
        """A place on all ranks alike: their arenas have one layout, which their headers said."""
        place = self._arenas.take(nbytes)
        if place is None:
            self._arenas.grow(nbytes)
            place = self._arenas.take(nbytes)
        assert place is not None
        return place

    def take(self, nbytes: int) -> Place:
        self._calls.check_process()  # a fork maps the same memory
        place = self._arenas.take(nbytes)
        if place is not None:
            return place
        header = Header(0, ACQUIRE, hidden=nbytes, held=self.held())
        taken: list[Place] = []
        try:
            return self._calls.run(header, lambda _: taken.append(self._take(nbytes)), lambda _, __: taken[0])
        except BaseException:
            for at in taken:
                self._arenas.release(at)
            raise

    def release(self, place: Place) -> None:
        self._arenas.release(place)

    def find(self, x: Tensor) -> bool:
        return self._arenas.find(x) is not None

    def held(self) -> tuple[int, int]:
        return self._arenas.layout()

    def memory(self) -> dict[str, int]:
        return {"held": self._arenas.capacity, "in_use": self._arenas.in_use}

    def recover(self) -> None:
        self._calls.recover(self._realign)

    def _realign(self) -> None:
        """A fault may have caught some ranks before and some after a growth: go on with new memory."""
        numbers = [int(text) for text in self._sync.exchange(str(self._arenas.made).encode())]
        self._arenas.restart(max(numbers))

    def suspend(self) -> None:
        self._arenas.clear()
