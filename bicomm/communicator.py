"""The front door: a communicator of a group of ranks, with its contract, its plan and its collectives."""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from bicomm import arguments, routes
from bicomm import plan as _plan
from bicomm.agreement.header import ACQUIRE
from bicomm.arguments import Mode
from bicomm.contract import OWNER, Contract
from bicomm.errors import BicommError
from bicomm.operators import ops
from bicomm.ranks.peers import settled
from bicomm.transports.base import Asked, Closed, Rows, Transport
from bicomm.transports.establish import establish
from bicomm.transports.request import Request
from bicomm.zerocopy import Acquired


class Communicator:
    """Combine and dispatch among the ranks of a group, under a contract.

    Made by all ranks of the group together, with equal arguments. After a PeerTimeout every call raises, on every rank,
    until all ranks call `recover()`; after any other error the communicator can be used at once.

    group         a torch process group; None for the one that `bicomm.init` found.
    max_tokens,   rows and columns of the largest fp32 operand: its symmetric memory is taken now. Larger operands grow
    hidden        it, all ranks together, except under CUDA graph capture.
    mode          `ordered`, `exact`, `multimem`, `fp64`, a preset, an id or a `Contract`; None if each call says.
    strict        raise, rather than run the same contract in software, where mode="multimem" cannot use the switch.
    timeout       seconds that a call waits for the other ranks (default 30, or BICOMM_TIMEOUT). The making of the
                  communicator waits for them at least 60 s: they may still be importing. On GPUs the first call of a
                  kind waits at least 300 s (or BICOMM_FIRST_TIMEOUT): they may still be compiling.
    device        where operands live; None for the device that `bicomm.init` chose.
    share_memory  False: never map other ranks' memory; rows travel by all-to-all.
    check_every   calls that use the NVLink switch between two self-checks of it, 0 for none. A check reads known
                  columns and a block of the call's own operand, and the host waits; one that fails on any rank turns
                  the switch off on all, captured graphs included. Captured calls and replays are not counted.
    debug         catch writes into released buffers, at the cost of a check at each release (or BICOMM_DEBUG=1).

    Raises NotInitialized without a group, ValueError where the ranks' arguments differ, NoRoom where shared memory is
    too small for them, BicommError for strict, and PeerRefused where another rank's arguments were refused.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        max_tokens: int = 0,
        hidden: int = 0,
        mode: Mode | None = None,
        strict: bool = False,
        timeout: float | None = None,
        device: torch.device | str | None = None,
        share_memory: bool = True,
        debug: bool | None = None,
        check_every: int = 0,
    ) -> None:
        if group is None or device is None:
            from bicomm.world import current

            world = current()
            group = world.group if group is None else group
            device = world.device if device is None else device
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this rank is not in the group: only its members make the communicator")
        request: Request | Exception
        where = torch.device("cpu")
        try:
            where = settled(torch.device(device))
            request = Request.checked(
                max_tokens, hidden, mode, strict, where, share_memory, timeout, debug, check_every
            )
        except (TypeError, ValueError, RuntimeError) as refusal:
            request = refusal  # the others must learn it
        transport, facts = establish(group, where, request)
        assert isinstance(request, Request)
        self._adopt(transport, facts, rank, where, mode, strict, request.debug)

    def _adopt(
        self,
        transport: Transport,
        facts: _plan.Facts,
        rank: int,
        device: torch.device,
        mode: Mode | None,
        strict: bool = False,
        debug: bool = False,
    ) -> None:
        self.rank, self.size, self.device = rank, facts.size, device
        self.strict = strict
        self._transport, self._facts = transport, facts
        self._process = os.getpid()
        self._mode = mode
        self._judged = False
        self._switched: dict[str, bool] = {}
        self._acquired = Acquired(transport, debug)
        self.stream: torch.cuda.Stream | None = None  # of a local world's rank on a GPU
        self.handle = ops.register(self)
        if mode == "multimem":
            try:
                self._judge_switch()
            except BicommError:
                self.close()
                raise

    @property
    def debug(self) -> bool:
        """Whether released buffers are watched."""
        return self._acquired.debug

    def _judge_switch(self) -> None:
        """Say once that software runs in the switch's place, or raise where that is not wanted."""
        chosen = self.plan("multimem")
        by_switch = chosen.executor.startswith(_plan.SWITCH)
        reason = chosen.candidates[0].reason
        if self.strict and not by_switch:
            raise BicommError(f"mode='multimem' with strict=True: the NVLink switch cannot be used: {reason}")
        if self.rank == 0 and not by_switch:
            warnings.warn(
                f"mode='multimem' runs in software, with the bits of {chosen.contract.id}: {reason}",
                stacklevel=_caller_level(),
            )
        self._judged = True

    # ---------------------------------------------------------------------------------------------- what it is

    @property
    def transport(self) -> Transport:
        """The data path below: for this library's own tests and benchmarks."""
        return self._transport

    @property
    def contract(self) -> Contract | None:
        """The contract that this communicator was made with; None where each call names its own."""
        return None if self._mode is None else _plan.resolve(self._mode, self._facts)

    def plan(self, mode: Mode | None = None) -> _plan.Plan:
        """Which contract and which executor `mode` (default: the communicator's) gets, and why not a faster one."""
        return _plan.plan(self._mode_or(mode), self._known())

    def _known(self) -> _plan.Facts:
        """The facts, with what was learnt since the communicator was made."""
        taken_back = self._transport.switch_refusal()
        return dataclasses.replace(self._facts, multicast=taken_back) if taken_back else self._facts

    def memory(self) -> dict[str, int]:
        """Bytes of symmetric memory on this rank: `held`; of these `in_use`, and on GPUs `captured` by CUDA graphs."""
        return self._transport.memory()

    def __deepcopy__(self, _: dict[int, Any]) -> Communicator:
        """A copied model speaks to the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a communicator belongs to its process: make one in the process that needs it")

    def __repr__(self) -> str:
        contract = "no contract of its own" if self.contract is None else self.contract.id
        return f"Communicator(rank {self.rank} of {self.size}, {self.device}, {contract}, by {self._transport.name})"

    # ------------------------------------------------------------------------------------------------- collectives

    def combine(
        self,
        x: Tensor,
        mode: Mode | None = None,
        *,
        splits: Any = None,
        out: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        capacity: int | None = None,
    ) -> Tensor:
        """Sum every rank's partials and leave each rank its own tokens, under the contract. Differentiable.

        x          fp32 [sum(splits), hidden]: this rank's partials for all tokens, those of rank 0 first.
        mode       a contract for this call; None for the communicator's own.
        splits     tokens of each rank: list, tuple, numpy array or CPU tensor of W integers; None for equal shares; or
                   an int64 tensor on the GPU, read inside the kernel, so that one captured graph serves every step.
        out        where to put the result; not together with gradients.
        out_dtype  torch.float32, or torch.bfloat16: the fp32 result rounded once more.
        capacity   rows of the result where splits is on the GPU (default: the rows of x). Rows past splits[rank] are
                   left as they are.

        Returns [splits[rank], hidden]. Gradient: `dispatch` of the result's gradient; on GPUs all ranks ask for it, or
        none.
        Raises, on every rank: TypeError or ValueError for bad arguments (PeerRefused on the ranks whose own were good),
        CallMismatch where ranks entered different calls, PeerTimeout where some did not come.
        """
        return routes.combine(self, x, mode, splits, out, out_dtype, capacity)

    def combine_rows(
        self,
        rows: Tensor,
        row_of_slot: Tensor,
        rank_of_slot: Tensor,
        weights: Tensor | None = None,
        *,
        product_dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The `owner` combine: each token's top-k expert rows, summed exactly where the token lives. Differentiable.

        rows           [R, hidden] fp32 or bf16, what this rank's experts made; R may differ between ranks.
        row_of_slot    int [t, K]: for this rank's t tokens and K slots, a row number of the rank that has it.
        rank_of_slot   int [t, K]: that rank; -1 where a slot is not routed (its row is not read).
        weights        fp32 [t, K] or None. The addend is the product weight * row rounded to product_dtype.
        product_dtype  torch.float32 or torch.bfloat16.

        Returns [t, hidden], fp32 or `out_dtype`. The bits depend neither on the number of ranks nor on which expert
        sits on which rank. Gradients to rows are exact sums over the slots that used a row, those to weights exact
        inner products: as independent. Raises IndexError on the rank whose map names a row that does not exist;
        otherwise as `combine`.
        """
        maps = (row_of_slot, rank_of_slot, weights)
        return routes.combine_rows(self, rows, *maps, product_dtype, out, out_dtype)

    def dispatch(
        self,
        x: Tensor,
        *,
        splits: Any = None,
        mode: Mode | None = None,
        out: Tensor | None = None,
        capacity: int | None = None,
    ) -> Tensor:
        """Give every rank all tokens: the all-gather whose gradient is `combine`. Differentiable.

        x         [splits[rank], hidden], any dtype of 1, 2, 4 or 8 bytes.
        splits    as for `combine`; None where each rank knows its own count only.
        mode      the contract of the gradient's combine; None for the communicator's own. A gradient in another dtype
                  than fp32 is widened, combined, and rounded back.
        capacity  rows of the result where splits is on the GPU.

        Returns [sum(splits), hidden], the tokens of rank 0 first.
        """
        return routes.dispatch(self, x, splits, mode, out, capacity)

    def exchange_counts(self, own: int | Tensor) -> Tensor:
        """Every rank's number, where each knows its own: int64 [W] on this communicator's device.

        own: an int, or an integer tensor of one element; on a GPU it is read on the device, so that counting, combine
        and dispatch can be one captured graph: `splits=comm.exchange_counts(own)`.
        """
        with self._refusing("dispatch"):
            count = arguments.count_of(own)
        return self._transport.exchange_counts(count)

    def barrier(self) -> None:
        """Wait for all ranks: the caller on a CPU, the current stream on a GPU."""
        self._transport.barrier()

    # --------------------------------------------------------------------------------------------------- zero-copy

    @contextmanager
    def acquire(self, tokens: int, hidden: int, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
        """A tensor [tokens, hidden] in symmetric memory: experts write it, combine and combine_rows read it in place.

        Collective where it must grow the memory. Leaving the block releases it; write nothing into it afterwards.
        """
        with self._refusing(ACQUIRE):
            self._acquired.check_released(self.rank)
            shape, nbytes = arguments.buffer_of(tokens, hidden, dtype)
        tensor = self._acquired.hold(self._transport.take(nbytes), shape, dtype)
        try:
            yield tensor
        finally:
            self._acquired.give(tensor)

    def reserve(self, tokens: int, hidden: int, dtype: torch.dtype = torch.float32) -> None:
        """Make room for an operand [tokens, hidden] now, all ranks together, so that a captured graph need not grow."""
        with self._refusing(ACQUIRE):
            _, nbytes = arguments.buffer_of(tokens, hidden, dtype)
        self._transport.release(self._transport.take(nbytes))

    # ------------------------------------------------------------------------------------------------------ faults

    def check(self) -> None:
        """Raise what went wrong in calls that have not reported yet. Waits for nobody."""
        self._transport.check()

    def abort(self, reason: str = "no reason given") -> None:
        """Make every rank's calls raise Aborted until all ranks call `recover()`."""
        self._transport.abort(reason)

    def recover(self) -> None:
        """Make the communicator usable again; called by all ranks together. Raises PeerTimeout if some do not come."""
        self._acquired.forget_released()
        self._transport.recover()

    def suspend(self) -> None:
        """Give the symmetric memory back. Called by all ranks; the next call, or `resume`, takes it again.

        What captured CUDA graphs hold stays, at its address, so they stay valid: `memory()["captured"]` bytes. To have
        those too, drop the graphs and make a new communicator.
        """
        if len(self._acquired):
            raise RuntimeError(f"{len(self._acquired)} acquired buffers are still in use: leave their blocks first")
        self._acquired.check_released(self.rank)
        self._transport.suspend()

    def resume(self, tokens: int, hidden: int) -> None:
        """Take memory for an operand [tokens, hidden] again; the same as `reserve`."""
        self.reserve(tokens, hidden)

    def close(self) -> None:
        """Let go of everything. Not collective; later calls are errors, also those of ranks that wait for this one."""
        if not isinstance(self._transport, Closed):
            if self._process == os.getpid():  # a fork would close its parent's connections, or wait for their threads
                self._transport.close()
            self._transport = cast(Transport, Closed())

    # ------------------------------------------------------------------------------------- what the operators call

    def _mode_or(self, mode: Mode | None) -> Mode:
        if mode is not None:
            return mode
        if self._mode is None:
            raise ValueError(
                "which bits? pass mode='ordered', 'exact', 'multimem', 'fp64' or a bicomm.Contract to this call, or "
                "give the communicator a mode: there is no silent default"
            )
        return self._mode

    def _contract_of(self, mode: str) -> Contract:
        """The contract of a combine, checked."""
        contract = _plan.resolve(mode, self._facts)
        if contract.rule == "owner":
            raise ValueError(
                "mode='owner' sums expert rows, not partials: call combine_rows(rows, row_of_slot, rank_of_slot)"
            )
        if mode == "multimem" and not self._judged:
            self._judge_switch()
        return contract

    def _by_switch(self, mode: str) -> bool:
        """Whether the switch was given this mode when the communicator was made; what happened since, kernels know."""
        if mode not in self._switched:
            self._switched[mode] = _plan.plan(mode, self._facts).executor.startswith(_plan.SWITCH)
        return self._switched[mode]

    @contextmanager
    def _refusing(self, operation: str) -> Iterator[None]:
        """What goes wrong in this block concerns this rank alone: the others learn it, so that they need not wait."""
        try:
            yield
        except Exception as refusal:
            self._transport.refuse(operation, refusal)
            raise

    def _combine(
        self,
        x: Tensor,
        splits: Any,
        mode: str,
        out: Tensor | None,
        out_dtype: torch.dtype | None,
        capacity: int | None,
        asked: Asked | None = None,
    ) -> Tensor:
        with self._refusing("combine"):
            self._acquired.check_released(self.rank)
            contract = self._contract_of(mode)
            switch = self._by_switch(mode)
            arguments.check_partials(x, self.device, mode)
            x = arguments.resolved(x)
            shares = self._transport.shares(splits, x.shape[0])
            rows = self._transport.rows_of(shares, x.shape[0] if capacity is None else capacity)
            dtype = arguments.check_output(out, out_dtype, (rows, x.shape[1]), self.device)
            self._acquired.check_operand(x, out)
            result = x.new_empty((rows, x.shape[1]), dtype=dtype) if out is None else out
        with self._asking(asked):
            self._transport.combine(x, shares, contract, result, self._acquired.place_of(x), switch)
        return result

    def _combine_rows(
        self,
        rows: Tensor,
        row_of_slot: Tensor,
        rank_of_slot: Tensor,
        weights: Tensor | None,
        product_dtype: torch.dtype,
        out: Tensor | None,
        out_dtype: torch.dtype | None,
        asked: Asked | None = None,
    ) -> Tensor:
        with self._refusing("combine_rows"):
            self._acquired.check_released(self.rank)
            arguments.check_rows(rows, self.device)
            arguments.check_maps(rows, row_of_slot, rank_of_slot, weights, product_dtype)
            rows, weights = arguments.resolved(rows), None if weights is None else arguments.resolved(weights)
            shape = (row_of_slot.shape[0], rows.shape[1])
            dtype = arguments.check_output(out, out_dtype, shape, self.device)
            self._acquired.check_operand(rows, out)
            result = rows.new_empty(shape, dtype=dtype) if out is None else out
        operands = Rows(rows, row_of_slot, rank_of_slot, weights, product_dtype)
        with self._asking(asked):
            self._transport.combine_rows(operands, OWNER, result, self._acquired.place_of(rows))
        return result

    def _dispatch(
        self, x: Tensor, splits: Any, out: Tensor | None, capacity: int | None, asked: Asked | None = None
    ) -> Tensor:
        with self._refusing("dispatch"):
            self._acquired.check_released(self.rank)
            arguments.check_operand(x, "x", self.device, [], "")
            x = arguments.resolved(x)
            shares = None if splits is None else self._transport.shares(splits, None)
            if shares is not None and not isinstance(shares, Tensor) and shares[self.rank] != x.shape[0]:
                raise ValueError(
                    f"splits {list(shares)} give rank {self.rank} {shares[self.rank]} tokens, and its x has "
                    f"{x.shape[0]}"
                )
            self._acquired.check_operand(x, None)
        with self._asking(asked):
            return self._transport.dispatch(x, shares, out, capacity)

    @contextmanager
    def _asking(self, asked: Asked | None) -> Iterator[None]:
        """Say in the next call what this rank will ask a gradient for. Without gradients, it could join nobody's."""
        self._transport.asked = asked or Asked("", fixed=not torch.is_grad_enabled())
        try:
            yield
        finally:
            self._transport.asked = Asked()


def _caller_level() -> int:
    """The stacklevel of a warning in the calling function that points at the code which uses bicomm."""
    inside = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (arguments, torch))
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level


@dataclasses.dataclass(frozen=True)
class LocalRank:
    """One rank of a local world, while it is being put together."""

    transport: Transport
    facts: _plan.Facts
    device: torch.device

    def communicator(self, rank: int, mode: Mode | None, debug: bool) -> Communicator:
        """The communicator around this rank's transport."""
        made = Communicator.__new__(Communicator)
        made._adopt(self.transport, self.facts, rank, self.device, mode, debug=debug)
        return made
