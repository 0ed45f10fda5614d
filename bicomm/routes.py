"""Which way a call takes: straight to the transport, or, for gradients and torch.compile, through torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bicomm import arguments
from bicomm.arguments import Mode, name_of_mode
from bicomm.operators import ops

if TYPE_CHECKING:
    from bicomm.communicator import Communicator

_Shares = tuple[list[int] | None, Tensor | None]  # splits as the operators take them: on the host, or a tensor


def combine(
    comm: Communicator,
    x: Tensor,
    mode: Mode | None,
    splits: Any,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    capacity: int | None,
) -> Tensor:
    """Communicator.combine."""
    asked = ops.asks(x=x)
    if torch.compiler.is_compiling():
        _check_out(out, asked)
        name = name_of_mode(comm._mode_or(mode))
        dtype = torch.float32 if out_dtype is None else out_dtype
        limit = x.shape[0] if capacity is None else capacity
        return _run(
            ops.combine, x, *_traced(splits), comm.handle, comm.rank, comm.size, name, dtype, limit, asked, True
        )
    with comm._refusing("combine"):
        name = name_of_mode(comm._mode_or(mode))
        _check_out(out, asked)
        arguments.check_partials(x, comm.device, name)
        dtype = arguments.check_output(None, out_dtype, (), comm.device) if asked else torch.float32
        limit = x.shape[0] if capacity is None else int(capacity)
        shares = _shares(comm, splits, x.shape[0]) if asked else (None, None)
    if asked:
        return _run(ops.combine, x, *shares, comm.handle, comm.rank, comm.size, name, dtype, limit, asked, False)
    result = comm._combine(x, splits, name, out, out_dtype, capacity)
    if not comm.transport.agreed:
        return result
    return ops.join_combine(result, comm, *_shares(comm, splits, x.shape[0]), name, limit)


def combine_rows(
    comm: Communicator,
    rows: Tensor,
    row_of_slot: Tensor,
    rank_of_slot: Tensor,
    weights: Tensor | None,
    product_dtype: torch.dtype,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Communicator.combine_rows."""
    asked = ops.asks(rows=rows, weights=weights)
    operands = (rows, row_of_slot, rank_of_slot, weights)
    who = (comm.handle, comm.rank, comm.size)
    if torch.compiler.is_compiling():
        _check_out(out, asked)
        dtype = torch.float32 if out_dtype is None else out_dtype
        return _run(ops.combine_rows, *operands, *who, product_dtype, dtype, asked, True)
    with comm._refusing("combine_rows"):
        _check_out(out, asked)
        arguments.check_rows(rows, comm.device)
        arguments.check_maps(*operands, product_dtype)
        dtype = arguments.check_output(None, out_dtype, (), comm.device) if asked else torch.float32
    if asked:
        return _run(ops.combine_rows, *operands, *who, product_dtype, dtype, asked, False)
    result = comm._combine_rows(*operands, product_dtype, out, out_dtype)
    agreed = comm.transport.agreed
    return ops.join_rows(result, comm, operands, agreed) if agreed else result


def dispatch(
    comm: Communicator, x: Tensor, splits: Any, mode: Mode | None, out: Tensor | None, capacity: int | None
) -> Tensor:
    """Communicator.dispatch."""
    asked = ops.asks(x=x)
    who = (comm.handle, comm.rank, comm.size)
    if torch.compiler.is_compiling():
        _check_out(out, asked)
        name = name_of_mode(comm._mode_or(mode)) if asked else ""
        limit = x.shape[0] * comm.size if capacity is None else capacity
        return _run(ops.dispatch, x, *_traced(splits), *who, name, limit, asked, True)
    with comm._refusing("dispatch"):
        _check_out(out, asked)
        if asked:
            name = _gradient_mode(comm, mode)
            advice = "its gradient is summed in fp32"
            arguments.check_operand(x, "x", comm.device, [torch.float32, torch.bfloat16, torch.float16], advice)
            shares = _shares(comm, splits, None)
            limit = x.shape[0] * comm.size if capacity is None else int(capacity)
    if asked:
        return _run(ops.dispatch, x, *shares, *who, name, limit, asked, False)
    result = comm._dispatch(x, splits, out, capacity)
    if not comm.transport.agreed:
        return result
    return ops.join_dispatch(result, comm, *_shares(comm, splits, None), _gradient_mode(comm, mode), x)


def _run(operator: Callable[..., Any], *arguments: Any) -> Tensor:
    result: Tensor = operator(*arguments)
    return result


def _gradient_mode(comm: Communicator, mode: Mode | None) -> str:
    """The contract under which a dispatch's gradient is combined, checked now: the backward pass is too late."""
    name = name_of_mode(comm._mode_or(mode))
    comm._contract_of(name)
    return name


def _check_out(out: Tensor | None, asked: str) -> None:
    if out is None:
        return
    if asked or torch.compiler.is_compiling():
        raise ValueError("out= cannot be used with gradients or under torch.compile: the result is a new tensor")
    if isinstance(out, Tensor) and out.requires_grad and torch.is_grad_enabled():
        raise ValueError("out requires a gradient, and it is filled in place: pass a tensor that does not, or none")


def _shares(comm: Communicator, splits: Any, rows: int | None) -> _Shares:
    if splits is None and rows is None:  # each rank knows its own count only
        return None, None
    shares = comm.transport.shares(splits, rows)
    return (None, shares) if isinstance(shares, Tensor) else (list(shares), None)


def _traced(splits: Any) -> _Shares:
    """While tracing, a tensor stays one: compiled code then serves every value."""
    if splits is None or isinstance(splits, Tensor):
        return None, splits
    return [int(n) for n in splits], None
