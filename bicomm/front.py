"""combine, dispatch and combine_rows without a communicator in hand: one is made for the group at the first call."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bicomm.arguments import Mode
from bicomm.communicator import Communicator

# By the group itself, which is kept: a name comes back when torch destroys one group and makes another.
_made: dict[tuple[dist.ProcessGroup, str], Communicator] = {}
_by_handle: dict[int, Communicator] = {}


def default_communicator(group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> Communicator:
    """The communicator that `bicomm.combine` uses for a group (default: that of `bicomm.init`); made at first use.

    Collective the first time. It has no contract of its own: each call names one. `bicomm.shutdown` closes it.
    """
    from bicomm.world import at_shutdown, current, stands

    chosen = group if group is not None else current().group
    where = current().device if device is None else device
    key = (chosen, where.type)
    if key not in _made:
        for other in [other for other in _made if not stands(other[0])]:
            _forget(other)
        if not _made:
            at_shutdown(forget)
        made = _made[key] = Communicator(chosen, device=where)
        _by_handle[made.handle] = made
    return _made[key]


def forget() -> None:
    """Close the communicators that this module made."""
    for key in list(_made):
        _forget(key)


def _forget(key: tuple[dist.ProcessGroup, str]) -> None:
    gone = _made.pop(key)
    del _by_handle[gone.handle]
    gone.close()


def _at_hand(group: dist.ProcessGroup | None) -> Communicator:
    # torch.compile cannot trace the making of a communicator: while tracing it is made, or found, and known by number.
    return _by_handle[_handle(group)] if torch.compiler.is_compiling() else default_communicator(group)


def _handle(group: dist.ProcessGroup | None) -> int:
    return default_communicator(group).handle


# What torch.compiler.assume_constant_result does, without its import of the compiler, which takes seconds.
_handle._dynamo_marked_constant = True  # type: ignore[attr-defined]


def combine(
    x: Tensor,
    mode: Mode | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    splits: Any = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`Communicator.combine` in the group's own communicator.

    x: fp32 [sum(splits), hidden], this rank's partials for all tokens. mode: `ordered`, `exact`, `multimem`, `fp64`, an
    id, a preset or a Contract. Returns [splits[rank], hidden]. Differentiable. Raises NotInitialized before
    `bicomm.init()`.
    """
    return _at_hand(group).combine(x, mode, splits=splits, out=out, out_dtype=out_dtype)


def combine_rows(
    rows: Tensor,
    row_of_slot: Tensor,
    rank_of_slot: Tensor,
    weights: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    product_dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`Communicator.combine_rows`, the `owner` combine, in the group's own communicator."""
    return _at_hand(group).combine_rows(
        rows, row_of_slot, rank_of_slot, weights, product_dtype=product_dtype, out=out, out_dtype=out_dtype
    )


def dispatch(
    x: Tensor,
    *,
    mode: Mode | None = None,
    group: dist.ProcessGroup | None = None,
    splits: Any = None,
    out: Tensor | None = None,
) -> Tensor:
    """`Communicator.dispatch`, the all-gather whose gradient is combine, in the group's own communicator."""
    return _at_hand(group).dispatch(x, splits=splits, mode=mode, out=out)
