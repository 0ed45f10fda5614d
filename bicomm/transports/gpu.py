"""The GPU transport: Triton kernels over symmetric memory, with a device barrier at both ends of each.

Calls are asynchronous and can be captured in CUDA graphs. What goes wrong on the device reaches the host through a page
of pinned memory, and is raised by the next call or by `check()`: the epoch is lost then, kernels end at once with NaN,
and every call raises until `recover()`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from bicomm.agreement.flags import AGAIN
from bicomm.agreement.header import first_line
from bicomm.agreement.signature import sign
from bicomm.arguments import check_gathered
from bicomm.contract import Contract
from bicomm.errors import Aborted, BicommError, CaptureError, PeerTimeout
from bicomm.kernels import barrier, exact, gather, multimem, ordered, owner
from bicomm.kernels.call import Gather, Pull, Reduce, Sync
from bicomm.kernels.copy_in import copy_in
from bicomm.symmem.arenas import Arenas, Place
from bicomm.symmem.buffer import SymmetricBuffer
from bicomm.transports import gpu_faults
from bicomm.transports.base import Asked, Rows, Shares, Transport
from bicomm.transports.link import Link, Reached
from bicomm.transports.nvls import Nvls, block_of, differing_block

P = ParamSpec("P")
R = TypeVar("R")
_NOWHERE = (0, 0)


def _on_its_gpu(
    call: Callable[Concatenate[GpuTransport, P], R],
) -> Callable[Concatenate[GpuTransport, P], R]:
    """Triton launches on the GPU that is set, and CUDA sets it for each thread: a new thread begins with GPU 0."""

    @functools.wraps(call)
    def run(self: GpuTransport, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device(self.device):
            return call(self, *args, **kwargs)

    return run


class GpuTransport(Transport):
    """One rank's side.

    control        symmetric memory of `barrier.control_words(size)` int64 words.
    link           how the hosts agree where the devices cannot: growth, recovery, refusals.
    timeout        seconds that a kernel waits; `first_timeout` for the first call of a kind, whose peers may compile.
    """

    name = "symmetric memory on GPUs, Triton kernels"

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        control: SymmetricBuffer,
        link: Link,
        timeout: float,
        first_timeout: float,
    ) -> None:
        if size > barrier.MAX_RANKS:
            raise ValueError(f"device barriers serve up to {barrier.MAX_RANKS} ranks, got {size}")
        self.rank, self.size, self.device = rank, size, device
        self.timeout, self.first_timeout = timeout, first_timeout
        self.nvls: Nvls | None = None  # where the switch was confirmed
        self.rehearsing = False
        self.blocks_limit: int | None = None  # blocks of a launch, where several ranks share a GPU
        self.rotate = rank  # the peer that is read first, so that ranks do not all begin at one link
        self._control, self._link = control, link
        self._arenas = Arenas(link.allocate)
        zero = torch.zeros(1, dtype=torch.int64, device=device)  # one rank alone: an address is an offset from 0
        self._nothing = SymmetricBuffer(local=zero.view(torch.uint8), addresses=zero)
        self._page = torch.zeros(barrier.page_words(size), dtype=torch.int64, device="cpu").pin_memory()
        self._lost = torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory()  # what `abort` copies to the device
        self._seen: set[object] = set()
        self._stream: torch.cuda.Stream | None = None
        self._error: BicommError | None = None
        self._epoch = 1
        self._reset()
        self._one_each = torch.ones(size, dtype=torch.int64, device=device)

    # ------------------------------------------------------------------------------------------------- collectives

    def shares(self, splits: object, rows: int | None) -> Shares:
        if isinstance(splits, Tensor) and splits.is_cuda:
            if splits.dtype != torch.int64 or splits.shape != (self.size,) or not splits.is_contiguous():
                raise TypeError(
                    f"splits on the GPU is a contiguous int64 tensor [{self.size}], got {splits.dtype} "
                    f"{tuple(splits.shape)}"
                )
            return splits
        return super().shares(splits, rows)

    @_on_its_gpu
    def combine(
        self, x: Tensor, splits: Shares, contract: Contract, out: Tensor, place: Place | None, switch: bool = False
    ) -> None:
        with self._operand(x, x.shape[0], place) as at:
            sync = self._sync("combine", x.dtype, contract, x.shape[1], at.mark, x.shape[0], splits)
            if isinstance(splits, Tensor):
                start, count, shares = 0, 0, splits
            else:
                start, count, shares = sum(splits[: self.rank]), splits[self.rank], None
            call = Reduce(
                peers=at.buffer.device_addresses,
                offset=at.offset,
                rank=self.rank,
                hidden=x.shape[1],
                out=out,
                start=start * x.shape[1],
                count=count * x.shape[1],
                splits=shares,
                rotate=self.rotate,
                sync=sync,
            )
            if switch and self.nvls is not None:
                self.nvls.count_call(lambda confirmed: self._check_block(call, at, confirmed))
            self._reduce(call, at, contract, switch)

    def _reduce(self, call: Reduce, at: Place, contract: Contract, switch: bool) -> None:
        # An arena for which no multicast slot was left has no such address. The contract is the same.
        if switch and self.nvls is not None and (at.buffer.multicast or not self.nvls.hardware):
            multimem.reduce(
                call,
                contract.parameters,
                multicast=at.buffer.multicast,
                trusted=self.nvls.trusted,
                hardware=self.nvls.hardware,
            )
        elif contract.rule in ("ordered", "fp64"):
            ordered.reduce(call, accumulator=torch.float64 if contract.rule == "fp64" else torch.float32)
        else:
            exact.reduce(call, contract.parameters)

    def _check_block(self, call: Reduce, at: Place, contract: Contract) -> str:
        """Sum a block of a call's operand by the switch and in software: "" or how they differ. Collective.

        Two calls with barriers of their own come before the call itself: since every rank makes all three, and its host
        waits here, nobody writes the operand before the last of them. Waits for the device.
        """
        if call.sync is not None:  # the kernels for a block may have to be compiled now
            patience = _nanoseconds(max(self.timeout, self.first_timeout))
            call = dataclasses.replace(call, sync=dataclasses.replace(call.sync, patience=patience))
        by_switch, software = block_of(call), block_of(call)
        self._reduce(by_switch, at, contract, switch=True)
        exact.reduce(software, contract.parameters)
        difference = differing_block(by_switch.out.cpu(), software.out.cpu(), contract)
        if int(self._page[barrier.PAGE_LOST.value]) >= self._epoch:
            return ""  # a fault made one of them NaN, which says nothing of the switch
        return difference

    @_on_its_gpu
    def combine_rows(self, operands: Rows, contract: Contract, out: Tensor, place: Place | None) -> None:
        rows = operands.rows
        most = rows.shape[0] if place is not None else self._largest(rows.shape[0])
        with self._operand(rows, most, place) as at:
            product = None if operands.weights is None else operands.product_dtype
            slots = operands.row_of_slot.shape[1]
            sync = self._sync("combine_rows", rows.dtype, contract, rows.shape[1], at.mark, None, (), slots, product)
            owner.pull(
                Pull(
                    peers=at.buffer.device_addresses,
                    offset=at.offset,
                    rank=self.rank,
                    dtype=rows.dtype,
                    out=out,
                    row_of_slot=operands.row_of_slot.contiguous(),
                    rank_of_slot=operands.rank_of_slot.contiguous(),
                    weights=None if operands.weights is None else operands.weights.contiguous(),
                    product_dtype=operands.product_dtype,
                    rows=most if place is None else place.nbytes // (rows.shape[1] * rows.dtype.itemsize),
                    sync=sync,
                )
            )

    @_on_its_gpu
    def dispatch(self, x: Tensor, splits: Shares | None, out: Tensor | None, capacity: int | None) -> Tensor:
        if splits is None:
            cure = "pass splits=comm.exchange_counts(own), which stays on the GPU, and capacity"
            splits = self._counts(x.shape[0], "a dispatch without splits", cure)
        if isinstance(splits, Tensor):
            most, total = x.shape[0], (x.shape[0] * self.size if capacity is None else capacity)
            if capacity is None and isinstance(out, Tensor) and out.dim():
                total = out.shape[0]
        else:
            most, total = max(splits), sum(splits)
        try:
            check_gathered(out, x, total)
        except (TypeError, ValueError) as refusal:
            self.refuse("dispatch", refusal)
        result = x.new_empty((total, x.shape[1])) if out is None else out
        with self._operand(x, most, None) as at:
            sync = self._sync("dispatch", x.dtype, None, x.shape[1], at.mark, most, splits)
            gather.gather(
                Gather(
                    peers=at.buffer.device_addresses,
                    offset=at.offset,
                    rank=self.rank,
                    out=result,
                    splits=splits,
                    rotate=self.rotate,
                    sync=sync,
                )
            )
        return result

    def switch_refusal(self) -> str:
        return "" if self.nvls is None else self.nvls.reason

    def exchange_counts(self, own: int | Tensor) -> Tensor:
        """Every rank's count: int64 [W] on the GPU. own: this rank's, an int or an integer tensor of one element."""
        if isinstance(own, int):
            mine = torch.full((1, 1), own, dtype=torch.int64, device=self.device)
        else:
            mine = own.to(torch.int64).view(1, 1)
        asked, self.asked = self.asked, Asked()  # nobody asks a gradient for a count
        try:
            return self.dispatch(mine, self._one_each, None, self.size).view(self.size)
        finally:
            self.asked = asked

    def barrier(self) -> None:
        """One full barrier on the current stream, without work."""
        self._launch_barrier("barrier")

    @_on_its_gpu
    def _launch_barrier(self, operation: str) -> None:
        sync = self._sync(operation, torch.float32, None, 0, _NOWHERE, None, ())
        if sync is None:
            return
        barrier.barrier_kernel[(1,)](
            sync.control, sync.mine, sync.page, sync.what, sync.mark, sync.patience, self.rank, W=self.size,
            LANES=128, SOFT=sync.soft, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

    def refuse(self, operation: str, refusal: Exception) -> None:
        """Tell the others, who learn it from their next call or check; then raise."""
        if self.size > 1 and self._error is None and not torch.cuda.is_current_stream_capturing():
            self._link.post(first_line(refusal))
            self._launch_barrier("refused")
        raise refusal

    # ----------------------------------------------------------------------------------------------------- operands

    def _operand(self, x: Tensor, rows: int, place: Place | None) -> _Operand:
        """The operand in symmetric memory: where it is already, or a copy in a place for `rows` rows."""
        self._ready()
        if place is not None:
            place.buffer.pinned |= torch.cuda.is_current_stream_capturing()
            return _Operand(place, None)
        if self.size == 1 and x.is_contiguous():  # nobody else reads it
            return _Operand(Place(0, x.data_ptr(), 0, self._nothing), None)
        at = self.take(rows * x.shape[1] * x.dtype.itemsize)
        try:
            copy_in(x, at.view(tuple(x.shape), x.dtype), self._words())
        except BaseException:
            self._arenas.release(at)
            raise
        return _Operand(at, self._arenas)

    def _largest(self, rows: int) -> int:
        """The most rows of any rank, where they may differ."""
        what = "combine_rows of rows that are not in symmetric memory"
        cure = "write the rows into a buffer from comm.acquire(rows, hidden, dtype) and pass that"
        return max(self._counts(rows, what, cure))

    def _counts(self, own: int, what: str, cure: str) -> tuple[int, ...]:
        """Every rank's count, on the host, which waits for them. what, cure: for where it cannot."""
        if self.size == 1:
            return (own,)
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(f"{what} agrees on the host, which a CUDA graph cannot hold: {cure}")
        counts = tuple(self.exchange_counts(own).tolist())
        if self.rehearsing:  # nothing was exchanged
            return (own,) * self.size
        self.check()  # after a fault they are no counts
        return counts

    def take(self, nbytes: int) -> Place:
        self._order()  # whoever writes there comes after the calls that were made before
        place = self._arenas.take(nbytes)
        if place is None:
            self._arenas.grow(nbytes)
            place = self._arenas.take(nbytes)
        assert place is not None
        if torch.cuda.is_current_stream_capturing():
            place.buffer.pinned = True
        return place

    def release(self, place: Place) -> None:
        self._arenas.release(place)

    def find(self, x: Tensor) -> bool:
        return self._arenas.find(x) is not None

    def memory(self) -> dict[str, int]:
        held = self._arenas.capacity + self._control.capacity
        used = self._arenas.in_use + self._control.capacity
        return {"held": held, "in_use": used, "captured": self._arenas.captured}

    def suspend(self) -> None:
        torch.cuda.synchronize(self.device)
        self._arenas.clear()

    # ------------------------------------------------------------------------------------------------------- faults

    def _sync(
        self,
        operation: str,
        dtype: torch.dtype,
        contract: Contract | None,
        hidden: int,
        mark: tuple[int, int],
        rows: int | None,
        splits: Shares | Sequence[int],
        slots: int = 0,
        product: torch.dtype | None = None,
    ) -> Sync | None:
        if self.size == 1:
            return None
        self._ready()
        shares = () if isinstance(splits, Tensor) else splits
        asked = self.asked.words
        told = sign(
            operation, dtype, contract, hidden, mark, rows, shares, gradient=asked, slots=slots, product=product
        )
        kind = (operation, dtype, hidden, contract, isinstance(splits, Tensor))
        seconds = self.timeout if kind in self._seen else max(self.timeout, self.first_timeout)
        if not self.rehearsing:
            self._seen.add(kind)
        return Sync(
            self._control.device_addresses,
            self._words(),
            self._page,
            told.what,
            told.shape,
            told.tokens,
            told.mark,
            _nanoseconds(seconds),
            self.blocks_limit,
        )

    def _ready(self) -> None:
        """Before a launch: raise what earlier calls left, and order the streams."""
        if not self.rehearsing:
            self.check()
        self._order()

    def _order(self) -> None:
        """Put this stream behind the last one that was used."""
        stream = torch.cuda.current_stream(self.device)
        last, self._stream = self._stream, stream
        if last is None or last == stream:
            return
        with torch.cuda.stream(last):
            apart = torch.cuda.is_current_stream_capturing()
        if apart == torch.cuda.is_current_stream_capturing():  # an event cannot cross the border of a capture
            stream.wait_event(last.record_event())

    def check(self) -> None:
        if self._error is None and int(self._page[barrier.PAGE_LOST.value]) >= self._epoch:
            self._error = self._read_error()
        if self._error is not None:
            raise type(self._error)(*self._error.args) if not isinstance(self._error, PeerTimeout) else self._error

    def abort(self, reason: str) -> None:
        self._link.post(reason)
        self._error = self._error or Aborted(f"rank {self.rank} aborted this communicator: {reason}. {AGAIN}")
        side = torch.cuda.Stream(self.device, priority=-1)  # kernels that wait may fill the current stream
        self._lost[0] = self._epoch
        with torch.cuda.stream(side):
            # First a copy, which needs no multiprocessor: kernels of this rank that wait end, and make room for the one
            # that tells the others, whose loading may have to wait for them too.
            self._words()[barrier.LOST.value : barrier.LOST.value + 1].copy_(self._lost, non_blocking=True)
            barrier.abort_kernel[(1,)](
                self._control.addresses, self._words(), self._page, self.rank, W=self.size, LANES=128, num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
        side.synchronize()

    def begin_rehearsal(self) -> None:
        """Until `recover`: kernels end at once, with NaN, as they do after a fault, and no call raises for it."""
        self.rehearsing = True
        self._words()[barrier.LOST.value] = self._epoch
        torch.cuda.synchronize(self.device)

    def recover(self) -> None:
        torch.cuda.synchronize(self.device)  # lost kernels end at once
        generation = int(self._words()[barrier.GENERATION.value])
        self._link.recover(Reached(generation, self._arenas.made, self._arenas.layouts()), self._advance)

    def _advance(self, reached: Sequence[Reached]) -> None:
        self._epoch += 1
        self._error = None
        self.rehearsing = False
        # Beyond every flag: a rank may have pushed those of the call after its last good one.
        self._reset(1 + max(each.generation for each in reached))
        self._arenas.realign([each.layouts for each in reached], max(each.made for each in reached))

    def _reset(self, generation: int = 0) -> None:
        words = self._words()
        words[barrier.GENERATION.value] = generation
        words[barrier.FINISHED.value] = 0
        words[barrier.EPOCH.value] = self._epoch
        torch.cuda.synchronize(self.device)
        self._page.zero_()

    def _words(self) -> Tensor:
        return self._control.local[: 8 * barrier.control_words(self.size)].view(torch.int64)

    def _read_error(self) -> BicommError:
        different = gpu_faults.of_page(self._page, self.size, self._link.read)
        if different is not None:
            return different
        if torch.cuda.is_current_stream_capturing():
            return PeerTimeout(f"this communicator was lost, which was noticed during a capture. {AGAIN}")
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            words = self._words().cpu()
        return gpu_faults.of_records(words, self.size, self.rank, self._epoch, self._link.read)


def _nanoseconds(seconds: float) -> int:
    """At most what the device's 64-bit words hold, and a century is for ever."""
    return int(min(seconds, 3e9) * 1e9)


@dataclasses.dataclass
class _Operand:
    """A place for the time of a launch: what comes later on the stream comes after the kernel's trailing barrier."""

    place: Place
    arenas: Arenas | None

    def __enter__(self) -> Place:
        return self.place

    def __exit__(self, *_: object) -> None:
        if self.arenas is not None:
            self.arenas.release(self.place)
