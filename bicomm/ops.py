"""combine, dispatch and combine_rows as torch operators: with gradients, for torch.compile and for checkpointing.

The operators carry an ordered effect: compiled code keeps each of them, in order, also where a result has no rows or is
not used. Without it Inductor removes the call on a rank with zero tokens, and the other ranks wait for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor
from torch._library.effects import EffectType

from bicomm.contract import EXACT

if TYPE_CHECKING:
    from bicomm.communicator import Communicator

_communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_next_handle = 0


def register(communicator: Communicator) -> int:
    """A number that the operators know this communicator by, in this process."""
    global _next_handle
    _next_handle += 1
    _communicators[_next_handle] = communicator
    return _next_handle


def of(handle: int) -> Communicator:
    """The communicator with this number."""
    return _communicators[handle]


# Host splits are ints, and compiled code is compiled again for other values; `counts` is the same as a tensor, on the CPU
# (the result's size is then known at run time only) or on the GPU (the result then has `capacity` rows).


@torch.library.custom_op("bicomm::combine", mutates_args=())
def combine(
    x: Tensor,
    splits: Optional[Sequence[int]],  # noqa: UP045 - the operator's schema is read from these
    counts: Optional[Tensor],  # noqa: UP045
    handle: int,
    rank: int,
    mode: str,
    out_dtype: torch.dtype,
    capacity: int,
) -> Tensor:
    """See Communicator.combine."""
    with torch.no_grad():
        return of(handle)._combine(x, _shares(splits, counts), mode, None, out_dtype, capacity)


@combine.register_fake
def _(x, splits, counts, handle, rank, mode, out_dtype, capacity):  # type: ignore[no-untyped-def]
    if splits is not None:
        rows = splits[rank]
    elif counts is None:
        rows = x.shape[0] // of(handle).size
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
    mode: str,
    capacity: int,
) -> Tensor:
    """See Communicator.dispatch. mode: of the combine that is this operator's gradient."""
    with torch.no_grad():
        return of(handle)._dispatch(x, _shares(splits, counts), None, capacity)


@dispatch.register_fake
def _(x, splits, counts, handle, rank, mode, capacity):  # type: ignore[no-untyped-def]
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
    product_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    """See Communicator.combine_rows."""
    with torch.no_grad():
        return of(handle)._combine_rows(rows, row_of_slot, rank_of_slot, weights, product_dtype, None, out_dtype)


@combine_rows.register_fake
def _(rows, row_of_slot, rank_of_slot, weights, handle, rank, product_dtype, out_dtype):  # type: ignore[no-untyped-def]
    return rows.new_empty((row_of_slot.shape[0], rows.shape[1]), dtype=out_dtype)


def _shares(splits: Sequence[int] | None, counts: Tensor | None) -> Any:
    return counts if splits is None else splits


# -------------------------------------------------------------------------------------------------------- gradients


def _save_shares(ctx: Any, splits: Sequence[int] | None, counts: Tensor | None) -> None:
    ctx.splits = None if splits is None else list(splits)
    ctx.save_for_backward(counts)


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, splits, counts, ctx.handle, ctx.rank, ctx.mode, _, _ = inputs
    ctx.rows = x.shape[0]
    if splits is None and counts is None:
        splits = [output.shape[0]] * of(ctx.handle).size
    _save_shares(ctx, splits, counts)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Every rank's partials enter a token's sum with factor 1: their gradient is that of the sum, from its owner."""
    (counts,) = ctx.saved_tensors
    spread = dispatch(grad.contiguous(), ctx.splits, counts, ctx.handle, ctx.rank, ctx.mode, ctx.rows)
    return (spread.float(), *[None] * 7)


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, splits, counts, ctx.handle, ctx.rank, ctx.mode, _ = inputs
    ctx.rows, ctx.dtype = x.shape[0], x.dtype
    if splits is None and counts is None:
        ctx.save_for_backward(x.new_tensor([x.shape[0]], dtype=torch.int64).cpu())
        ctx.splits = None
        ctx.own = True
    else:
        _save_shares(ctx, splits, counts)
        ctx.own = False


def _dispatch_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Every rank used a token: their gradients are combined at its owner, in fp32, under the stated contract."""
    (counts,) = ctx.saved_tensors
    splits = ctx.splits
    if ctx.own:  # every rank knew its own count only
        splits, counts = of(ctx.handle)._gather_counts(ctx.rows), None
    total = combine(grad.float(), splits, counts, ctx.handle, ctx.rank, ctx.mode, torch.float32, ctx.rows)
    return (total.to(ctx.dtype), *[None] * 6)


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, row_of_slot, rank_of_slot, weights, ctx.handle, ctx.rank, _, _ = inputs
    ctx.save_for_backward(rows, row_of_slot, rank_of_slot, weights)


def _rows_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """To a row: weight * the gradient of its token. To a weight: the inner product of its row and that gradient."""
    rows, row_of_slot, rank_of_slot, weights = ctx.saved_tensors
    grad_rows = grad_weights = None
    if ctx.needs_input_grad[0]:
        grad_rows = _gradient_of_rows(ctx, grad, rows, row_of_slot, rank_of_slot, weights)
    if weights is not None and ctx.needs_input_grad[3]:
        grad_weights = torch.empty_like(weights)
        for slot in range(weights.shape[1]):
            one = (row_of_slot[:, slot : slot + 1], rank_of_slot[:, slot : slot + 1])
            fetched = combine_rows(rows, *one, None, ctx.handle, ctx.rank, torch.float32, torch.float32)
            grad_weights[:, slot] = EXACT.sum((fetched * grad.float()).t())
    return (grad_rows, None, None, grad_weights, *[None] * 4)


def _gradient_of_rows(
    ctx: Any, grad: Tensor, rows: Tensor, row_of_slot: Tensor, rank_of_slot: Tensor, weights: Tensor | None
) -> Tensor:
    def spread(x: Tensor) -> Tensor:
        return dispatch(x.contiguous(), None, None, ctx.handle, ctx.rank, "exact", 0)

    everywhere = spread(grad)
    row_of_slot, rank_of_slot = spread(row_of_slot), spread(rank_of_slot)
    weights = None if weights is None else spread(weights)
    here = rank_of_slot == ctx.rank
    token, _ = here.nonzero(as_tuple=True)  # by token, then slot
    value = everywhere[token].float()
    if weights is not None:
        value = value * weights[here].unsqueeze(-1)
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    total.index_put_((row_of_slot[here].long(),), value, accumulate=True)  # sorted, so no atomics
    return total.to(rows.dtype)


combine.register_autograd(_combine_backward, setup_context=_combine_setup)
dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_setup)
combine_rows.register_autograd(_rows_backward, setup_context=_rows_setup)

for _operator in (combine, dispatch, combine_rows):
    _operator.register_effect(EffectType.ORDERED)


def save_collectives(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """A policy for selective activation checkpointing that keeps the results of bicomm's collectives.

    Use: `functools.partial(create_selective_checkpoint_contexts, bicomm.save_collectives)` as checkpoint's context_fn.
    Without it the collectives run again in the backward pass, on all ranks alike, with the same bits.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    mine = (torch.ops.bicomm.combine.default, torch.ops.bicomm.dispatch.default, torch.ops.bicomm.combine_rows.default)
    return CheckpointPolicy.MUST_SAVE if op in mine else CheckpointPolicy.PREFER_RECOMPUTE
