"""Counts, balancing losses, z-loss and the expert bias: integers wherever something is counted.

Counts of tokens are int64 from the router to the loss and through every all-reduce, so they are the same on any number
of ranks and in any algorithm; padding never enters one. A loss is defined over the tokens of one step of one group:
each rank passes its own scores, and the counts and totals of the whole group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bicomm.as_written import as_written
from bicomm.model_hooks import pinned, scores
from bicomm.model_hooks.aux_loss import Reduction, fused_moe_aux_loss
from bicomm.model_hooks.router import MAX_FUSED_EXPERTS


def _flat_mask(mask: Tensor | None, tokens: torch.Size, device: torch.device) -> Tensor | None:
    """The mask as bool [T]. `~` of any other dtype would be another number, and [S, B] for [B, S] other tokens."""
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.shape not in (tokens, (tokens.numel(),)) or mask.device != device:
        raise ValueError(
            f"padding_mask is bool {tuple(tokens)} on {device}, True where a token is padding; "
            f"got {mask.dtype} {tuple(mask.shape)} on {mask.device}"
        )
    return mask.reshape(-1)


@as_written
def count_tokens(
    ids: Tensor, num_experts: int, *, padding_mask: Tensor | None = None, group: Any = None
) -> Tensor:  # fmt: skip
    """Tokens per expert, int64 [num_experts], from routed ids [..., k], summed over the ranks of `group`.

    Ids outside 0..num_experts-1 are not routed and do not count, nor does padding (bool [...], True = padding).
    """
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"ids are integers, got {ids.dtype}")
    flat = ids.reshape(-1, ids.shape[-1])
    mask = _flat_mask(padding_mask, ids.shape[:-1], ids.device)
    if ids.is_cuda:
        from bicomm.model_hooks import counts_kernel

        counts = counts_kernel.count(flat, num_experts, mask)
    else:
        keep = (flat >= 0) & (flat < num_experts)
        if mask is not None:
            keep = keep & ~mask.unsqueeze(1)
        counts = torch.bincount(flat[keep].to(torch.int64), minlength=num_experts)
    if group is not None:
        dist.all_reduce(counts, group=group)
    return counts


@as_written
def count_valid(tokens: Tensor, *, padding_mask: Tensor | None = None, group: Any = None) -> Tensor:
    """The number of tokens that are not padding, 0-dim int64 on the device of `tokens` [..., any], over `group`."""
    lead = tokens.shape[:-1]
    mask = _flat_mask(padding_mask, lead, tokens.device)
    if mask is None:
        total = torch.full((), lead.numel(), dtype=torch.int64, device=tokens.device)
    else:
        total = (~mask).sum(dtype=torch.int64)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def load_balancing_loss(
    values: Tensor, counts: Tensor, total: int | Tensor, topk: int, coeff: float, *,
    padding_mask: Tensor | None = None, reduction: Reduction = "blocked", group: Any = None,
) -> Tensor:  # fmt: skip
    """The auxiliary loss of scores [..., E] (see `router.scores_for_aux_loss`): `fused_moe_aux_loss` of all tokens.

    counts int64 [E] and total are those of the whole step; padding_mask bool [...], True where a token is padding.
    """
    experts = values.shape[-1]
    mask = _flat_mask(padding_mask, values.shape[:-1], values.device)
    return fused_moe_aux_loss(
        values.reshape(-1, experts), counts, total, experts, topk, coeff, True, padding_mask=mask,
        reduction=reduction, group=group,
    )  # fmt: skip


def sequence_loss(
    values: Tensor, ids: Tensor, topk: int, coeff: float, *, padding_mask: Tensor | None = None, group: Any = None,
    reduction: Reduction = "blocked",
) -> Tensor:  # fmt: skip
    """The mean over sequences of each one's auxiliary loss: 0-dim in the dtype of the scores.

    values [S, B, E]: scores of S tokens of B sequences. ids [S, B, k]: what they chose. group: ranks that share the
    tokens of the same B sequences (context or tensor parallel); counts are summed over it, as integers.
    padding_mask bool [S, B], True = padding: each sequence is then divided by its own number of valid tokens, and one
    without any has loss 0. Without a mask it is one launch over B * E columns.
    """
    if values.dim() != 3 or ids.shape[:2] != values.shape[:2]:
        raise ValueError(f"scores are [S, B, E] and ids [S, B, k]; got {tuple(values.shape)} and {tuple(ids.shape)}")
    length, batch, experts = values.shape
    if padding_mask is not None and padding_mask.shape != values.shape[:2]:
        raise ValueError(f"padding_mask is bool {(length, batch)}, got {tuple(padding_mask.shape)}")
    exact_group = group if reduction == "exact" else None
    if padding_mask is None:
        shift = torch.arange(batch, device=ids.device).view(1, batch, 1) * experts
        routed = (ids >= 0) & (ids < experts)
        counts = count_tokens(torch.where(routed, ids + shift, -1), batch * experts, group=group)
        total = count_valid(values[:, 0], group=group) if group is not None else length
        loss = fused_moe_aux_loss(
            values.reshape(length, batch * experts), counts, total, experts, topk, coeff, True, reduction=reduction,
            group=exact_group,
        )  # fmt: skip
        return loss / batch
    each = []
    for b in range(batch):
        mask = padding_mask[:, b]
        each.append(
            fused_moe_aux_loss(
                values[:, b], count_tokens(ids[:, b], experts, padding_mask=mask, group=group),
                count_valid(values[:, b], padding_mask=mask, group=group), experts, topk, coeff, True,
                padding_mask=mask, reduction=reduction, group=exact_group,
            )
        )  # fmt: skip
    loss = each[0]
    for more in each[1:]:  # ascending, so that the order is known
        loss = loss + more
    return loss / batch


class GlobalBalance:
    """Counts over many microbatches (global-batch balancing, arXiv 2501.11873): int64 [E] and an int64 total.

    `add` what each microbatch chose, then `loss` of a microbatch's scores against all counts so far, and `reset` at
    the end of the step. With equal microbatches this is the loss with counts averaged over them.
    """

    def __init__(self, num_experts: int, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.total = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, ids: Tensor, *, padding_mask: Tensor | None = None, group: Any = None) -> None:
        """Add the choices ids [..., k] of this microbatch, over all ranks of `group`."""
        # out of place: a loss made before keeps the counts it was made with for its backward
        self.counts = self.counts + count_tokens(ids, self.counts.shape[0], padding_mask=padding_mask, group=group)
        self.total = self.total + count_valid(ids, padding_mask=padding_mask, group=group)

    def loss(
        self, values: Tensor, total: int | Tensor, topk: int, coeff: float, *, padding_mask: Tensor | None = None,
        reduction: Reduction = "blocked", group: Any = None,
    ) -> Tensor:  # fmt: skip
        """The loss of this microbatch's scores [..., E], of `total` tokens in the group, against the counts so far."""
        experts = values.shape[-1]
        return fused_moe_aux_loss(
            values.reshape(-1, experts), self.counts, total, experts, topk, coeff, True, count_total=self.total,
            padding_mask=_flat_mask(padding_mask, values.shape[:-1], values.device), reduction=reduction, group=group,
        )  # fmt: skip

    def reset(self) -> None:
        """Forget all counts."""
        self.counts, self.total = torch.zeros_like(self.counts), torch.zeros_like(self.total)


def updated_expert_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """bias + rate * sign(mean count - count), new fp32 [E] (arXiv 2408.15664).

    counts: int64 [..., E], of the whole step and group (see :func:`count_tokens`). The sign is that of the integer
    sum(counts) - E * count, so no rounding can turn it.
    """
    if counts.is_floating_point():
        raise TypeError(f"counts are integers: {counts.dtype} cannot hold them all (40,840 becomes 41,216 in bf16)")
    wide = counts.to(torch.int64)
    excess = wide.sum(-1, keepdim=True) - wide * wide.shape[-1]
    return bias.to(torch.float32) + excess.sign().to(torch.float32) * rate


class _ZLoss(torch.autograd.Function):
    """logsumexp**2 [T, 1] of logits [T, E]; `aux_loss` then adds over the tokens, as one column with count 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.is_cuda and x.shape[-1] <= MAX_FUSED_EXPERTS:
            from bicomm.model_hooks import z_loss_kernel

            lse = z_loss_kernel.forward(x)
        else:
            high, denominator = scores.softmax_parts(x.to(torch.float32))
            lse = pinned.log_from_one(denominator) + high
        ctx.save_for_backward(x, lse)
        return lse * lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, lse = ctx.saved_tensors
        row = grad * (lse * 2.0)
        if x.is_cuda and x.shape[-1] <= MAX_FUSED_EXPERTS:
            from bicomm.model_hooks import z_loss_kernel

            return z_loss_kernel.backward(x, row)
        plain = x.to(torch.float32)
        high, denominator = scores.softmax_parts(plain)
        out: Tensor = pinned.exp_neg(plain - high) / denominator * row
        return out.to(x.dtype)


@as_written
def z_loss(
    logits: Tensor, coeff: float, total: int | Tensor | None = None, *, padding_mask: Tensor | None = None,
    reduction: Reduction = "blocked", group: Any = None,
) -> Tensor:  # fmt: skip
    """coeff * mean over tokens of logsumexp(logits)**2 (ST-MoE, arXiv 2202.08906): 0-dim fp32, differentiable.

    logits [..., E]; total: the number of valid tokens of the whole group (an int, or 0-dim int64 on the device);
    counted here where it is not given. padding_mask bool [...], True = padding: its logits never enter.
    reduction, group: as for `fused_moe_aux_loss`.
    """
    x = logits.reshape(-1, logits.shape[-1])
    mask = _flat_mask(padding_mask, logits.shape[:-1], logits.device)
    if total is None:
        total = count_valid(x, padding_mask=mask, group=group)
    if mask is not None:
        x = torch.where(mask.unsqueeze(1), 0.0, x)
    squares: Tensor = _ZLoss.apply(x)  # type: ignore[no-untyped-call]
    one = torch.ones(1, dtype=torch.int64, device=x.device)
    # E * coeff / topk / count_total / T with E = topk = count_total = 1
    return fused_moe_aux_loss(
        squares, one, total, 1, 1, coeff, True, count_total=1, padding_mask=mask, reduction=reduction, group=group
    )


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(loss)
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return grad, torch.full_like(loss, ctx.scale), None


def attach_loss(activation: Tensor, loss: Tensor, *, averaged_over: int = 1, loss_scale: float = 1.0) -> Tensor:
    """`activation` unchanged; its backward also runs that of `loss`, with gradient loss_scale * averaged_over.

    The losses here are made with the counts and totals of the whole group, so the ranks' gradients have to be *added*
    for that of the step, however many ranks share the tokens. Where the trainer averages gradients over W of these
    ranks (data and context parallel, say), averaged_over = W undoes that. loss_scale: the main loss's, if it has one.
    """
    out: Tensor = _Attach.apply(activation, loss, float(averaged_over) * loss_scale)  # type: ignore[no-untyped-call]
    return out
