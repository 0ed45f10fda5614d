"""The all-to-all transport: rows travel by torch.distributed, and the contract's function sums them where they arrive.

It needs no shared memory, so it serves several hosts, several NVLink domains, containers: anything with a process group.
The sum is the contract's, so the bits are those of every other transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bicomm.contract import Contract, round_output
from bicomm.errors import CaptureError, PeerTimeout
from bicomm.header import Header
from bicomm.slots import check_slots, weigh
from bicomm.symmem.arenas import Place
from bicomm.symmem.buffer import SymmetricBuffer
from bicomm.transport import HostCalls, Rows, Shares, Sync, Transport


class AllToAllTransport(Transport):
    """make_group(): a process group of these ranks that nobody else uses; called by all of them, again after a fault.

    device: where the operands live. The rows are staged through the CPU where the group's back-end asks for it.
    """

    name = "all-to-all (torch.distributed) and local sum"

    def __init__(self, sync: Sync, make_group: Callable[[], dist.ProcessGroup], device: torch.device) -> None:
        self.rank, self.size = sync.rank, sync.size
        self._sync, self._make_group = sync, make_group
        self._calls = HostCalls(sync)
        self._group = make_group()
        self._device = device
        self._wire = device if device.type == "cuda" and "nccl" in dist.get_backend(self._group) else torch.device("cpu")
        self._next, self._held = 0, 0

    def combine(self, x: Tensor, splits: Shares, contract: Contract, out: Tensor, place: Place | None) -> None:
        size, mine = self.size, splits[self.rank]

        def consume(_: list[Header], __: None) -> None:
            addends = self._exchange(x, list(splits), [mine] * size).view(size, mine, x.shape[1])
            round_output(contract.sum(addends), out, out.dtype)

        header = Header(0, "combine", contract.id, "float32", x.shape[1], tuple(splits), (-1, -1), x.shape[0])
        self._run(header, consume)

    def dispatch(self, x: Tensor, splits: Shares | None, out: Tensor | None, capacity: int | None) -> Tensor:
        size = self.size

        def consume(headers: list[Header], _: None) -> Tensor:
            counts = [h.rows for h in headers]
            gathered = self._exchange(x.repeat(size, 1), [x.shape[0]] * size, counts)
            return gathered if out is None else out.copy_(gathered)

        header = Header(0, "dispatch", "", str(x.dtype), x.shape[1], tuple(splits) if splits is not None else (), (-1, -1), x.shape[0])
        return self._run(header, consume)

    def combine_rows(self, operands: Rows, contract: Contract, out: Tensor, place: Place | None) -> None:
        rows, size = operands.rows, self.size
        kind = f"{rows.dtype}*{operands.product_dtype if operands.weights is not None else 'unweighted'}"
        header = Header(0, "combine_rows", contract.id, kind, rows.shape[1], (), (-1, -1), rows.shape[0])

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
            addends = torch.zeros(tokens * max(slots, 1), out.shape[1], device=out.device)
            addends[wanted] = weigh(received, weights, operands.product_dtype)
            by_slot = addends.view(tokens, max(slots, 1), out.shape[1]).transpose(0, 1)
            round_output(contract.sum(by_slot), out, out.dtype)

        def check(headers: list[Header]) -> None:
            check_slots(operands, [h.rows for h in headers], self.rank)

        self._run(header, consume, check)

    def _run(  # type: ignore[no-untyped-def]
        self, header: Header, consume, check: Callable[[list[Header]], None] = lambda _: None
    ):
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"{header.operation} by all-to-all agrees with the other ranks on the host, which a CUDA graph cannot "
                f"hold: capture it in a group whose GPUs share symmetric memory (see comm.plan())"
            )
        return self._calls.run(header, check, consume)

    def _exchange(self, x: Tensor, give: Sequence[int], get: Sequence[int]) -> Tensor:
        """Rows of x to each rank, rows from each rank: [sum(get), columns] on x's device. Bytes travel, not numbers."""
        data = x.contiguous().to(self._wire).view(torch.uint8)
        received = torch.empty(sum(get), data.shape[1], dtype=torch.uint8, device=self._wire)
        try:
            dist.all_to_all_single(received, data, list(get), list(give), group=self._group)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self._sync.abort(f"its connection to another rank broke in an all-to-all ({reason})")
            raise PeerTimeout(
                f"rank {self.rank} lost a rank in the middle of an all-to-all ({reason}). Every call raises until "
                f"all ranks call comm.recover() together; without a dead rank, make a new communicator"
            ) from error
        return received.view(x.dtype).to(x.device)

    def refuse(self, operation: str, refusal: Exception) -> None:
        self._calls.run(Header(0, operation), lambda _: None, lambda _, __: None, refusal)

    def take(self, nbytes: int) -> Place:
        """Ordinary memory: nobody else reads it."""
        buffer = SymmetricBuffer(local=torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self._device))
        self._next, self._held = self._next + 1, self._held + nbytes
        return Place(self._next, 0, nbytes, buffer)

    def release(self, place: Place) -> None:
        self._held -= place.nbytes

    def memory(self) -> dict[str, int]:
        return {"held": self._held, "in_use": self._held}

    def check(self) -> None:
        self._sync.check()

    def abort(self, reason: str) -> None:
        self._sync.abort(reason)

    def recover(self) -> None:
        self._calls.recover()
        self._group = self._make_group()

    def suspend(self) -> None:
        """Nothing is held between calls."""
