"""The CPU transport: the contract's own torch function, over operands that the other ranks left in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from bicomm.contract import Contract, round_output
from bicomm.header import Header
from bicomm.slots import check_slots, sum_slots
from bicomm.symmem.arenas import Arenas, Place
from bicomm.symmem.buffer import SymmetricBuffer
from bicomm.transport import HostCalls, Rows, Shares, Sync, Transport

R = TypeVar("R")
_NOWHERE = (-1, -1)  # the place of an operand that is copied in during the call


class CpuTransport(Transport):
    """Processes that share a host (POSIX shared memory), or threads of a local world.

    allocate(nbytes): makes a symmetric buffer on all ranks together, or raises on all of them.
    """

    name = "shared memory on the CPU, torch ops"

    def __init__(self, sync: Sync, allocate: Callable[[int], SymmetricBuffer]) -> None:
        self.rank, self.size = sync.rank, sync.size
        self._sync = sync
        self._calls = HostCalls(sync)
        self._arenas = Arenas(allocate)

    def combine(self, x: Tensor, splits: Shares, contract: Contract, out: Tensor, place: Place | None) -> None:
        first = sum(splits[: self.rank])
        mine = slice(first, first + splits[self.rank])
        shape = tuple(x.shape)

        def consume(_: list[Header], at: Place) -> None:
            addends = [at.view(shape, torch.float32, rank)[mine] for rank in range(self.size)]
            round_output(contract.sum(addends), out, out.dtype)

        header = Header(0, "combine", contract.id, "float32", x.shape[1], tuple(splits), _mark(place), x.shape[0])
        self._run(header, x, place, consume)

    def combine_rows(self, operands: Rows, contract: Contract, out: Tensor, place: Place | None) -> None:
        rows = operands.rows
        kind = f"{_name(rows.dtype)}*{_name(operands.product_dtype) if operands.weights is not None else 'unweighted'}"
        header = Header(0, "combine_rows", contract.id, kind, rows.shape[1], (), _mark(place), rows.shape[0])

        def consume(headers: list[Header], at: Place) -> None:
            peers = [at.view((h.rows, h.hidden), rows.dtype, rank) for rank, h in enumerate(headers)]
            sum_slots(peers, operands, contract, out)

        def check(headers: list[Header]) -> None:
            check_slots(operands, [h.rows for h in headers], self.rank)

        self._run(header, rows, place, consume, check)

    def dispatch(self, x: Tensor, splits: Shares | None, out: Tensor | None, capacity: int | None) -> Tensor:
        header = Header(0, "dispatch", "", _name(x.dtype), x.shape[1], tuple(splits) if splits is not None else (), _NOWHERE, x.shape[0])

        def consume(headers: list[Header], at: Place) -> Tensor:
            return torch.cat([at.view((h.rows, h.hidden), x.dtype, rank) for rank, h in enumerate(headers)], out=out)

        return self._run(header, x, None, consume)

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
            check(headers)
            if place is not None:
                return place
            rows = max(h.rows for h in headers)
            taken.append(self._take(rows * header.hidden * x.dtype.itemsize))
            taken[0].view(tuple(x.shape), x.dtype).copy_(x)
            return taken[0]

        try:
            return self._calls.run(header, publish, consume)
        finally:
            for at in taken:
                self._arenas.release(at)

    def refuse(self, operation: str, refusal: Exception) -> None:
        self._calls.run(Header(0, operation), lambda _: None, lambda _, __: None, refusal)

    def _take(self, nbytes: int) -> Place:
        place = self._arenas.take(nbytes)
        if place is None:
            self._arenas.grow(nbytes)
            place = self._arenas.take(nbytes)
        assert place is not None
        return place

    def take(self, nbytes: int) -> Place:
        place = self._arenas.take(nbytes)
        if place is not None:
            return place
        header = Header(0, "grow", hidden=nbytes)
        return self._calls.run(header, lambda _: self._take(nbytes), lambda _, at: at)

    def release(self, place: Place) -> None:
        self._arenas.release(place)

    def find(self, x: Tensor) -> bool:
        """Whether a tensor's memory belongs to this transport."""
        return self._arenas.find(x) is not None

    def memory(self) -> dict[str, int]:
        return {"held": self._arenas.capacity, "in_use": self._arenas.in_use}

    def check(self) -> None:
        self._sync.check()

    def abort(self, reason: str) -> None:
        self._sync.abort(reason)

    def recover(self) -> None:
        self._calls.recover()

    def suspend(self) -> None:
        self._arenas.clear()


def _mark(place: Place | None) -> tuple[int, int]:
    return _NOWHERE if place is None else place.mark


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
