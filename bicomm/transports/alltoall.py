"""The all-to-all transport: rows travel by torch.distributed, and the contract's function sums them where they arrive.

It needs no shared memory, so it serves several hosts, several NVLink domains, containers: any process group. The sum
is the contract's, so the bits are those of every other transport.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from bicomm.agreement.flags import AGAIN
from bicomm.agreement.header import ACQUIRE, Header
from bicomm.arguments import check_gathered
from bicomm.contract import Contract, round_output
from bicomm.errors import CaptureError, NoRoom, PeerTimeout
from bicomm.symmem.arenas import Place
from bicomm.symmem.buffer import SymmetricBuffer
from bicomm.transports.base import Rows, Shares, Sync
from bicomm.transports.hostcalls import HostTransport
from bicomm.transports.slots import check_slots, weigh

R = TypeVar("R")
_ROLL_CALL = 5.0  # seconds to see who is left after a connection broke


class Wire(Protocol):
    """What is used of a back-end of torch.distributed: gloo or NCCL, of these ranks only."""

    def name(self) -> str:
        """`gloo` or `nccl`."""

    def alltoall_base(self, output: Tensor, input: Tensor, get: list[int], give: list[int]) -> Any:
        """Rows of `input` to each rank, rows of `output` from each rank: the work, to be waited for."""


class AllToAllTransport(HostTransport):
    """make_wire(): connections of these ranks that nobody else uses; called by all of them, again after a fault.

    device: where the operands live. The rows are staged through the CPU where the wire asks for it.
    """

    name = "all-to-all (torch.distributed) and local sum"

    def __init__(self, sync: Sync, make_wire: Callable[[], Wire], device: torch.device) -> None:
        super().__init__(sync)
        self._make_wire = make_wire
        self._device = device
        self._connections: Wire | None = make_wire()
        self._wire = device if self._connections.name() == "nccl" else torch.device("cpu")
        self._next, self._held = 0, 0

    def combine(
        self, x: Tensor, splits: Shares, contract: Contract, out: Tensor, place: Place | None, switch: bool = False
    ) -> None:
        size, give = self.size, [int(n) for n in splits]
        mine = give[self.rank]

        def consume(_: list[Header], __: None) -> None:
            addends = self._exchange(x, give, [mine] * size).view(size, mine, x.shape[1])
            round_output(contract.sum(addends), out, out.dtype)

        self._run(dataclasses.replace(self.header("combine", x, splits), contract=contract.id), consume)

    def dispatch(self, x: Tensor, splits: Shares | None, out: Tensor | None, capacity: int | None) -> Tensor:
        size = self.size

        def consume(headers: list[Header], _: None) -> Tensor:
            gathered = self._exchange(x.repeat(size, 1), [x.shape[0]] * size, [h.rows for h in headers])
            return gathered if out is None else out.copy_(gathered)

        def check(headers: list[Header]) -> None:
            check_gathered(out, x, sum(h.rows for h in headers))

        return self._run(self.header("dispatch", x, splits), consume, check)

    def exchange_counts(self, own: int | Tensor) -> Tensor:
        return super().exchange_counts(own).to(self._device)

    def combine_rows(self, operands: Rows, contract: Contract, out: Tensor, place: Place | None) -> None:
        rows, size = operands.rows, self.size

        def consume(_: list[Header], __: None) -> None:
            ranks = operands.rank_of_slot.reshape(-1).long()
            wanted = torch.argsort(ranks, stable=True)  # slots by rank, those that are not routed first
            routed = torch.bincount(ranks + 1, minlength=size + 1)[1:]
            wanted = wanted[wanted.numel() - int(routed.sum()) :]
            ask = [int(n) for n in routed]
            told = self._exchange(routed.view(size, 1), [1] * size, [1] * size).view(-1)
            give = [int(n) for n in told]
            asked = self._exchange(operands.row_of_slot.reshape(-1, 1).long()[wanted], ask, give).view(-1)
            received = self._exchange(rows[asked], give, ask)
            weights = None if operands.weights is None else operands.weights.reshape(-1)[wanted]
            tokens, slots = operands.row_of_slot.shape
            shape = (tokens * max(slots, 1), out.shape[1])
            addends = torch.zeros(shape, dtype=torch.float32, device=out.device)
            addends[wanted] = weigh(received, weights, operands.product_dtype)
            by_slot = addends.view(tokens, max(slots, 1), out.shape[1]).transpose(0, 1)
            round_output(contract.sum(by_slot), out, out.dtype)

        def check(headers: list[Header]) -> None:
            check_slots(operands, [h.rows for h in headers], self.rank)

        self._run(self.header_of_rows(operands, contract.id), consume, check)

    def _run(
        self,
        header: Header,
        consume: Callable[[list[Header], None], R],
        check: Callable[[list[Header]], None] = lambda _: None,
    ) -> R:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"{header.operation} by all-to-all agrees with the other ranks on the host, which a CUDA graph cannot "
                f"hold: capture it in a group whose GPUs share symmetric memory (see comm.plan())"
            )
        return self._calls.run(header, check, consume)

    def _exchange(self, x: Tensor, give: Sequence[int], get: Sequence[int]) -> Tensor:
        """Rows of x to each rank, rows from each rank: [sum(get), columns] on x's device. Bytes travel, not numbers."""
        # By way of one dimension: a single column counts as contiguous with any stride, and has no view as bytes then.
        columns = x.shape[1] * x.element_size()
        data = x.to(self._wire).contiguous().view(-1).view(torch.uint8).view(x.shape[0], columns)
        received = torch.empty(sum(get), data.shape[1], dtype=torch.uint8, device=self._wire)
        assert self._connections is not None
        try:
            self._connections.alltoall_base(received, data, list(get), list(give)).wait()
        except RuntimeError as error:
            self._lose(str(error).splitlines()[0], error)
        return received.view(x.dtype).to(x.device)

    def _lose(self, reason: str, error: RuntimeError) -> NoReturn:
        """A connection broke: find out who is missing, and end the epoch."""
        self._connections = None  # closes all of them, so that nobody waits for this rank in the rows that follow
        before, self._sync.timeout = self._sync.timeout, min(self._sync.timeout, _ROLL_CALL)
        try:
            self._sync.exchange(f"its connections broke ({reason})".encode())  # the others agree on this step's outcome
        finally:
            self._sync.timeout = before
        self._sync.abort(f"its connection to another rank broke in an all-to-all ({reason})")
        raise PeerTimeout(
            f"rank {self.rank} lost its connection to another rank in the middle of an all-to-all ({reason}), and all "
            f"ranks are still there. {AGAIN}"
        ) from error

    def take(self, nbytes: int) -> Place:
        """Ordinary memory: nobody else reads it."""
        self._calls.check_process()
        try:
            local = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            refusal = NoRoom(f"rank {self.rank} cannot allocate {nbytes:,} bytes: {reason}")
            self.refuse(ACQUIRE, refusal)
            raise refusal from error
        buffer = SymmetricBuffer(local=local)
        self._next, self._held = self._next + 1, self._held + nbytes
        return Place(self._next, 0, nbytes, buffer)

    def release(self, place: Place) -> None:
        self._held -= place.nbytes

    def memory(self) -> dict[str, int]:
        return {"held": self._held, "in_use": self._held}

    def recover(self) -> None:
        self._calls.recover(self._connect)

    def _connect(self) -> None:
        self._connections = None
        try:
            self._connections = self._make_wire()
        except RuntimeError as error:
            self._sync.abort(f"it could not connect to the other ranks again ({str(error).splitlines()[0]})")
            raise PeerTimeout(f"rank {self.rank} could not connect to the other ranks again: {error}") from error

    def suspend(self) -> None:
        """Nothing is held between calls."""

    def close(self) -> None:
        super().close()
        self._connections = None
