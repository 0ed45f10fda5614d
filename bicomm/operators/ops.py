"""combine, dispatch and combine_rows as torch operators: with gradients, for torch.compile and for checkpointing.

The operators carry an ordered effect: compiled code keeps each of them, in order, also where a result has no rows or is
not used. Without it Inductor removes the call on a rank with zero tokens, and the other ranks wait for it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor
from torch._library.effects import EffectType

from bicomm.errors import BicommError
from bicomm.operators.inductor import keep_order
from bicomm.operators.rows_gradient import of_rows, of_weights
from bicomm.transports.base import Asked

if TYPE_CHECKING:
    from bicomm.communicator import Communicator

_communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def register(communicator: Communicator) -> int:
    """A number that the operators know this communicator by, in this process."""
    handle = next(_handles)
    _communicators[handle] = communicator
    return handle


def of(handle: int) -> Communicator:
    """The communicator with this number. Raises BicommError where it is gone."""
    found = _communicators.get(handle)
    if found is None:
        raise BicommError("the communicator of this call is gone: keep it until the last backward pass that needs it")
    return found


# Arguments that all three have. handle: of the communicator. rank, size: part of the operator, since compiled code is
# cached by its arguments and shared between processes, and its shapes depend on them. asked: which operands require a
# gradient; fixed: said by compiled code, which cannot do more in the backward pass than what it was compiled for.
#
# Host splits are ints, and compiled code is compiled again for other values; `counts` is the same as a tensor, on the
# CPU (the result's size is then known at run time only) or on the GPU (the result then has `capacity` rows).


@torch.library.custom_op("bicomm::combine", mutates_args=())
def combine(
    x: Tensor,
    splits: Optional[Sequence[int]],  # noqa: UP045 - the operator's schema is read from these
    counts: Optional[Tensor],  # noqa: UP045
    handle: int,
    rank: int,
    size: int,
    mode: str,
    out_dtype: torch.dtype,
    capacity: int,
    asked: str,
    fixed: bool,
) -> Tensor:
    """See Communicator.combine."""
    with torch.no_grad():
        return of(handle)._combine(x, _shares(splits, counts), mode, None, out_dtype, capacity, Asked(asked, fixed))


@combine.register_fake
def _(x, splits, counts, handle, rank, size, mode, out_dtype, capacity, asked, fixed):  # type: ignore[no-untyped-def]
    keep_order()
    if splits is not None:
        rows = splits[rank]
    elif counts is None:
        rows = x.shape[0] // size
    else:
        rows = capacity if counts.is_cuda else torch.library.get_ctx().new_dynamic_size()
    return x.new_empty((rows, x.shape[1]), dtype=out_dtype)


@torch.library.custom_op("bicomm::dispatch", mutates_args=())
def dispatch(
    x: Tensor,
    splits: Optional[Sequence[int]],  # noqa: UP045
    counts: Optional[Tensor],  # noqa: UP045
    handle: int,
    rank: int,
    size: int,
    mode: str,
    capacity: int,
    asked: str,
    fixed: bool,
) -> Tensor:
    """See Communicator.dispatch. mode: of the combine that is this operator's gradient."""
    with torch.no_grad():
        return of(handle)._dispatch(x, _shares(splits, counts), None, capacity, Asked(asked, fixed))


@dispatch.register_fake
def _(x, splits, counts, handle, rank, size, mode, capacity, asked, fixed):  # type: ignore[no-untyped-def]
    keep_order()
    if splits is not None:
        rows = sum(splits)
    else:
        rows = capacity if counts is not None and counts.is_cuda else torch.library.get_ctx().new_dynamic_size()
    return x.new_empty((rows, x.shape[1]))


@torch.library.custom_op("bicomm::combine_rows", mutates_args=())
def combine_rows(
    rows: Tensor,
    row_of_slot: Tensor,
    rank_of_slot: Tensor,
    weights: Optional[Tensor],  # noqa: UP045
    handle: int,
    rank: int,
    size: int,
    product_dtype: torch.dtype,
    out_dtype: torch.dtype,
    asked: str,
    fixed: bool,
) -> Tensor:
    """See Communicator.combine_rows."""
    with torch.no_grad():
        comm = of(handle)
        return comm._combine_rows(
            rows, row_of_slot, rank_of_slot, weights, product_dtype, None, out_dtype, Asked(asked, fixed)
        )


@combine_rows.register_fake
def _(rows, row_of_slot, rank_of_slot, weights, handle, rank, size, product_dtype, out_dtype, asked, fixed):  # type: ignore[no-untyped-def]
    keep_order()
    return rows.new_empty((row_of_slot.shape[0], rows.shape[1]), dtype=out_dtype)


def _shares(splits: Sequence[int] | None, counts: Tensor | None) -> Any:
    return counts if splits is None else splits


# --------------------------------------------------------------------------------------- operators of backward passes


@torch.library.custom_op("bicomm::combine_counted", mutates_args=())
def combine_counted(grad: Tensor, handle: int, rank: int, size: int, mode: str, rows: int) -> Tensor:
    """The gradient of a dispatch in which each rank knew its own count only, `rows`: they tell each other here."""
    with torch.no_grad():
        comm = of(handle)
        return comm._combine(grad, comm.exchange_counts(rows), mode, None, torch.float32, rows)


@combine_counted.register_fake
def _(grad, handle, rank, size, mode, rows):  # type: ignore[no-untyped-def]
    keep_order()
    return grad.new_empty((rows, grad.shape[1]), dtype=torch.float32)


@torch.library.custom_op("bicomm::combine_rows_backward", mutates_args=())
def combine_rows_backward(
    grad: Tensor,
    rows: Tensor,
    row_of_slot: Tensor,
    rank_of_slot: Tensor,
    weights: Optional[Tensor],  # noqa: UP045
    handle: int,
    rank: int,
    size: int,
    words: str,
) -> tuple[Tensor, Tensor]:
    """The gradients to rows and weights, each without elements where `words` does not name it."""
    with torch.no_grad():
        maps = (row_of_slot, rank_of_slot, weights)
        to_rows, to_weights = rows.new_empty(0), grad.new_empty(0, dtype=torch.float32)
        if "rows" in words:
            to_rows = of_rows(of(handle), grad, rows, *maps)
        if "weights" in words:
            to_weights = of_weights(of(handle), grad, rows, *maps)
        return to_rows, to_weights


@combine_rows_backward.register_fake
def _(grad, rows, row_of_slot, rank_of_slot, weights, handle, rank, size, words):  # type: ignore[no-untyped-def]
    keep_order()
    to_rows = torch.empty_like(rows, memory_format=torch.contiguous_format) if "rows" in words else rows.new_empty(0)
    shape = row_of_slot.shape if "weights" in words else (0,)
    return to_rows, grad.new_empty(shape, dtype=torch.float32)


# -------------------------------------------------------------------------------------------------------- gradients


def asks(**operands: Any) -> str:
    """The names of the operands that require a gradient here, joined by a +."""
    if not torch.is_grad_enabled():
        return ""
    return "+".join([name for name, x in operands.items() if isinstance(x, Tensor) and x.requires_grad])


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, splits, counts, ctx.handle, ctx.rank, ctx.size, ctx.mode, _, _, _, ctx.fixed = inputs
    ctx.rows = x.shape[0]
    if splits is None and counts is None:
        splits = [output.shape[0]] * ctx.size
    ctx.splits = None if splits is None else list(splits)
    ctx.save_for_backward(counts)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Every rank's partials enter a token's sum with factor 1: their gradient is that of the sum, from its owner."""
    (counts,) = ctx.saved_tensors
    grad = grad.contiguous()
    spread = dispatch(grad, ctx.splits, counts, *_who(ctx), ctx.mode, ctx.rows, asks(x=grad), ctx.fixed)
    return (spread.float(), *[None] * 10)


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, splits, counts, ctx.handle, ctx.rank, ctx.size, ctx.mode, _, _, ctx.fixed = inputs
    ctx.rows, ctx.dtype = x.shape[0], x.dtype
    ctx.splits = None if splits is None else list(splits)
    ctx.save_for_backward(counts)


def _dispatch_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Every rank used a token: their gradients are combined at its owner, in fp32, under the stated contract."""
    (counts,) = ctx.saved_tensors
    partials = grad.float().contiguous()
    if ctx.splits is None and counts is None:
        total = combine_counted(partials, *_who(ctx), ctx.mode, ctx.rows)
    else:
        asked = asks(x=partials)
        total = combine(partials, ctx.splits, counts, *_who(ctx), ctx.mode, torch.float32, ctx.rows, asked, ctx.fixed)
    return (total.to(ctx.dtype), *[None] * 9)


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, row_of_slot, rank_of_slot, weights, ctx.handle, ctx.rank, ctx.size, _, _, asked, fixed = inputs
    # Eager code also computes what only other ranks ask for, since that is collective.
    agreed = None if fixed else of(ctx.handle).transport.agreed
    ctx.words = asked if agreed is None else agreed
    ctx.save_for_backward(rows, row_of_slot, rank_of_slot, weights)


def _rows_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """To a row: weight * the gradient of its token. To a weight: the inner product of its row and that gradient."""
    rows, row_of_slot, rank_of_slot, weights = ctx.saved_tensors
    to_rows, to_weights = combine_rows_backward(
        grad.contiguous(), rows, row_of_slot, rank_of_slot, weights, *_who(ctx), ctx.words
    )
    needs = ctx.needs_input_grad
    return (to_rows if needs[0] else None, None, None, to_weights if needs[3] else None, *[None] * 7)


def _who(ctx: Any) -> tuple[int, int, int]:
    return ctx.handle, ctx.rank, ctx.size


class _Join(torch.autograd.Function):
    """A result that needs no gradient for this rank's operands, but takes part in the backward pass of the others'."""

    @staticmethod
    def forward(
        ctx: Any, ticket: Tensor, box: list[Tensor], backward: Callable[[Any, Tensor], Any], call: Any
    ) -> Tensor:
        ctx.backward, ctx.call = backward, call
        return box.pop()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.backward(ctx.call, grad)
        return (None,) * 4


def _join(
    result: Tensor, backward: Callable[[Any, Tensor], Any], comm: Communicator, saved: Any, **call: Any
) -> Tensor:
    """call: what the backward function finds in its context, where the operator itself did not run."""
    who = {"handle": comm.handle, "rank": comm.rank, "size": comm.size, "fixed": False}
    context = SimpleNamespace(saved_tensors=saved, needs_input_grad=(False,) * 4, **who, **call)
    ticket = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
    joined: Tensor = _Join.apply(ticket, [result], backward, context)  # type: ignore[no-untyped-call]
    return joined


def join_combine(
    result: Tensor, comm: Communicator, splits: list[int] | None, counts: Tensor | None, mode: str, rows: int
) -> Tensor:
    """The result of a combine whose operand requires a gradient on other ranks only."""
    return _join(result, _combine_backward, comm, (counts,), splits=splits, mode=mode, rows=rows)


def join_dispatch(
    result: Tensor, comm: Communicator, splits: list[int] | None, counts: Tensor | None, mode: str, x: Tensor
) -> Tensor:
    """The same for dispatch. This rank used the others' tokens, so its gradient is part of theirs."""
    return _join(result, _dispatch_backward, comm, (counts,), splits=splits, mode=mode, rows=x.shape[0], dtype=x.dtype)


def join_rows(
    result: Tensor, comm: Communicator, operands: tuple[Tensor, Tensor, Tensor, Tensor | None], words: str
) -> Tensor:
    """The same for combine_rows."""
    return _join(result, _rows_backward, comm, operands, words=words)


combine.register_autograd(_combine_backward, setup_context=_combine_setup)
dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_setup)
combine_rows.register_autograd(_rows_backward, setup_context=_rows_setup)

for _operator in (combine, dispatch, combine_rows, combine_counted, combine_rows_backward):
    _operator.register_effect(EffectType.ORDERED)


def save_collectives(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """A policy for selective activation checkpointing that keeps the results of bicomm's collectives.

    Use: `functools.partial(create_selective_checkpoint_contexts, bicomm.save_collectives)` as checkpoint's context_fn.
    Without it the collectives run again in the backward pass, on all ranks alike, with the same bits.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    mine = (torch.ops.bicomm.combine.default, torch.ops.bicomm.dispatch.default, torch.ops.bicomm.combine_rows.default)
    return CheckpointPolicy.MUST_SAVE if op in mine else CheckpointPolicy.PREFER_RECOMPUTE
