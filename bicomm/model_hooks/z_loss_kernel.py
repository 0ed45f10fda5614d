"""log-sum-exp of each row of router logits, and its gradient, as Triton kernels: the bits that a CPU gives."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.model_hooks import pinned_triton as pin
from bicomm.model_hooks.launching import on_its_device
from bicomm.model_hooks.router_kernel import launch_shape


@triton.jit
def _parts(logits, row, T, row_stride, E: tl.constexpr, P: tl.constexpr):
    e = tl.arange(0, P)[None, :]
    valid = e < E
    x = pin.widen(tl.load(logits + row * row_stride + e, mask=(row < T) & valid, other=0.0))
    high = tl.max(tl.where(valid & (x == x), x, float("-inf")), axis=1, keep_dims=True)
    t = pin.exp_neg(x - high)
    return e, t, high, pin.fixed_sum_unit(tl.where(valid, t, 0.0), 1)


@triton.jit(do_not_specialize=["T"])
def lse_forward(logits, lse, T: tl.int64, row_stride: tl.int64, E: tl.constexpr, P: tl.constexpr, R: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None].to(tl.int64)
    _, _, high, denominator = _parts(logits, row, T, row_stride, E, P)
    tl.store(lse + row, pin.log_from_one(denominator) + high, mask=row < T)


@triton.jit(do_not_specialize=["T"])
def lse_backward(logits, grad, grad_logits, T: tl.int64, row_stride: tl.int64, E: tl.constexpr, P: tl.constexpr,
                 R: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None].to(tl.int64)
    e, t, _, denominator = _parts(logits, row, T, row_stride, E, P)
    out = tl.div_rn(t, denominator + tl.zeros_like(t)) * tl.load(grad + row, mask=row < T, other=0.0)
    tl.store(grad_logits + row * E + e, pin.narrow(out, grad_logits.dtype.element_ty), mask=(row < T) & (e < E))


@on_its_device
def forward(logits: Tensor) -> Tensor:
    """fp32 [T, 1] from logits [T, E]."""
    x = logits.contiguous()
    T, E = x.shape
    out = torch.empty(T, 1, dtype=torch.float32, device=x.device)
    P = triton.next_power_of_2(E)
    R, warps = launch_shape(T, P)
    if T:
        lse_forward[(triton.cdiv(T, R),)](
            x, out, T, x.stride(0), E=E, P=P, R=R, num_warps=warps, enable_fp_fusion=False
        )  # fmt: skip
    return out


@on_its_device
def backward(logits: Tensor, grad: Tensor) -> Tensor:
    """softmax(logits) * grad [T, 1], in the dtype of the logits [T, E]."""
    x = logits.contiguous()
    T, E = x.shape
    out = torch.empty_like(x)
    P = triton.next_power_of_2(E)
    R, warps = launch_shape(T, P)
    if T:
        lse_backward[(triton.cdiv(T, R),)](
            x, grad.contiguous(), out, T, x.stride(0), E=E, P=P, R=R, num_warps=warps, enable_fp_fusion=False
        )  # fmt: skip
    return out
