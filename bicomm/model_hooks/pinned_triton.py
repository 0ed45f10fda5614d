"""The steps of `pinned.py` for Triton kernels, bit for bit.

Launches that use them pass enable_fp_fusion=False: a contracted multiply-add would round once where the definition
rounds twice. Reductions here are of integers or maxima, so the layout Triton picks cannot change a result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bicomm.model_hooks import pinned as _p

LOG2E = tl.constexpr(_p.LOG2E)
LN2_HI = tl.constexpr(_p.LN2_HI)
LN2_LO = tl.constexpr(_p.LN2_LO)
E0, E1, E2, E3, E4, E5 = (tl.constexpr(c) for c in _p.EXP_POLYNOMIAL)
L0, L1, L2, L3, L4, L5, L6, L7 = (tl.constexpr(c) for c in _p.LOG_TERMS)
ROUND = tl.constexpr(_p.ROUND)
EXP_FLOOR = tl.constexpr(_p.EXP_FLOOR)
SQRT2 = tl.constexpr(_p.SQRT2)
FIXED_SHIFT = tl.constexpr(_p.FIXED_SHIFT)


@triton.jit
def exp_neg(x):
    y = tl.where(x < EXP_FLOOR, EXP_FLOOR, x)
    n = (y * LOG2E + ROUND) - ROUND
    r = (y - n * LN2_HI) - n * LN2_LO
    p = r * E0 + E1
    p = p * r + E2
    p = p * r + E3
    p = p * r + E4
    p = p * r + E5
    z = ((p * r) * r + r) + 1.0
    k = n.to(tl.int32)
    first = tl.maximum(k, -126)
    out = z * ((first + 127) << 23).to(tl.float32, bitcast=True)
    return out * ((k - first + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _atanh_series(s):
    z = s * s
    p = z * L0 + L1
    p = p * z + L2
    p = p * z + L3
    p = p * z + L4
    p = p * z + L5
    p = p * z + L6
    p = p * z + L7
    return s * 2.0 + (s * z) * p


@triton.jit
def log1p_unit(t):
    return _atanh_series(tl.div_rn(t, t + 2.0))


@triton.jit
def log_from_one(x):
    bits = x.to(tl.int32, bitcast=True)
    e = (bits >> 23) - 127
    f = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    high = f > SQRT2
    f = tl.where(high, f * 0.5, f)
    n = tl.where(high, e + 1, e).to(tl.float32)
    s = tl.div_rn(f - 1.0, f + 1.0)
    out = n * LN2_HI + (_atanh_series(s) + n * LN2_LO)
    return tl.where(x != x, x, out)


@triton.jit
def sigmoid(x):
    t = exp_neg(-tl.abs(x))
    return tl.div_rn(tl.where(x >= 0, 1.0, t), t + 1.0)


@triton.jit
def softplus(x):
    out = tl.where(x > 0, x, 0.0) + log1p_unit(exp_neg(-tl.abs(x)))
    return tl.where(x != x, x, out)


@triton.jit
def fixed_sum(x, axis: tl.constexpr):
    """`pinned.fixed_sum` along one axis of an fp32 tile; lanes that are no addends hold 0."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    top = tl.max(magnitude, axis=axis, keep_dims=True)
    top_exponent = tl.maximum(top >> 23, 1)
    shift = tl.minimum(top_exponent - tl.maximum(magnitude >> 23, 1), 63)
    mantissa = tl.where(magnitude >= 0x800000, (magnitude & 0x7FFFFF) | 0x800000, magnitude).to(tl.int64)
    q = (mantissa << FIXED_SHIFT) >> shift.to(tl.int64)
    total = tl.sum(tl.where(bits < 0, -q, q), axis=axis, keep_dims=True)
    unit = ((top_exponent - (150 + FIXED_SHIFT) + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    out = (total.to(tl.float64) * unit).to(tl.float32)
    return tl.where(top >= 0x7F800000, float("nan"), out)


@triton.jit
def fixed_sum_unit(x, axis: tl.constexpr):
    """`fixed_sum` of addends in [0, 1] of which one is 1, or any is NaN: what a softmax adds. Half the instructions."""
    number = x == x
    q = (tl.where(number, x, 0.0) * 1099511627776.0).to(tl.int64)  # 2**40; exact, and then cut toward zero
    total = tl.sum(q, axis=axis, keep_dims=True).to(tl.float64) * 9.094947017729282e-13  # 2**-40
    wild = tl.max(tl.where(number, 0, 1), axis=axis, keep_dims=True)
    return tl.where(wild > 0, float("nan"), total.to(tl.float32))


@triton.jit
def order_key(value):
    """An int32 that orders fp32 values: NaN below -inf, -0 equal to +0. INT32_MIN is free for 'not a candidate'."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(value != value, -2147483647, key)


@triton.jit
def order_key_of_score(value):
    """:func:`order_key` of values that are +0, positive or NaN: their bits are in order already."""
    return tl.where(value != value, -2147483647, value.to(tl.int32, bitcast=True))


@triton.jit
def value_of_key(key):
    """The value that :func:`order_key` was given (a -0 comes back as +0, a NaN as the canonical one)."""
    value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(key <= -2147483647, float("nan"), value)


@triton.jit
def widen(x):
    """A loaded value as fp32; exact but for fp64. bf16 goes by its bits: Triton's interpreter loses its subnormals."""
    if x.dtype == tl.bfloat16:
        out = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        out = x.to(tl.float32)
    return out


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 x rounded to nearest even into `dtype`. bf16 is rounded in integers: Triton's interpreter cuts it off."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x != x, x, even.to(tl.float32, bitcast=True))
    return x.to(dtype)
