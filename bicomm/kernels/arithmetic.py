"""The arithmetic that all kernels share, as small Triton functions: error-free sums, roundings, slices, windows.

Everything that decides a bit and is needed by more than one kernel stands here once. The functions work on tensors of
any shape and on scalars, in Triton's compiler and in its interpreter. They count on `enable_fp_fusion=False` at the
launch: a contracted multiply-add rounds once where these round twice.

bf16 values are handled as their bits (int16), so that the rounding is spelled here and not left to a cast: Triton's
interpreter truncates, and the PTX cast turns a NaN into 0x7fff.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-149)  # every fp32 value is a multiple of 2**-149


@triton.jit
def two_sum(a, b):
    """s = RN(a + b) and its error: a + b = s + e exactly, unless s overflows (Knuth; any order of magnitudes)."""
    s = a + b
    v = s - a
    return s, (a - (s - v)) + (b - v)


@triton.jit
def add_round_to_odd(a, b):
    """a + b (fp64) rounded to odd: an inexact sum gets an odd last bit, so that a later rounding is never double."""
    s, error = two_sum(a, b)
    bits = s.to(tl.int64, bitcast=True)
    toward = tl.where((error > 0) == (s > 0), 1, -1)
    return tl.where((error != 0) & ((bits & 1) == 0), bits + toward, bits).to(tl.float64, bitcast=True)


@triton.jit
def canonical_nan(x):
    """fp32 with every NaN made 0x7fc00000."""
    return tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def round_to_fp32(x):
    """RN32 of fp64 (or fp32, which stays), a zero made +0, every NaN made 0x7fc00000."""
    return canonical_nan(x.to(tl.float32) + 0.0)


@triton.jit
def bf16_bits(x):
    """fp32 rounded to nearest even into bf16, as its bits (int16); every NaN is 0x7fc0, a zero keeps its sign."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16  # no finite value or infinity overflows int32's sign here
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def from_bf16_bits(bits):
    """fp32 of bf16 given as its bits (int16): exact."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def round_through_bf16(x):
    """fp32 rounded to bf16 and widened again; every NaN is the canonical one."""
    return from_bf16_bits(bf16_bits(x))


# ------------------------------------------------------------------------------------------------------- the slices
#
# The sum without a fall-back: slice j holds the addends' parts between 2**lo and 2**(lo + WIDTH), lo = -149 + WIDTH *
# j. With WIDTH = 47 the parts are at most 2**46 units, so that up to 120 of them and a carry are summed in fp64 without
# error; with 40, some 16,000 of them.


@triton.jit
def slice_constant(j, WIDTH: tl.constexpr):
    """1.5 * 2**(52 + lo) of slice j, which may be known at run time only: x + c - c is a multiple of 2**lo."""
    exponent = (1023 + 52 + LOWEST) + (j * WIDTH)
    return ((tl.cast(exponent, tl.int64) << 52) | (1 << 51)).to(tl.float64, bitcast=True)


@triton.jit
def round_to_slice(x, c):
    """x (fp64 holding an fp32 value) rounded to a multiple of the slice's 2**lo.

    From 2**-10 c on, x is such a multiple already, as it has 24 bits; and near c the trick would lose its sum.
    """
    return tl.where(tl.abs(x) < c * 0.0009765625, (x + c) - c, x)


# ------------------------------------------------------------------------------------------------------- the window


@triton.jit
def magnitude_bits(x):
    """The bits of |x| (fp32) as int32: ordered as the magnitudes are."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def window_anchor(largest, G: tl.constexpr):
    """A = G * ceil(e / G), where e is the exponent of the largest magnitude (its bits); a subnormal's e is -126."""
    e = tl.maximum(largest >> 23, 1) - 127
    return ((e + (G - 1) + 127 * G) // G - 127) * G  # shifted: // truncates, and rounds down only for positive values


@triton.jit
def window_truncate(x, unit):
    """x (fp32) truncated toward zero to a multiple of 2**unit. Infinities and NaN stay what they are."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 255
    drop = unit - (tl.maximum(exponent, 1) - 150)  # low bits of the significand to clear
    kept = tl.where(drop > 23, 0, bits & (-1 << tl.minimum(tl.maximum(drop, 0), 23)))
    return tl.where(exponent == 255, bits, kept).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(exponent):
    """2**exponent in fp64, for -1022 <= exponent <= 1023."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def window_close(total, smallest):
    """The window's sum (fp64, exact or rounded to odd), or 0 where its magnitude is below 2**smallest."""
    return tl.where(tl.abs(total) < power_of_two(smallest), 0.0, total)
