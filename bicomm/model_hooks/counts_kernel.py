"""Tokens per expert as a Triton kernel: integer atomics, whose order is no matter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.model_hooks.launching import on_its_device


@triton.jit(do_not_specialize=["slots", "num_experts"])
def count_slots(ids, padding, counts, slots: tl.int64, num_experts: tl.int64, K: tl.constexpr, PADDING: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    e = tl.load(ids + i, mask=i < slots, other=-1).to(tl.int64)
    keep = (i < slots) & (e >= 0) & (e < num_experts)
    if PADDING:
        keep = keep & (tl.load(padding + i // K, mask=i < slots, other=1) == 0)
    tl.atomic_add(counts + e, 1, mask=keep, sem="relaxed")


@on_its_device
def count(ids: Tensor, num_experts: int, padding_mask: Tensor | None) -> Tensor:
    """int64 [num_experts] of ids [T, k]: see `losses.count_tokens`."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    slots = ids.numel()
    if slots:
        count_slots[(triton.cdiv(slots, 1024),)](
            ids.contiguous(), ids if padding_mask is None else padding_mask.contiguous().view(torch.uint8), counts,
            slots, num_experts, K=ids.shape[1], PADDING=padding_mask is not None, BLOCK=1024, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return counts
