"""The MoE auxiliary (load-balancing) loss, deterministic: the same bits in every run, stream, graph and GPU.

loss = sum_c (sum_r probs[r, c]) * tokens_per_expert[c] * C,   C = E * coeff / topk / T / T in fp32, left to right
d probs[r, c] = (C * tokens_per_expert[c]) * d loss

(Switch Transformer, arXiv 2101.03961; signature, shapes and dtypes of TransformerEngine's `fused_moe_aux_loss`.)

The order of additions is part of the contract and depends on the shape and dtype alone, see `aux_loss_order.py`:
rows are cut into at most 256 blocks; a block adds its rows in chains; products with the counts and all sums across
lanes and blocks are `pinned.fixed_sum`, which has no order; each block's partial is scaled by C before the last sum.
`definition` is that in plain torch, and the CPU path; `aux_loss_kernel.py` gives the same bits on a GPU.
`reduction="exact"` (see `exact_loss.py`) does not depend on any partition at all.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bicomm.as_written import as_written
from bicomm.model_hooks import pinned
from bicomm.model_hooks.aux_loss_order import BLOCKS, WIDE_COUNTS, Partition

PROB_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ADDENDS_AT_ONCE = 1 << 22  # of the definition: bounds its memory, whatever the rows (2**24 x 128 are 8 GB)
COUNT_DTYPES = (torch.int16, torch.int32, torch.int64, torch.float32, torch.bfloat16)
FP32_MAX = torch.finfo(torch.float32).max
Reduction = Literal["blocked", "exact"]


class WorkspaceSpec(NamedTuple):
    """Shape and dtype of the scratch that :func:`fused_moe_aux_loss_out` needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def aux_loss_workspace() -> WorkspaceSpec:
    """The workspace of :func:`fused_moe_aux_loss_out`: 256 fp32, whatever the input. Touches no device."""
    return WorkspaceSpec((BLOCKS,), torch.float32)


def coefficient(num_experts: int, coeff: float, topk: int, total: int, count_total: int | None = None) -> float:
    """C = E * coeff / topk / T / T in fp32, each step rounded, left to right. T: the total of the tokens."""

    def fp32(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        # on the CPU whatever the default device is: a GPU's would wait for it, which no graph capture allows
        return torch.tensor(value, dtype=dtype, device="cpu").to(torch.float32)

    c = fp32(num_experts) * fp32(coeff) / fp32(topk)
    c = c / fp32(total if count_total is None else count_total, torch.int64)
    return float((c / fp32(total, torch.int64)).item())


def _device_coefficient(num_experts: int, coeff: float, topk: int, total: Tensor, count_total: Tensor) -> Tensor:
    """The same for totals in 0-dim int64 tensors; 0 where a total is below 1. 0-dim fp32, no synchronisation."""
    start = torch.full((), coefficient(num_experts, coeff, topk, 1), dtype=torch.float32, device=total.device)
    c = start / count_total.clamp(min=1).to(torch.float32) / total.clamp(min=1).to(torch.float32)
    return torch.where((total > 0) & (count_total > 0), c, 0.0)


def split_counts(counts: Tensor) -> tuple[Tensor, Tensor | None]:
    """Counts as fp32, or where they may exceed 2**24 as hi + lo, both fp32, which keeps 48 bits of them."""
    hi = counts.to(torch.float32)
    if counts.dtype not in WIDE_COUNTS:
        return hi, None
    wide = counts.to(torch.int64)
    return hi, (wide - hi.to(torch.int64)).to(torch.float32)


def times_counts(x: Tensor, hi: Tensor, lo: Tensor | None) -> Tensor:
    """x * counts in fp32."""
    return x * hi if lo is None else x * hi + x * lo


def definition(probs: Tensor, counts: Tensor, c: Tensor | float, padding_mask: Tensor | None = None) -> Tensor:
    """The blocked loss in plain torch: 0-dim fp32 from probs [rows, cols], counts [cols] and the constant C."""
    rows, cols = probs.shape
    if rows == 0 or cols == 0:
        return torch.zeros((), dtype=torch.float32, device=probs.device)
    p = Partition.of(rows, cols)
    per_block, width = p.rows_per_block, p.tile_cols
    at_once = max(1, ADDENDS_AT_ONCE // (per_block * width))  # blocks: they know nothing of each other
    tiles = -(-cols // p.tile_cols)
    hi, lo = split_counts(torch.nn.functional.pad(counts, (0, tiles * width - cols)))
    partial = torch.zeros(p.blocks, dtype=torch.float32, device=probs.device)
    for t, first in itertools.product(range(tiles), range(0, p.blocks, at_once)):
        part = slice(t * width, (t + 1) * width)
        blocks = min(at_once, p.blocks - first)
        lines = slice(first * per_block, min((first + blocks) * per_block, rows))
        tile = probs[lines, part].to(torch.float32)
        if padding_mask is not None:
            tile = torch.where(padding_mask[lines].unsqueeze(1), 0.0, tile)
        tile = torch.nn.functional.pad(tile, (0, width - tile.shape[1], 0, blocks * per_block - tile.shape[0]))
        tile = tile.view(blocks, per_block, width)
        tile = torch.nn.functional.pad(tile, (0, 0, 0, p.steps * p.tile_rows - per_block))
        tile = tile.view(blocks, p.steps, p.tile_rows, width)
        acc = torch.zeros(blocks, p.tile_rows, width, dtype=torch.float32, device=probs.device)
        for step in range(p.steps):
            acc = acc + tile[:, step]
        weighted = times_counts(acc, hi[part], None if lo is None else lo[part])
        partial[first : first + blocks] += pinned.fixed_sum(weighted.flatten(1))
    return pinned.fixed_sum(partial * c)


def gradient(
    counts: Tensor, c: Tensor | float, grad: Tensor, rows: int, dtype: torch.dtype, padding_mask: Tensor | None
) -> Tensor:
    """d probs [rows, cols] in `dtype`: (C * counts) * grad in fp32, rounded once more to `dtype`; 0 in padding rows.

    Without padding all rows are the same one, expanded, as in the gradient of a torch sum.
    """
    hi, lo = split_counts(counts)
    row = (times_counts(torch.as_tensor(c, device=hi.device), hi, lo) * grad.to(torch.float32)).to(dtype)
    full = row.expand(rows, -1)
    return full if padding_mask is None else torch.where(padding_mask.unsqueeze(1), 0.0, full)


# ----------------------------------------------------------------------------------------------------------- checks


def _check_total(total: int | Tensor, name: str, device: torch.device) -> None:
    if isinstance(total, Tensor):
        if total.dim() != 0 or total.dtype != torch.int64 or total.device != device:
            raise ValueError(
                f"{name} is an int or a 0-dim int64 tensor on {device}; "
                f"got {total.dtype} {tuple(total.shape)} on {total.device}"
            )
    elif isinstance(total, bool) or not isinstance(total, int):
        raise TypeError(f"{name} is an int or a 0-dim int64 tensor on {device}; got {type(total).__name__}")
    elif total < 1:
        raise ValueError(f"{name} must be at least 1, got {total}: a loss over no tokens is undefined")


def _check(
    probs: Tensor, counts: Tensor, total: int | Tensor, num_experts: int, topk: int, coeff: float,
    padding_mask: Tensor | None,
) -> None:  # fmt: skip
    if probs.dim() != 2 or probs.dtype not in PROB_DTYPES:
        raise TypeError(f"probs is [rows, cols] in fp32, fp16 or bf16; got {probs.dtype} {tuple(probs.shape)}")
    cols = probs.shape[1]
    if num_experts < 1 or topk < 1:
        raise ValueError(f"num_experts and topk are at least 1; got {num_experts} and {topk}")
    if not abs(coeff * num_experts) <= FP32_MAX:  # C would be infinite, and 0 * C no number
        raise ValueError(f"coeff is a finite number, and so is coeff * {num_experts} in fp32; got {coeff}")
    if cols % num_experts:
        raise ValueError(f"probs has {cols} columns, which is no multiple of num_experts = {num_experts}")
    if counts.shape != (cols,) or counts.dtype not in COUNT_DTYPES or counts.device != probs.device:
        raise ValueError(
            f"tokens_per_expert is [{cols}] in int16, int32, int64, fp32 or bf16 on {probs.device}; "
            f"got {counts.dtype} {tuple(counts.shape)} on {counts.device}"
        )
    _check_total(total, "total_num_tokens", probs.device)
    if padding_mask is not None and (
        padding_mask.dtype != torch.bool or padding_mask.shape != probs.shape[:1] or padding_mask.device != probs.device
    ):
        raise ValueError(
            f"padding_mask is bool [{probs.shape[0]}] on {probs.device}, True where a row is padding; "
            f"got {padding_mask.dtype} {tuple(padding_mask.shape)} on {padding_mask.device}"
        )


def _check_workspace(workspace: Tensor | None, device: torch.device) -> Tensor:
    need = f"{BLOCKS} contiguous fp32 on {device} (see aux_loss_workspace())"
    if workspace is None:
        raise ValueError(f"the workspace is missing: expected {need}")
    if workspace.dtype != torch.float32:
        raise TypeError(f"the workspace has the wrong dtype {workspace.dtype}: expected {need}")
    if workspace.device != device:
        raise ValueError(f"the workspace is on the wrong device {workspace.device}: expected {need}")
    if workspace.numel() < BLOCKS:
        raise ValueError(f"the workspace is too small, {workspace.numel()} elements: expected {need}")
    if not workspace.is_contiguous():
        raise ValueError(f"the workspace is not contiguous, strides {workspace.stride()}: expected {need}")
    return workspace


# ---------------------------------------------------------------------------------------------------------- forward


def _constant(
    num_experts: int, coeff: float, topk: int, total: int | Tensor, count_total: int | Tensor | None,
    device: torch.device,
) -> float | Tensor:  # fmt: skip
    """C as a host number, or as a 0-dim fp32 tensor where a total lives on the device."""
    if isinstance(total, int) and not isinstance(count_total, Tensor):
        return coefficient(num_experts, coeff, topk, total, count_total)

    def on_device(t: int | Tensor) -> Tensor:
        return t if isinstance(t, Tensor) else torch.full((), t, dtype=torch.int64, device=device)

    t = on_device(total)
    return _device_coefficient(num_experts, coeff, topk, t, t if count_total is None else on_device(count_total))


class _AuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, probs: Tensor, counts: Tensor, total: int | Tensor, num_experts: int, topk: int, coeff: float,
        count_total: int | Tensor | None, padding_mask: Tensor | None, reduction: Reduction, group: Any,
    ) -> Tensor:  # fmt: skip
        ctx.rows, ctx.dtype = probs.shape[0], probs.dtype
        if reduction == "exact":
            from bicomm.model_hooks import exact_loss

            c = _constant(num_experts, coeff, topk, total, count_total, probs.device)
            sums = exact_loss.column_sums(probs, padding_mask)
            loss = exact_loss.finish(exact_loss.all_reduce(sums, group), counts, c)
            const = c.reshape(1) if isinstance(c, Tensor) else loss.new_full((1,), c)
        elif probs.is_cuda and probs.numel():
            from bicomm.model_hooks import aux_loss_kernel

            simple = isinstance(total, Tensor) and count_total is None
            c = total if simple else _constant(num_experts, coeff, topk, total, count_total, probs.device)
            loss, const = aux_loss_kernel.forward(
                probs, counts, c, coefficient(num_experts, coeff, topk, 1), padding_mask
            )
            ctx.save_for_backward(const, counts, padding_mask)
            return loss
        else:
            c = _constant(num_experts, coeff, topk, total, count_total, probs.device)
            loss = definition(probs, counts, c, padding_mask)
            const = c.reshape(1) if isinstance(c, Tensor) else loss.new_full((1,), c)
        ctx.save_for_backward(const, counts, padding_mask)
        return loss.to(probs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        const, counts, padding_mask = ctx.saved_tensors
        if counts.is_cuda:
            from bicomm.model_hooks import aux_loss_kernel

            out = aux_loss_kernel.backward(const, counts, grad, ctx.rows, ctx.dtype, padding_mask)
        else:
            out = gradient(counts, const[0], grad, ctx.rows, ctx.dtype, padding_mask)
        return out, None, None, None, None, None, None, None, None, None


@as_written
def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
    deterministic: bool = False,
    *,
    padding_mask: Tensor | None = None,
    count_total: int | Tensor | None = None,
    reduction: Reduction = "blocked",
    group: Any = None,
) -> Tensor:
    """The auxiliary loss, 0-dim in the dtype of probs. Differentiable in probs; the same bits in every run.

    probs              [rows, cols], fp32, fp16 or bf16: scores of this rank's tokens. cols is a multiple of num_experts
                       (a sequence loss has batch * num_experts columns).
    tokens_per_expert  [cols], int16/32/64, fp32 or bf16: tokens that chose each column, over all tokens of the loss.
    total_num_tokens   T, all tokens of the loss: an int, or a 0-dim int64 tensor on the device, which may change
                       between replays of a CUDA graph. An int below 1 is a ValueError; a device T below 1 gives loss
                       0 and gradient 0, because the host does not look at it.
    deterministic      both values give the same bits here; the argument is part of the signature.
    padding_mask       bool [rows], True where a row is padding: it never counts, whatever it holds.
    count_total        T of tokens_per_expert where it differs from that of probs: C = E*coeff / topk / count_total / T.
    reduction          "blocked": a fixed order, see `aux_loss_order.py`. "exact": RN32(S * C) with the exact sum S of
                       column sum times count; integer counts only. It does not depend on how rows are split.
    group              with "exact": a process group whose ranks hold the rows together. tokens_per_expert and T are
                       those of the whole group on every rank (`losses.count_tokens` makes them); the loss is the
                       group's on every rank, the gradient that of this rank's rows.

    rows = 0 gives loss 0 and an empty gradient. A NaN or infinity among the products gives NaN. Raises TypeError or
    ValueError for what does not fit, naming both sides.
    """
    _check(probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff, padding_mask)
    if count_total is not None:
        _check_total(count_total, "count_total", probs.device)
    if reduction not in ("blocked", "exact"):
        raise ValueError(f"reduction is 'blocked' or 'exact', got {reduction!r}")
    if reduction == "exact" and tokens_per_expert.is_floating_point():
        raise TypeError(f"reduction='exact' needs integer counts, got {tokens_per_expert.dtype}")
    if group is not None and reduction != "exact":
        raise ValueError("group needs reduction='exact': only integer sums are the same in every all-reduce")
    loss: Tensor = _AuxLoss.apply(  # type: ignore[no-untyped-call]
        probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff, count_total, padding_mask, reduction,
        group,
    )  # fmt: skip
    return loss


@as_written
def fused_moe_aux_loss_out(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
    *,
    out: Tensor,
    const_buf: Tensor,
    workspace: Tensor | None,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """The forward of :func:`fused_moe_aux_loss` into the caller's memory; allocates nothing on a GPU. The same bits.

    out: 0-dim, dtype of probs. const_buf: fp32 [2], filled with C and the fp32 loss, as the backward wants it.
    workspace: what :func:`aux_loss_workspace` says, contents free; missing, wrong dtype, wrong device, too small or
    not contiguous is an error that says which. Calls that may overlap (two streams) need a workspace each.
    """
    _check(probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff, padding_mask)
    space = _check_workspace(workspace, probs.device)
    for name, buffer, shape, dtype in (("out", out, (), probs.dtype), ("const_buf", const_buf, (2,), torch.float32)):
        if buffer.shape != shape or buffer.dtype != dtype or buffer.device != probs.device:
            raise ValueError(
                f"{name} is {dtype} {shape} on {probs.device}; "
                f"got {buffer.dtype} {tuple(buffer.shape)} on {buffer.device}"
            )
        if not buffer.is_contiguous():
            raise ValueError(f"{name} is not contiguous, strides {buffer.stride()}")
    if probs.is_cuda and probs.numel():
        from bicomm.model_hooks import aux_loss_kernel

        device_total = isinstance(total_num_tokens, Tensor)
        c = total_num_tokens if device_total else coefficient(num_experts, coeff, topk, int(total_num_tokens))
        aux_loss_kernel.forward_out(
            probs, tokens_per_expert, c, coefficient(num_experts, coeff, topk, 1), padding_mask, out, const_buf, space
        )
        return out
    c = _constant(num_experts, coeff, topk, total_num_tokens, None, probs.device)
    loss = definition(probs, tokens_per_expert, c, padding_mask)
    const_buf[0], const_buf[1] = c, loss
    return out.copy_(loss)
