"""Arguments of the public calls, checked and normalised; every error says what was expected and what came."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bicomm.agreement.header import name_of
from bicomm.contract import Contract

Mode = str | Contract
_OUTPUTS = (torch.float32, torch.bfloat16)
_MOST = 1 << 56  # rows or bytes: more than any machine holds, and far from where 64 bits end


def contract_of(mode: Mode) -> Contract:
    """The contract that a mode names. `multimem` is not one: the communicator says which contract it runs under."""
    if isinstance(mode, Contract):
        return mode
    if not isinstance(mode, str):
        raise TypeError(f"mode is a string or a bicomm.Contract, got {type(mode).__name__}")
    if mode == "bf16 multimem" or mode.startswith("multimem_bf16"):
        raise ValueError(
            "bf16 multimem is refused: its rounding cannot be reproduced from the inputs; use fp32 partials"
        )
    try:
        return Contract.parse(mode)
    except ValueError as error:
        if not str(error).startswith("unknown contract"):
            raise
        raise ValueError(f"{error}; or 'multimem', the NVLink switch's") from None


def name_of_mode(mode: Mode) -> str:
    """A mode as headers and operators say it."""
    return mode if isinstance(mode, str) else contract_of(mode).id


def splits_of(splits: Any, rows: int | None, size: int) -> tuple[int, ...]:
    """Tokens per rank, as a tuple of W non-negative integers; they sum to `rows`, unless that is None.

    Equal shares where splits is None.
    """
    if splits is None:
        if rows is None or rows % size:
            raise ValueError(
                f"{rows} rows cannot be shared equally by {size} ranks: pass splits=[tokens of rank 0, ..., tokens of "
                f"rank {size - 1}] (they may differ, and may be 0)"
            )
        return (rows // size,) * size
    values = integers(splits, "splits")
    if len(values) != size:
        raise ValueError(f"splits has {len(values)} entries, and the group has {size} ranks: {_shown(values)}")
    for rank, value in enumerate(values):
        if value < 0:
            raise ValueError(f"splits[{rank}] is {value}: the tokens of a rank cannot be negative")
        if value > _MOST:
            raise ValueError(f"splits[{rank}] is {_shown_number(value)}: no memory holds the tokens of that rank")
    if rows is not None and sum(values) != rows:
        raise ValueError(f"splits {_shown(values)} sum to {sum(values)}, and x has {rows} rows: they must be equal")
    return values


def _shown_number(value: int) -> str:
    return str(value) if abs(value) < 1 << 200 else f"a number of {value.bit_length()} bits"


def _shown(values: Sequence[int]) -> str:
    return str(list(values)) if len(values) <= 32 else f"[{', '.join(map(str, values[:32]))}, ... {len(values)} in all]"


def integers(values: Any, name: str) -> tuple[int, ...]:
    """A list, tuple, numpy array or CPU tensor of integers, one-dimensional, as a tuple."""
    if isinstance(values, Tensor):
        if values.is_cuda:
            raise ValueError(f"{name} is on {values.device}, and these ranks agree on the host: pass it from the CPU")
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"{name} are integers, got a tensor of {values.dtype}")
    if hasattr(values, "tolist"):
        if values.ndim != 1:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}: expected one dimension, an integer for each rank"
            )
        values = values.tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(f"{name} is a list, tuple, numpy array or CPU tensor of integers, got {type(values).__name__}")
    try:
        if any(isinstance(value, bool) for value in values):
            raise TypeError
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise TypeError(f"{name} are integers, got {_shown(values)}") from error


def _integer(value: Any, name: str) -> int:
    """An integer of whatever type, Python's, numpy's, a tensor's, as Python's."""
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} is an integer, got {type(value).__name__} {value!r}"[:500]) from error


def natural(value: Any, name: str) -> int:
    """An integer of 0 or more that no machine finds too large."""
    number = _integer(value, name)
    if number < 0:
        raise ValueError(f"{name} is {_shown_number(number)}: expected 0 or more")
    if number > _MOST:
        raise ValueError(f"{name} is {_shown_number(number)}: no memory holds that")
    return number


def buffer_of(tokens: Any, hidden: Any, dtype: Any) -> tuple[tuple[int, int], int]:
    """The shape of a buffer [tokens, hidden], and its bytes."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is a torch.dtype, got {dtype!r}")
    shape = _integer(tokens, "tokens"), _integer(hidden, "hidden")
    if min(shape) < 0:
        raise ValueError(f"a buffer has at least 0 rows and columns, got {list(shape)}")
    return shape, natural(shape[0] * shape[1] * dtype.itemsize, "the number of bytes of a buffer")


def count_of(own: Any) -> int | Tensor:
    """This rank's own count: an int, or an integer tensor of one element on a GPU, which is read there."""
    if isinstance(own, Tensor):
        if own.is_floating_point() or own.is_complex() or own.dtype == torch.bool or own.numel() != 1:
            raise TypeError(f"a count is an integer tensor of one element, got {own.dtype} {tuple(own.shape)}")
        if own.is_cuda:
            return own
    return natural(own, "a count")


def check_operand(x: Any, name: str, device: torch.device, dtypes: Sequence[torch.dtype], advice: str) -> None:
    """A 2-D tensor of one of `dtypes`, on the group's device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a torch.Tensor, got {type(x).__name__}")
    if hasattr(x, "to_local"):
        raise TypeError(f"{name} is a {type(x).__name__}: pass this rank's part of it, {name}.to_local()")
    if x.layout != torch.strided:
        raise TypeError(f"{name} has the layout {x.layout}: expected a dense tensor ({name}.to_dense())")
    if _elsewhere(x.device, device):
        raise ValueError(f"{name} is on {x.device}, and the ranks of this communicator work on {device}: move it there")
    if x.dim() != 2:
        raise ValueError(f"{name} has {x.dim()} dimensions {tuple(x.shape)}: expected 2, [rows, hidden]")
    if x.shape[1] < 1:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: hidden is at least 1")
    if dtypes and x.dtype not in dtypes:
        raise TypeError(f"{name} is {name_of(x.dtype)}: expected {' or '.join(map(name_of, dtypes))}; {advice}")


def resolved(x: Tensor) -> Tensor:
    """The tensor with the numbers that it shows in its memory, which is what others read: torch negates and conjugates
    lazily."""
    return x.resolve_neg().resolve_conj()


def check_partials(x: Any, device: torch.device, mode: Any) -> None:
    """The operand of a combine: fp32 partial sums."""
    if isinstance(x, Tensor) and x.dtype == torch.bfloat16 and mode == "multimem":
        raise TypeError(
            "x is bfloat16, and bf16 multimem is refused: how the switch rounds half types cannot be reproduced from "
            "the inputs. Accumulate the partials in fp32, and ask for out_dtype=torch.bfloat16 if you want that result"
        )
    advice = (
        "a contract sums fp32 partials, so let the experts accumulate in fp32 (x.float() if they did not); bf16 expert "
        "rows that were not yet summed go to combine_rows"
    )
    check_operand(x, "x", device, [torch.float32], advice)


def check_output(out: Any, out_dtype: Any, shape: tuple[int, ...], device: torch.device) -> torch.dtype:
    """The dtype of the result: fp32 or bf16, that of `out` where one is given, which must fit."""
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype is torch.float32 or torch.bfloat16, got {out_dtype!r}")
    if out is None:
        dtype = torch.float32 if out_dtype is None else out_dtype
    else:
        _check_given(out, shape, device)
        if out_dtype is not None and out.dtype != out_dtype:
            raise TypeError(f"out is {name_of(out.dtype)} and out_dtype {name_of(out_dtype)}: they must be equal")
        dtype = out.dtype
    if dtype not in _OUTPUTS:
        raise TypeError(f"the result is float32, or bfloat16 after one more rounding; got {name_of(dtype)}")
    return dtype


def check_gathered(out: Any, x: Tensor, rows: int) -> None:
    """`out` of a dispatch of x whose result has `rows` rows."""
    if out is None:
        return
    _check_given(out, (rows, x.shape[1]), x.device)
    if out.dtype != x.dtype:
        raise TypeError(f"out is {name_of(out.dtype)} and x {name_of(x.dtype)}: they must be equal")


def _check_given(out: Any, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"out is a torch.Tensor or None, got {type(out).__name__}")
    if out.is_neg() or out.is_conj():
        raise ValueError("out is a view that torch negates or conjugates lazily: pass a tensor that is none")
    if tuple(out.shape) != shape or _elsewhere(out.device, device) or not out.is_contiguous():
        raise ValueError(
            f"out has shape {tuple(out.shape)} on {out.device}, {'' if out.is_contiguous() else 'not '}contiguous: "
            f"expected {shape} on {device}, contiguous"
        )


def _elsewhere(one: torch.device, other: torch.device) -> bool:
    """Another kind of device, or another GPU: that one's memory cannot be read from here."""
    return one.type != other.type or (None not in (one.index, other.index) and one.index != other.index)


def check_rows(rows: Any, device: torch.device) -> None:
    """The operand of combine_rows: expert rows, fp32 or bf16."""
    check_operand(rows, "rows", device, [torch.float32, torch.bfloat16], "expert rows are summed from these")


def check_maps(rows: Tensor, row_of_slot: Any, rank_of_slot: Any, weights: Any, product_dtype: Any) -> None:
    """The maps of combine_rows: integers [tokens, K] on the rows' device, and weights of that shape."""
    for name, value in (("row_of_slot", row_of_slot), ("rank_of_slot", rank_of_slot)):
        if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64) or value.dim() != 2:
            shown = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} is an int32 or int64 tensor [tokens, top-k], got {shown}")
        if value.device != rows.device:
            raise ValueError(f"{name} is on {value.device}, rows on {rows.device}: they must be on one device")
    if row_of_slot.shape != rank_of_slot.shape:
        raise ValueError(f"row_of_slot has shape {tuple(row_of_slot.shape)}, rank_of_slot {tuple(rank_of_slot.shape)}")
    if weights is not None:
        if not isinstance(weights, Tensor) or weights.dtype != torch.float32 or weights.shape != row_of_slot.shape:
            shown = f"{weights.dtype} {tuple(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
            raise TypeError(f"weights is a float32 tensor {tuple(row_of_slot.shape)}, got {shown}")
        if weights.device != rows.device:
            raise ValueError(f"weights is on {weights.device}, rows on {rows.device}: they must be on one device")
    if product_dtype not in _OUTPUTS:
        raise TypeError(f"product_dtype is torch.float32 or torch.bfloat16, got {product_dtype!r}")
