"""Arguments of the public calls, checked and normalised; every error says what was expected and what came."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bicomm.contract import Contract

Mode = str | Contract
_OUTPUTS = (torch.float32, torch.bfloat16)


def contract_of(mode: Mode) -> Contract:
    """The contract that a mode names. `multimem` is not one: the communicator says which contract it runs under."""
    if isinstance(mode, Contract):
        return mode
    if not isinstance(mode, str):
        raise TypeError(f"mode is a string or a bicomm.Contract, got {type(mode).__name__}")
    if mode == "bf16 multimem" or mode.startswith("multimem_bf16"):
        raise ValueError("bf16 multimem is refused: its rounding cannot be reproduced from the inputs; use fp32 partials")
    return Contract.parse(mode)


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
        raise ValueError(f"splits has {len(values)} entries, and the group has {size} ranks: {list(values)}")
    for rank, value in enumerate(values):
        if value < 0:
            raise ValueError(f"splits[{rank}] is {value}: the tokens of a rank cannot be negative")
    if rows is not None and sum(values) != rows:
        raise ValueError(f"splits {list(values)} sum to {sum(values)}, and x has {rows} rows: they must be equal")
    return values


def integers(values: Any, name: str) -> tuple[int, ...]:
    """A list, tuple, numpy array or CPU tensor of integers, as a tuple."""
    if isinstance(values, Tensor):
        if values.is_cuda:
            raise ValueError(f"{name} is on {values.device}, and these ranks agree on the host: pass it from the CPU")
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"{name} are integers, got a tensor of {values.dtype}")
        values = values.tolist()
    elif hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name} is a list, tuple, numpy array or CPU tensor of integers, got {type(values).__name__}")
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise TypeError(f"{name} are integers, got {list(values)!r}") from error


def check_operand(x: Any, name: str, device: torch.device, dtypes: Sequence[torch.dtype], advice: str) -> None:
    """A 2-D tensor of one of `dtypes`, on the group's device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a torch.Tensor, got {type(x).__name__}")
    if x.device.type != device.type:
        raise ValueError(f"{name} is on {x.device}, and the ranks of this communicator work on {device}: move it there")
    if x.dim() != 2:
        raise ValueError(f"{name} has {x.dim()} dimensions {tuple(x.shape)}: expected 2, [rows, hidden]")
    if x.shape[1] < 1:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: hidden is at least 1")
    if dtypes and x.dtype not in dtypes:
        raise TypeError(f"{name} is {_name(x.dtype)}: expected {' or '.join(map(_name, dtypes))}; {advice}")


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


def check_output(out: Tensor | None, out_dtype: torch.dtype | None, shape: tuple[int, ...], device: torch.device) -> torch.dtype:
    """The dtype of the result: fp32 or bf16, that of `out` where one is given, which must fit."""
    if out is None:
        dtype = torch.float32 if out_dtype is None else out_dtype
    else:
        if tuple(out.shape) != shape or out.device.type != device.type or not out.is_contiguous():
            raise ValueError(
                f"out has shape {tuple(out.shape)} on {out.device}, {'' if out.is_contiguous() else 'not '}contiguous: "
                f"expected {shape} on {device}, contiguous"
            )
        if out_dtype is not None and out.dtype != out_dtype:
            raise TypeError(f"out is {_name(out.dtype)} and out_dtype {_name(out_dtype)}: they must be equal")
        dtype = out.dtype
    if dtype not in _OUTPUTS:
        raise TypeError(f"the result is float32, or bfloat16 after one more rounding; got {_name(dtype)}")
    return dtype


def check_maps(rows: Tensor, row_of_slot: Any, rank_of_slot: Any, weights: Any, product_dtype: torch.dtype) -> None:
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
    if product_dtype not in _OUTPUTS:
        raise TypeError(f"product_dtype is float32 or bfloat16, got {_name(product_dtype)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
