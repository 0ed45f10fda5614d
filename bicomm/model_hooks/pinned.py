"""Arithmetic whose bits are the same on every machine: the exp, log and sums that routing decisions are made from.

Libraries differ in the last bits of exp and log, and in the order in which they add. Here both are pinned. exp and log
are short polynomials of fp32 additions, products, divisions and square roots, each rounded to nearest. A sum over
experts (or slots, or partials) is :func:`fixed_sum`: integers, so that no order exists in which it could differ. These
functions are the definition and the CPU path; `pinned_triton.py` has the same steps for kernels, to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG2E = 1.44269502162933349609375
LN2_HI = 0.693359375  # nine bits: n * LN2_HI is exact for every n in use
LN2_LO = -2.12194440e-4
EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
LOG_TERMS = tuple(2.0 / (2 * i + 1) for i in range(8, 0, -1))  # 2/17 ... 2/3: enough for |s| <= 1/3 in fp32
ROUND = 12582912.0  # 1.5 * 2**23: (t + ROUND) - ROUND rounds |t| < 2**22 to an integer, ties to even
EXP_FLOOR = -110.0  # exp is 0 in fp32 from -104 on
SQRT2 = 1.41421354
FIXED_SHIFT = 17  # fixed_sum keeps 17 bits below the last bit of its largest addend


def exp_neg(x: Tensor) -> Tensor:
    """e**x for fp32 x <= 0 (any shape), within 2 ulp; 0 for -inf; NaN stays NaN. Pinned fp32 steps."""
    y = torch.where(x < EXP_FLOOR, EXP_FLOOR, x)
    n = (y * LOG2E + ROUND) - ROUND
    r = (y - n * LN2_HI) - n * LN2_LO
    p = torch.full_like(r, EXP_POLYNOMIAL[0])
    for c in EXP_POLYNOMIAL[1:]:
        p = p * r + c
    z = ((p * r) * r + r) + 1.0
    k = torch.where(torch.isnan(n), 0.0, n).to(torch.int32)
    first = k.clamp(min=-126)  # two factors, so that a subnormal result is rounded and not flushed
    return z * ((first + 127) << 23).view(torch.float32) * ((k - first + 127) << 23).view(torch.float32)


def _atanh_series(s: Tensor) -> Tensor:
    """2 * atanh(s) for |s| <= 1/3."""
    z = s * s
    p = torch.full_like(s, LOG_TERMS[0])
    for c in LOG_TERMS[1:]:
        p = p * z + c
    return s * 2.0 + (s * z) * p


def log1p_unit(t: Tensor) -> Tensor:
    """log(1 + t) for fp32 t in [0, 1], within 3 ulp. Pinned fp32 steps."""
    return _atanh_series(t / (t + 2.0))


def log_from_one(x: Tensor) -> Tensor:
    """log(x) for fp32 x in [1, 2**31], within 3 ulp. Pinned fp32 steps; NaN stays NaN."""
    bits = x.view(torch.int32)
    e = (bits >> 23) - 127
    f = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    high = f > SQRT2
    f = torch.where(high, f * 0.5, f)
    n = torch.where(high, e + 1, e).to(torch.float32)
    s = (f - 1.0) / (f + 1.0)
    out = n * LN2_HI + (_atanh_series(s) + n * LN2_LO)
    return torch.where(torch.isnan(x), x, out)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e**-x) in pinned fp32 steps; never overflows, exactly 1 from 17.33 on."""
    t = exp_neg(-x.abs())
    return torch.where(x >= 0, torch.ones_like(t), t) / (t + 1.0)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e**x) in pinned fp32 steps."""
    out = torch.where(x > 0, x, 0.0) + log1p_unit(exp_neg(-x.abs()))
    return torch.where(torch.isnan(x), x, out)


def sqrt_rn(x: Tensor) -> Tensor:
    """The square root of fp32 x, rounded to nearest. (torch's fp32 sqrt on a CPU is off by an ulp for some x.)"""
    return x.to(torch.float64).sqrt().to(torch.float32)


def fixed_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension of fp32 x [..., n], n <= 2**22: fp32 [...], the same in every order.

    Each addend is cut, toward zero, to a multiple of 2**-17 ulp of the largest one; these are added as integers and
    the total is rounded once. So the error is below n * 2**-40 of the largest addend. A NaN or an infinity among the
    addends gives NaN; an empty sum is 0.
    """
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    bits = x.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    top = magnitude.amax(-1)
    top_exponent = (top >> 23).clamp(min=1)
    exponent = (magnitude >> 23).clamp(min=1)
    mantissa = torch.where(magnitude >= 0x800000, (magnitude & 0x7FFFFF) | 0x800000, magnitude).to(torch.int64)
    q = (mantissa << FIXED_SHIFT) >> (top_exponent.unsqueeze(-1) - exponent).clamp(max=63).to(torch.int64)
    total = torch.where(bits < 0, -q, q).sum(-1)
    unit = (((top_exponent - 150 - FIXED_SHIFT + 1023).to(torch.int64)) << 52).view(torch.float64)
    out = (total.to(torch.float64) * unit).to(torch.float32)
    return torch.where(top >= 0x7F800000, float("nan"), out)
