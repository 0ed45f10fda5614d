"""The mirror's front door: `unpermute`, `combine` and `permute`, as torch custom operators with gradients.

The operators take plain tensors and the contract's id, need no process group, never wait for the GPU, and have fake
kernels, so torch.compile, CUDA graphs, activation checkpointing and autocast treat them as any other operator.
A CPU tensor takes the plain torch definition, a CUDA tensor the Triton kernels: the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from bicomm.contract import Contract
from bicomm.mirror import definition
from bicomm.mirror.describe import resolve
from bicomm.mirror.maps import _check_integers, check_maps

_FLOATS = (torch.bfloat16, torch.float32)


@functools.lru_cache(maxsize=256)
def _parsed(contract_id: str) -> Contract:
    return Contract.parse(contract_id)


def _kernels() -> Any:
    from bicomm.mirror import kernels  # imports Triton, which only a GPU needs

    return kernels


# --------------------------------------------------------------------------------------------------------- operators


@torch.library.custom_op(
    "bicomm_mirror::sort_slots", mutates_args=(),
    schema="(Tensor row_of_slot, Tensor? rank_of_slot, Tensor? order_of_slot, SymInt num_rows, int ep_size)"
    " -> (Tensor, Tensor)",
)  # fmt: skip
def _sort_slots(
    row_of_slot: Tensor, rank_of_slot: Tensor | None, order_of_slot: Tensor | None, num_rows: int, ep_size: int
) -> tuple[Tensor, Tensor]:
    if row_of_slot.is_cuda:
        pair: tuple[Tensor, Tensor] = _kernels().sort_slots(row_of_slot, rank_of_slot, order_of_slot, ep_size)
        return pair
    check_maps(row_of_slot, rank_of_slot, order_of_slot, num_rows, ep_size)
    return definition.sort_slots(row_of_slot, rank_of_slot, order_of_slot)


@_sort_slots.register_fake
def _(row_of_slot: Tensor, rank_of_slot: Any, order_of_slot: Any, num_rows: int, ep_size: int) -> tuple[Tensor, Tensor]:
    shape = row_of_slot.shape
    return row_of_slot.new_empty(shape, dtype=torch.int32), row_of_slot.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op(
    "bicomm_mirror::unpermute", mutates_args=(),
    schema="(Tensor rows, Tensor places, Tensor? tags, Tensor? probs, str contract, ScalarType out_dtype) -> Tensor",
)  # fmt: skip
def _unpermute(
    rows: Tensor, places: Tensor, tags: Tensor | None, probs: Tensor | None, contract: str, out_dtype: torch.dtype
) -> Tensor:
    rule = _parsed(contract)
    # Here, and not before the operator: a compiler would drop a rounding of the probabilities to bf16 before it.
    weights = None if probs is None else probs.float().contiguous()
    if rows.is_cuda:
        out: Tensor = _kernels().unpermute(
            rows, places.contiguous(), tags, weights, rule, out_dtype, *places.shape, each=rule.rule == "owner"
        )
        return out
    tree = definition.sort_slots(places, None, None) if tags is None else (places, tags)
    if tags is None:
        check_maps(places, None, None, rows.shape[0], 1)
    return definition.rounded(definition.unpermute(rows, tree, weights, rule), out_dtype)


@_unpermute.register_fake
def _(rows: Tensor, places: Tensor, tags: Any, probs: Any, contract: str, out_dtype: torch.dtype) -> Tensor:
    return rows.new_empty(places.shape[0], rows.shape[1], dtype=out_dtype)


@torch.library.custom_op(
    "bicomm_mirror::unpermute_backward", mutates_args=(),
    schema="(Tensor grad, Tensor places, Tensor? tags, Tensor? rows, Tensor? probs, bool weight_bf16, SymInt num_rows, "
    "ScalarType dtype, bool need_rows) -> (Tensor, Tensor)",
)  # fmt: skip
def _unpermute_backward(
    grad: Tensor, places: Tensor, tags: Tensor | None, rows: Tensor | None, probs: Tensor | None, weight_bf16: bool,
    num_rows: int, dtype: torch.dtype, need_rows: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    run = _kernels().backward if grad.is_cuda else definition.backward
    weights = None if probs is None else probs.float()
    d_rows, d_probs = run(grad, places, tags, rows, weights, weight_bf16, num_rows, dtype, need_rows)
    return d_rows, d_probs if probs is None else d_probs.to(probs.dtype)


@_unpermute_backward.register_fake
def _(
    grad: Tensor, places: Tensor, tags: Any, rows: Any, probs: Any, weight_bf16: bool, num_rows: int,
    dtype: torch.dtype, need_rows: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    d_rows = grad.new_empty(num_rows if need_rows else 0, grad.shape[1], dtype=dtype)
    dtype = torch.float32 if probs is None else probs.dtype
    return d_rows, grad.new_empty(places.shape if rows is not None else (0, 0), dtype=dtype)


def _save_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, places, tags, probs, contract, _ = inputs
    tree = _parsed(contract).partial
    ctx.weight_bf16 = probs is not None and tree is not None and tree.weight == "bf16"
    ctx.num_rows, ctx.dtype = rows.shape[0], rows.dtype
    # The rows are kept for the gradient of the weights only.
    ctx.save_for_backward(rows if probs is not None and probs.requires_grad else None, places, tags, probs)


def _unpermute_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, places, tags, probs = ctx.saved_tensors
    need_rows, need_probs = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
    d_rows, d_probs = _unpermute_backward(
        grad, places, tags, rows if need_probs else None, probs, ctx.weight_bf16, ctx.num_rows, ctx.dtype, need_rows
    )
    return (d_rows if need_rows else None), None, None, (d_probs if need_probs else None), None, None


_unpermute.register_autograd(_unpermute_gradients, setup_context=_save_unpermute)


@torch.library.custom_op(
    "bicomm_mirror::permute", mutates_args=(), schema="(Tensor x, Tensor row_of_slot, SymInt num_rows) -> Tensor"
)
def _permute(x: Tensor, row_of_slot: Tensor, num_rows: int) -> Tensor:
    if not x.is_cuda:
        check_maps(row_of_slot, None, None, num_rows, 1)
    run = _kernels().backward if x.is_cuda else definition.backward
    rows: Tensor = run(x, row_of_slot, None, None, None, False, num_rows, x.dtype, True)[0]
    return rows


@_permute.register_fake
def _(x: Tensor, row_of_slot: Tensor, num_rows: int) -> Tensor:
    return x.new_empty(num_rows, x.shape[1])


def _save_permute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.dtype = inputs[0].dtype


def _permute_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _unpermute(grad, ctx.saved_tensors[0], None, None, "owner/1", ctx.dtype), None, None


_permute.register_autograd(_permute_gradients, setup_context=_save_permute)


@torch.library.custom_op(
    "bicomm_mirror::combine", mutates_args=(), schema="(Tensor partials, str contract, ScalarType out_dtype) -> Tensor"
)
def _combine(partials: Tensor, contract: str, out_dtype: torch.dtype) -> Tensor:
    rule = _parsed(contract)
    if not partials.is_cuda:
        return rule.sum(partials, out=partials.new_empty(partials.shape[1:], dtype=out_dtype))
    ranks, tokens, hidden = partials.shape
    out: Tensor = _kernels().unpermute(
        partials.reshape(ranks * tokens, hidden), None, None, None, rule, out_dtype, tokens, ranks, each=True
    )
    return out


@_combine.register_fake
def _(partials: Tensor, contract: str, out_dtype: torch.dtype) -> Tensor:
    return partials.new_empty(partials.shape[1:], dtype=out_dtype)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.ranks, ctx.dtype = inputs[0].shape[0], inputs[0].dtype


def _combine_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad.to(ctx.dtype).unsqueeze(0).expand(ctx.ranks, *grad.shape), None, None


_combine.register_autograd(_combine_gradients, setup_context=_save_combine)


# ------------------------------------------------------------------------------------------------------- public names


def unpermute(
    rows: Tensor,
    row_of_slot: Tensor,
    *,
    rank_of_slot: Tensor | None = None,
    order_of_slot: Tensor | None = None,
    ep_size: int = 1,
    contract: Contract | str,
    probs: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Sum each token's expert rows as the engine did: its tree within each rank, rounded to fp32, then across ranks.

    rows           [R, H], bf16 or fp32: this trainer's expert outputs, in any order. Rows that no slot names (padding)
                   are never read.
    row_of_slot    int [T, K]: the row of each (token, slot), -1 where the slot is not routed. No two slots share a row.
    rank_of_slot   int [T, K]: the *engine* rank whose expert made the row (`mirror.rank_of_slot`, or the engine's
                   record), -1 where not routed. Not needed for `owner` (which looks only for -1), nor at ep_size 1.
    order_of_slot  int [T, K]: the slot's place in that rank's order, ascending (`mirror.order_of_slot` for a tree in
                   expert order, which needs it). Default: the slot's index. Equal places go by slot. It fits int32.
    ep_size        the engine's number of ranks; the trainer's own layout does not enter.
    contract       a `Contract`, its id or JSON as the engine stored it, or a preset's name. Across ranks and within
                   one (`Contract.partial`), except for `owner`, which has no tree.
    probs          [T, K], for a contract that weighs in the combine (and for `owner` on request); they are widened or
                   rounded to fp32 first.
    out_dtype      fp32, or bf16: rounded once more.

    Returns [T, H]; a token without slots is +0. Gradients flow to rows and probs, every rounding counting as the
    identity; they are deterministic, and a token's do not depend on the other tokens.
    Raises ValueError for what does not fit the contract, TypeError for dtypes. A row, rank or place that does not exist
    is a ValueError on a CPU; on a GPU, where a check would stall the host, that token is NaN (see `check_maps`).
    """
    rule = resolve(contract)
    _check_unpermute(rows, row_of_slot, rank_of_slot, order_of_slot, ep_size, rule, probs, out_dtype)
    row_of_slot = _signed(row_of_slot)
    if rule.rule == "owner" and rank_of_slot is not None:
        row_of_slot = torch.where(_signed(rank_of_slot) >= 0, row_of_slot, -1)
    if rule.rule == "owner" or (ep_size == 1 and rank_of_slot is None and order_of_slot is None):
        out: Tensor = _unpermute(rows, row_of_slot, None, probs, rule.id, out_dtype)
        return out
    ranks, order = (None if m is None else _signed(m) for m in (rank_of_slot, order_of_slot))
    places, tags = _sort_slots(row_of_slot, ranks, order, rows.shape[0], ep_size)
    out = _unpermute(rows, places, tags, probs, rule.id, out_dtype)
    return out


def combine(partials: Tensor, contract: Contract | str, *, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """Sum gathered partials [W, T, H] (fp32; bf16 is widened) across ranks under a contract's rule: [T, H].

    contract: a `Contract`, its id, JSON or preset; the tree within a rank is not looked at. Every partial's gradient is
    the result's. Raises ValueError for `owner`, which sums rows and not partials (use `unpermute`), and for shapes.
    """
    rule = resolve(contract).cross_rank
    if rule.rule == "owner":
        raise ValueError("owner sums a token's expert rows, not partials: use mirror.unpermute(..., contract='owner')")
    if partials.dim() != 3 or partials.shape[0] < 1:
        raise ValueError(f"partials are [W, T, H] with W >= 1, got {tuple(partials.shape)}")
    _check_dtypes(("partials", partials.dtype), ("out_dtype", out_dtype))
    out: Tensor = _combine(partials, rule.id, out_dtype)
    return out


def permute(x: Tensor, row_of_slot: Tensor, num_rows: int) -> Tensor:
    """Copy each token [T, H] to the rows of its slots: [num_rows, H] of x's dtype (bf16 or fp32), other rows 0.

    row_of_slot: int [T, K], -1 where not routed, no row twice (see `inverse_map`). The gradient of a token is the exact
    sum of its rows' gradients, rounded once to fp32 (contract `owner`) and then to x's dtype.
    """
    if x.dim() != 2 or row_of_slot.dim() != 2 or row_of_slot.shape[0] != x.shape[0]:
        raise ValueError(f"x is [T, H] and row_of_slot [T, K]: got {tuple(x.shape)} and {tuple(row_of_slot.shape)}")
    _check_dtypes(("x", x.dtype))
    _check_integers("row_of_slot", row_of_slot)
    _check_devices("x", x, row_of_slot=row_of_slot)
    rows: Tensor = _permute(x, _signed(row_of_slot), num_rows)
    return rows


def _signed(slots: Tensor) -> Tensor:
    """A map in a type that holds -1 and that every kernel reads."""
    return slots if slots.dtype in (torch.int32, torch.int64) else slots.long()


# ------------------------------------------------------------------------------------------------------------- checks


def _check_dtypes(*named: tuple[str, torch.dtype]) -> None:
    for name, dtype in named:
        if dtype not in _FLOATS:
            raise TypeError(f"{name} is bf16 or fp32, got {dtype}")


def _check_devices(name: str, tensor: Tensor, **others: Tensor | None) -> None:
    for other, given in others.items():
        if given is not None and given.device != tensor.device:
            raise ValueError(f"{other} is on {given.device}, {name} on {tensor.device}: expected one device")


def _check_unpermute(
    rows: Tensor, row_of_slot: Tensor, rank_of_slot: Tensor | None, order_of_slot: Tensor | None, ep_size: int,
    rule: Contract, probs: Tensor | None, out_dtype: torch.dtype,
) -> None:  # fmt: skip
    _check_dtypes(("rows", rows.dtype), ("out_dtype", out_dtype))
    if rows.dim() != 2 or row_of_slot.dim() != 2:
        raise ValueError(f"rows is [R, H] and row_of_slot [T, K]: got {tuple(rows.shape)}, {tuple(row_of_slot.shape)}")
    for name, given in (("rank_of_slot", rank_of_slot), ("order_of_slot", order_of_slot), ("probs", probs)):
        if given is not None and given.shape != row_of_slot.shape:
            raise ValueError(f"{name} is [T, K] = {tuple(row_of_slot.shape)}, got {tuple(given.shape)}")
    if probs is not None and not probs.is_floating_point():
        raise TypeError(f"probs has dtype {probs.dtype}: expected a floating type")
    maps = {"row_of_slot": row_of_slot, "rank_of_slot": rank_of_slot, "order_of_slot": order_of_slot}
    for name, given in maps.items():
        if given is not None:
            _check_integers(name, given)
    _check_devices("rows", rows, **maps, probs=probs)
    if ep_size < 1:
        raise ValueError(f"ep_size is the engine's number of ranks, at least 1: got {ep_size}")
    tree = rule.partial
    if rule.rule == "owner":
        if tree is not None and tree.accumulator != "exact":
            raise ValueError(f"owner is one exact sum: it has no accumulator of type {tree.accumulator} ({rule.id})")
    elif tree is None:
        raise ValueError(
            f"{rule.id} says nothing about the tree within a rank, and a mirror needs both: pass one that does, such "
            f"as '{rule.id}+megatron-vllm-swiglu/1', or Contract({rule.rule!r}, ..., partial=bicomm.Partial(...))"
        )
    elif rank_of_slot is None and ep_size > 1:
        raise ValueError(f"{rule.id} at ep_size {ep_size} needs rank_of_slot: the engine rank of every slot")
    elif tree.order == "expert" and order_of_slot is None and row_of_slot.shape[1] > 1:
        raise ValueError(f"{rule.id} adds in expert order and needs order_of_slot: see mirror.order_of_slot")
    if tree is not None and (probs is not None) != (tree.probability == "combine"):
        need = "weighs in the combine and needs probs" if probs is None else "has weighed at the activation: no probs"
        raise ValueError(f"{rule.id} {need}")
