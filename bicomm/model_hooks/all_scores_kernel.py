"""Scores of all experts for the auxiliary loss, and their gradient, as Triton kernels: the bits of `scores.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.model_hooks import pinned_triton as pin
from bicomm.model_hooks.launching import on_its_device
from bicomm.model_hooks.router_kernel import EPS, SOFTMAX, launch_shape, pad, pointwise, row_parts, rows_2d, slope
from bicomm.model_hooks.scores import SCORE_FUNCTIONS, ScoreFunction


@triton.jit(do_not_specialize=["T"])
def all_scores_forward(logits, scores, T: tl.int64, row_stride: tl.int64, E: tl.constexpr, P: tl.constexpr,
                       FUNCTION: tl.constexpr, R: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None].to(tl.int64)
    e = tl.arange(0, P)[None, :]
    inside = (row < T) & (e < E)
    x = pin.widen(tl.load(logits + row * row_stride + e, mask=inside, other=0.0))
    high, denominator = row_parts(x, e < E, FUNCTION)
    s = pointwise(x, high, denominator, FUNCTION)
    if FUNCTION != SOFTMAX:
        s = tl.div_rn(s, pin.fixed_sum(tl.where(e < E, s, 0.0), 1) + EPS + tl.zeros_like(s))
    tl.store(scores + row * E + e, s, mask=inside)


@triton.jit(do_not_specialize=["T"])
def all_scores_backward(logits, grad, grad_logits, T: tl.int64, row_stride: tl.int64, grad_stride: tl.int64,
                        E: tl.constexpr, P: tl.constexpr, FUNCTION: tl.constexpr, R: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None].to(tl.int64)
    e = tl.arange(0, P)[None, :]
    inside = (row < T) & (e < E)
    x = pin.widen(tl.load(logits + row * row_stride + e, mask=inside, other=0.0))
    g = pin.widen(tl.load(grad + row * grad_stride + e, mask=inside, other=0.0))
    high, denominator = row_parts(x, e < E, FUNCTION)
    s = pointwise(x, high, denominator, FUNCTION)
    if FUNCTION == SOFTMAX:
        out = s * (g - pin.fixed_sum(tl.where(e < E, g * s, 0.0), 1))
    else:
        d = pin.fixed_sum(tl.where(e < E, s, 0.0), 1) + EPS + tl.zeros_like(s)
        dot = pin.fixed_sum(tl.where(e < E, g * tl.div_rn(s, d), 0.0), 1)
        out = tl.div_rn(g - dot, d) * slope(x, s, FUNCTION)
    tl.store(grad_logits + row * E + e, pin.narrow(out, grad_logits.dtype.element_ty), mask=inside)


@on_its_device
def run_all_scores(logits: Tensor, score_function: ScoreFunction, grad: Tensor | None = None) -> Tensor:
    """`scores.all_scores` (fp32), or with `grad` [T, E] its gradient in the dtype of the logits."""
    x, stride = rows_2d(logits)
    T, E = x.shape
    out = torch.empty(T, E, dtype=torch.float32 if grad is None else logits.dtype, device=logits.device)
    if T == 0:
        return out
    R, warps = launch_shape(T, pad(E))
    sizes = {"E": E, "P": pad(E), "FUNCTION": SCORE_FUNCTIONS.index(score_function), "R": R}
    grid = (triton.cdiv(T, R),)
    if grad is None:
        all_scores_forward[grid](x, out, T, stride, **sizes, num_warps=warps, enable_fp_fusion=False)
    else:
        # the auxiliary loss's gradient is one row, expanded (stride 0): it is read as it is, from cache
        g, g_stride = rows_2d(grad)
        all_scores_backward[grid](x, g, out, T, stride, g_stride, **sizes, num_warps=warps, enable_fp_fusion=False)
    return out
