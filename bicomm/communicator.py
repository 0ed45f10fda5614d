"""The front door: a communicator of a group of ranks, with its contract, its plan and its collectives."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bicomm import arguments, ops
from bicomm import plan as _plan
from bicomm.arguments import Mode
from bicomm.contract import OWNER, Contract
from bicomm.establish import Request, establish
from bicomm.symmem.arenas import Place
from bicomm.transport import Rows, Transport

TIMEOUT = 30.0  # seconds; BICOMM_TIMEOUT overrides it


class Communicator:
    """Combine and dispatch among the ranks of a group, under a contract.

    Made by all ranks of the group together, with equal arguments. After a PeerTimeout every call raises, on every rank,
    until all ranks call `recover()`; after any other error the communicator can be used at once.

    group         a torch process group; None for the one that `bicomm.init` found.
    max_tokens,   rows and columns of the largest fp32 operand: its symmetric memory is taken now. Larger operands grow
    hidden        it, all ranks together, except under CUDA graph capture.
    mode          `ordered`, `exact`, `multimem`, `fp64`, a preset, a contract id or a `Contract`; None if each call says.
    strict        raise, rather than run the same contract in software, where mode="multimem" cannot use the switch.
    timeout       seconds that a call waits for the other ranks (default 30, or BICOMM_TIMEOUT).
    device        where operands live; None for the device that `bicomm.init` chose.
    share_memory  False: never map other ranks' memory; rows travel by all-to-all.
    debug         catch writes into released buffers, at the cost of a check at each release (or BICOMM_DEBUG=1).

    Raises NotInitialized without a group, ValueError where the ranks' arguments differ, NoSharedMemory for strict.
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
    ) -> None:
        from bicomm.world import current

        world = current()
        chosen = group if group is not None else world.group
        where = torch.device(device) if device is not None else world.device
        seconds = float(os.environ.get("BICOMM_TIMEOUT", TIMEOUT)) if timeout is None else float(timeout)
        name = "" if mode is None else (mode if isinstance(mode, str) else mode.id)
        watch = os.environ.get("BICOMM_DEBUG", "") not in ("", "0") if debug is None else debug
        request = Request(max_tokens, hidden, name, strict, where.type, share_memory, seconds, watch)
        if mode is not None and mode != "multimem":
            arguments.contract_of(mode)  # an unknown one is refused before anyone waits
        transport, facts = establish(chosen, where, request)
        self._adopt(transport, facts, dist.get_rank(chosen), where, mode, strict, watch)

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
        self.debug = debug
        self._transport, self._facts = transport, facts
        self._mode = mode
        self._acquired: dict[int, Place] = {}
        self._poisoned: list[tuple[Place, Tensor]] = []
        self.stream: torch.cuda.Stream | None = None  # of a local world's rank on a GPU
        self.handle = ops.register(self)
        if mode == "multimem":
            self._judge_switch()

    def _judge_switch(self) -> None:
        chosen = self.plan("multimem")
        if chosen.executor.startswith(_plan.SWITCH):
            return
        reason = chosen.candidates[0].reason
        if self.strict:
            raise RuntimeError(f"mode='multimem' with strict=True: the NVLink switch cannot be used: {reason}")
        if self.rank == 0:
            warnings.warn(
                f"mode='multimem' runs in software, with the bits of {chosen.contract.id}: {reason}", stacklevel=4
            )

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
        return _plan.plan(self._mode_or(mode), self._facts)

    def memory(self) -> dict[str, int]:
        """Bytes of symmetric memory on this rank: `held`, and of these `in_use`."""
        return self._transport.memory()

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

        Returns [splits[rank], hidden]. Gradient: `dispatch` of the result's gradient.
        Raises, on every rank: TypeError or ValueError for bad arguments (PeerRefused on the ranks whose own were good),
        CallMismatch where ranks entered different calls, PeerTimeout where some did not come.
        """
        name = _name_of(self._mode_or(mode))
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad):
            if out is not None:
                raise ValueError("out= cannot be used with gradients or under torch.compile: the result is a new tensor")
            listed, counts = _for_operator(splits)
            dtype = torch.float32 if out_dtype is None else out_dtype
            limit = x.shape[0] if capacity is None else capacity
            return ops.combine(x, listed, counts, self.handle, self.rank, name, dtype, limit)
        return self._combine(x, splits, name, out, out_dtype, capacity)

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

        Returns [t, hidden], fp32 or `out_dtype`. The bits depend neither on the number of ranks nor on which expert sits
        on which rank. Raises IndexError on the rank whose map names a row that does not exist; otherwise as `combine`.
        """
        tensors = [x for x in (rows, weights) if isinstance(x, Tensor)]
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            if out is not None:
                raise ValueError("out= cannot be used with gradients or under torch.compile: the result is a new tensor")
            dtype = torch.float32 if out_dtype is None else out_dtype
            return ops.combine_rows(
                rows, row_of_slot, rank_of_slot, weights, self.handle, self.rank, product_dtype, dtype
            )
        return self._combine_rows(rows, row_of_slot, rank_of_slot, weights, product_dtype, out, out_dtype)

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
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad):
            name = _name_of(self._mode_or(mode))
            if out is not None:
                raise ValueError("out= cannot be used with gradients or under torch.compile: the result is a new tensor")
            listed, counts = _for_operator(splits)
            limit = x.shape[0] * self.size if capacity is None else capacity
            return ops.dispatch(x, listed, counts, self.handle, self.rank, name, limit)
        return self._dispatch(x, splits, out, capacity)

    # --------------------------------------------------------------------------------------------------- zero-copy

    @contextmanager
    def acquire(self, tokens: int, hidden: int, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
        """A tensor [tokens, hidden] in symmetric memory: experts write it, `combine` and `combine_rows` read it in place.

        Collective where it must grow the memory. Leaving the block releases it; write nothing into it afterwards.
        """
        self._check_poison()
        place = self._transport.take(tokens * hidden * dtype.itemsize)
        tensor = place.view((tokens, hidden), dtype)
        self._acquired[tensor.data_ptr()] = place
        try:
            yield tensor
        finally:
            self._acquired.pop(tensor.data_ptr(), None)
            if self.debug:
                bits = tensor.reshape(-1).view(torch.uint8)
                bits.fill_(0xA5)
                self._poisoned.append((place, bits))
            else:
                self._transport.release(place)

    def _check_poison(self) -> None:
        """In debug mode a released buffer is filled with 0xA5 and kept until it is seen that nobody wrote it."""
        poisoned, self._poisoned = self._poisoned, []
        for place, bits in poisoned:
            self._transport.release(place)
        for place, bits in poisoned:
            if bool((bits != 0xA5).any()):
                raise RuntimeError(
                    f"rank {self.rank}: a buffer of {place.nbytes:,} bytes was written after it was released. Write the "
                    f"partials inside the `with comm.acquire(...)` block, and combine them there"
                )

    def reserve(self, tokens: int, hidden: int, dtype: torch.dtype = torch.float32) -> None:
        """Make room for an operand [tokens, hidden] now, all ranks together, so that a captured graph need not grow."""
        self._transport.release(self._transport.take(tokens * hidden * dtype.itemsize))

    # ------------------------------------------------------------------------------------------------------ faults

    def check(self) -> None:
        """Raise what went wrong in calls that have not reported yet. Waits for nobody."""
        self._transport.check()

    def abort(self, reason: str = "no reason given") -> None:
        """Make every rank's calls raise Aborted until all ranks call `recover()`."""
        self._transport.abort(reason)

    def recover(self) -> None:
        """Make the communicator usable again; called by all ranks together. Raises PeerTimeout if some do not come."""
        self._transport.recover()

    def suspend(self) -> None:
        """Give the symmetric memory back. Called by all ranks; the next call, or `resume`, takes it again."""
        if self._acquired:
            raise RuntimeError(f"{len(self._acquired)} acquired buffers are still in use: leave their blocks first")
        self._check_poison()
        self._transport.suspend()

    def resume(self, tokens: int, hidden: int) -> None:
        """Take memory for an operand [tokens, hidden] again; the same as `reserve`."""
        self.reserve(tokens, hidden)

    def close(self) -> None:
        """Let go of everything. Not collective; later calls are errors."""
        self._transport.close()

    # ------------------------------------------------------------------------------------- what the operators call

    def _mode_or(self, mode: Mode | None) -> Mode:
        if mode is not None:
            return mode
        if self._mode is None:
            raise ValueError(
                "which bits? pass mode='ordered', 'exact', 'multimem', 'fp64' or a bicomm.Contract to this call, or give "
                "the communicator a mode: there is no silent default"
            )
        return self._mode

    def _combine(
        self, x: Tensor, splits: Any, mode: str, out: Tensor | None, out_dtype: torch.dtype | None, capacity: int | None
    ) -> Tensor:
        try:
            self._check_poison()
            contract = _plan.resolve(mode, self._facts)
            if contract.rule == "owner":
                raise ValueError(
                    "mode='owner' sums expert rows, not partials: call combine_rows(rows, row_of_slot, rank_of_slot)"
                )
            arguments.check_partials(x, self.device, mode)
            shares = self._transport.shares(splits, x.shape[0])
            rows = self._transport.rows_of(shares, x.shape[0] if capacity is None else capacity)
            dtype = arguments.check_output(out, out_dtype, (rows, x.shape[1]), self.device)
            result = x.new_empty((rows, x.shape[1]), dtype=dtype) if out is None else out
        except (TypeError, ValueError) as refusal:
            self._transport.refuse("combine", refusal)
            raise
        self._transport.combine(x, shares, contract, result, self._place_of(x))
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
    ) -> Tensor:
        try:
            self._check_poison()
            advice = "expert rows are summed from fp32 or bf16"
            arguments.check_operand(rows, "rows", self.device, [torch.float32, torch.bfloat16], advice)
            arguments.check_maps(rows, row_of_slot, rank_of_slot, weights, product_dtype)
            shape = (row_of_slot.shape[0], rows.shape[1])
            dtype = arguments.check_output(out, out_dtype, shape, self.device)
            result = rows.new_empty(shape, dtype=dtype) if out is None else out
        except (TypeError, ValueError) as refusal:
            self._transport.refuse("combine_rows", refusal)
            raise
        operands = Rows(rows, row_of_slot, rank_of_slot, weights, product_dtype)
        self._transport.combine_rows(operands, OWNER, result, self._place_of(rows))
        return result

    def _dispatch(self, x: Tensor, splits: Any, out: Tensor | None, capacity: int | None) -> Tensor:
        try:
            self._check_poison()
            arguments.check_operand(x, "x", self.device, [], "")
            shares = None if splits is None else self._transport.shares(splits, None)
            if shares is not None and not isinstance(shares, Tensor) and shares[self.rank] != x.shape[0]:
                raise ValueError(
                    f"splits {list(shares)} give rank {self.rank} {shares[self.rank]} tokens, and its x has {x.shape[0]}"
                )
        except (TypeError, ValueError) as refusal:
            self._transport.refuse("dispatch", refusal)
            raise
        return self._transport.dispatch(x, shares, out, capacity)

    def _gather_counts(self, own: int) -> list[int]:
        mine = torch.tensor([[own]], dtype=torch.int64, device=self.device)
        return [int(n) for n in self._dispatch(mine, None, None, None)[:, 0]]

    def _place_of(self, x: Tensor) -> Place | None:
        """Where an operand lies, if it is an acquired buffer or begins one: then nothing is copied."""
        place = self._acquired.get(x.data_ptr())
        return place if place is not None and x.is_contiguous() else None


def _name_of(mode: Mode) -> str:
    return mode if isinstance(mode, str) else mode.id


def _for_operator(splits: Any) -> tuple[list[int] | None, Tensor | None]:
    if splits is None:
        return None, None
    if isinstance(splits, Tensor):
        return (None, splits) if torch.compiler.is_compiling() or splits.is_cuda else (splits.tolist(), None)
    return [int(n) for n in splits], None


@dataclasses.dataclass(frozen=True)
class LocalRank:
    """One rank of a local world, while it is being put together."""

    transport: Transport
    facts: _plan.Facts
    device: torch.device

    def communicator(self, rank: int, mode: Mode | None) -> Communicator:
        """The communicator around this rank's transport."""
        made = Communicator.__new__(Communicator)
        made._adopt(self.transport, self.facts, rank, self.device, mode)
        return made
