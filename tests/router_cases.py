"""Inputs that break routers, and a comparison of bits: shared by the tests of router and auxiliary loss."""

from __future__ import annotations

from typing import Any

import torch

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# (E, keyword arguments of `router.route`): every score function, with and without groups, bias, scaling
RULES: list[tuple[int, int, dict[str, Any]]] = [
    (256, 8, {}),
    (128, 8, {"renormalize": True, "scaling_factor": 2.5}),
    (64, 6, {"pre_softmax": False}),
    (256, 8, {"score_function": "sigmoid", "num_groups": 8, "group_topk": 4, "scaling_factor": 2.6, "bias": True}),
    (160, 6, {"num_groups": 8, "group_topk": 3, "group_score_topk": 1}),
    (32, 1, {"score_function": "sigmoid"}),
    (33, 4, {"score_function": "sqrtsoftplus", "bias": True}),
    (7, 3, {"score_function": "sigmoid", "renormalize": False}),
    (1024, 16, {"score_function": "sqrtsoftplus"}),
]


def bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor as integers, on the CPU, every NaN made the same."""
    x = x.detach().cpu()
    if not x.is_floating_point():
        return x
    return torch.where(torch.isnan(x), torch.full_like(x, torch.nan), x).contiguous().view(_INTEGER[x.element_size()])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(bits(a), bits(b)))


def logits(rows: int, experts: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random logits whose first rows are the hard ones: ties, -inf, NaN, saturation, signed zeros, +inf."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, experts, generator=generator) * 3
    hard = torch.randn(9, experts, generator=generator)
    hard[0] = 1.0
    hard[1] = -torch.inf
    hard[2, experts // 2] = torch.nan
    hard[3] = torch.nan
    hard[4] = hard[4].abs() + 20.0  # fp32 sigmoid is 1 for all of them
    hard[5] = torch.where(torch.arange(experts) % 2 == 0, 0.0, -0.0)
    hard[6, experts // 3] = torch.inf
    hard[7, ::2] = -torch.inf
    hard[8] = hard[8] * 2.0**-149
    x[: min(9, rows)] = hard[:rows]
    return x.to(dtype)


def probabilities(rows: int, cols: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Softmax scores with exponents spread wide, and ties with dust in the first column."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.softmax(torch.randn(rows, cols, generator=generator) * 4, -1)
    dust = torch.tensor([1.0, 2.0**-24, 2.0**-60])
    x[:, 0] = dust[torch.arange(rows) % 3]
    return x.to(dtype)


def token_counts(cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.rand(cols, generator=generator) * 300).to(dtype)
    high = 2**40 if dtype == torch.int64 else 2**30 if dtype == torch.int32 else 2**15 - 1
    return torch.randint(0, high, (cols,), generator=generator).to(dtype)


# rows, cols, num_experts, dtype of probs, dtype of counts (the shapes that the issue and its original were tried on)
LOSSES = [
    (4097, 128, 128, torch.float32, torch.int64),
    (257, 384, 128, torch.float32, torch.float32),
    (3, 7, 7, torch.float32, torch.int64),
    (129, 1025, 1025, torch.float32, torch.int32),
    (1000, 64, 64, torch.float16, torch.int16),
    (1000, 256, 256, torch.bfloat16, torch.bfloat16),
    (1, 1, 1, torch.float32, torch.int64),
]
