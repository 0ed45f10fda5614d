"""The forward kernel of bf16 rows without weights: sums in fp64, or exact ones, at half the instructions."""

from __future__ import annotations

import triton
import triton.language as tl

from bicomm.kernels.arithmetic import magnitude_bits, window_anchor, window_close
from bicomm.mirror.addends import ACC_EXACT, ALL, EACH, EXACT, FIRST_BIT, LAST_BIT, MANY_BIT, ORDERED, TAGGED, WINDOW
from bicomm.mirror.block import finish, load_rows

SIGN_AND_LOW_28 = tl.constexpr(-0x70000001)  # 0x8fffffff as int32
UNSCALE = tl.constexpr(2.0**896)


@triton.jit
def _span_bf16(high, low, raw, SOFT: tl.constexpr):
    """As `_span`, of bf16 bits: high holds 0x8000 + the largest, low 0x7fff + the smallest nonzero (0x7fff: none).

    All are int16, and both orders are the signed one, so that one instruction follows two columns.
    """
    if SOFT:
        moved = raw | -0x8000
        high = tl.maximum(high, moved)
        low = tl.minimum(low, moved - 1)
    else:
        high, low = tl.inline_asm_elementwise(
            "{ .reg .b32 moved; or.b32 moved, $2, 0x80008000; max.s16x2 $0, $3, moved;"
            " sub.u32 moved, moved, 0x00010001; min.s16x2 $1, $4, moved; }",
            "=&r,=r,r,r,r", [raw, high, low], dtype=(tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip
    return high, low


@triton.jit
def _ends_bf16(high, low):
    """The exponent fields of the largest and of the smallest nonzero magnitude (256 where there is none)."""
    return (high.to(tl.int32) & 0x7FFF) >> 7, ((low.to(tl.int32) + 0x8001) & 0xFFFF) >> 7


@triton.jit
def _widen(bits):
    """x * 2**-896 in fp64 of a finite bf16 x, given as fp32 bits: the bits moved, also those of a subnormal."""
    return (((bits >> 3) & SIGN_AND_LOW_28).to(tl.int64) << 32).to(tl.float64, bitcast=True)


@triton.jit
def _unless(condition, DTYPE: tl.constexpr):
    """A scalar 1, or 0 where the condition holds, without a conversion."""
    return tl.where(condition, tl.full([], 0.0, DTYPE), tl.full([], 1.0, DTYPE))


@triton.jit
def plain_bf16_kernel(
    out, rows, stride, num_rows, places, tags, probs, tokens, hidden,
    K: tl.constexpr, GROUPS: tl.constexpr, HAS_MAP: tl.constexpr, ROWS_BF16: tl.constexpr, OUT_BF16: tl.constexpr,
    PRODUCT: tl.constexpr, WEIGHT_BF16: tl.constexpr, ACC: tl.constexpr, RULE: tl.constexpr,
    G: tl.constexpr, CUT: tl.constexpr, SMALLEST: tl.constexpr,
    ADDEND_LIMIT: tl.constexpr, PARTIAL_LIMIT: tl.constexpr, SOFT: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """As `_unpermute_kernel`, for bf16 rows without weights that are summed in fp64 or exactly.

    One or two bf16 addends of an engine rank are summed in fp32: fp64 and then fp32 would give that rounding too, as
    an fp64 sum of two 8-bit numbers is either exact or within 2**-45 of the larger. Three and more go through fp64. A
    conversion to fp64 is 1/8 the rate of an integer operation on Hopper, so bf16 is widened by moving its bits, which
    gives x * 2**-896 (also for subnormals). Sums of these round as those of x do: all are multiples of 2**-133, whose
    fp64 image 2**-1029 is above the smallest fp64 number. NaN and infinities come out finite, so they take the slices.
    All partials are multiples of their addends' lowest bit: the addends' span vouches for the sum across ranks too.
    """
    blocks = tl.cdiv(hidden, BLOCK)
    first = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)

    ACROSS: tl.constexpr = RULE == EXACT or RULE == WINDOW  # otherwise only what goes through fp64 is followed
    short = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK], tl.float64)
    total = tl.zeros([BLOCK], tl.float32 if RULE == ORDERED else tl.float64)
    high = tl.full([BLOCK], -0x8000, tl.int16)  # of the addends
    low = tl.full([BLOCK], 0x7FFF, tl.int16)
    partial_largest = tl.zeros([BLOCK], tl.int32)
    wrong = tl.full([], 0, tl.int32)
    for base in range(0, K, AT_ONCE):
        held, raws = load_rows(
            rows, stride, num_rows, places, first, base, tokens, columns, hidden, K, HAS_MAP, AT_ONCE
        )
        flags = ()
        if GROUPS == TAGGED:
            for j in tl.static_range(AT_ONCE):
                flags = flags + (tl.load(tags + first * K + base + j),)  # noqa: RUF005
        for j in tl.static_range(AT_ONCE):
            wrong = wrong | (held[j] >= num_rows).to(tl.int32)
            bits = raws[j].to(tl.int32) << 16
            if ACROSS or GROUPS != TAGGED:
                high, low = _span_bf16(high, low, raws[j], SOFT)
            if GROUPS == EACH:
                total = total + _widen(bits)
            elif GROUPS == ALL:
                acc = acc + _widen(bits)
            else:
                # Exact products with 0 or 1, as a choice would cost two instructions more. What is not finite stays so.
                begins = ((flags[j] >> FIRST_BIT) & 1) != 0
                ends = (flags[j] >> LAST_BIT) != 0
                short = tl.fma(
                    short, tl.full([BLOCK], _unless(begins, tl.float32), tl.float32), bits.to(tl.float32, bitcast=True)
                )
                if ((flags[j] >> MANY_BIT) & 1) != 0:
                    acc = tl.fma(acc, tl.full([BLOCK], _unless(begins, tl.float64), tl.float64), _widen(bits))
                    if ACC == ACC_EXACT and not ACROSS:
                        high, low = _span_bf16(high, low, raws[j], SOFT)
                    if ends:
                        short = tl.where(tl.abs(short) < float("inf"), (acc * UNSCALE).to(tl.float32), short)
                counts = tl.full([BLOCK], _unless(ends == 0, total.dtype), total.dtype)
                total = tl.fma(short.to(total.dtype), counts, total)
                if RULE == WINDOW:
                    partial_largest = tl.maximum(partial_largest, magnitude_bits(short) & -(flags[j] >> LAST_BIT))
    if GROUPS == EACH:
        total = total * UNSCALE
    elif GROUPS == ALL:
        partial = (acc * UNSCALE).to(tl.float32)
        total = partial.to(total.dtype)
        partial_largest = magnitude_bits(partial)

    value = total
    highest, lowest = _ends_bf16(high, low)
    if GROUPS == TAGGED:
        again = (tl.abs(total) < float("inf")) == 0
    else:
        again = highest == 255
    if ACROSS or ACC == ACC_EXACT:
        spare: tl.constexpr = 0 if GROUPS == EACH else 1  # partials are rounded, at most to the next binade
        again = again | (highest - lowest > ADDEND_LIMIT - spare)
    if RULE == WINDOW:
        if GROUPS == EACH:
            partial_largest = (high.to(tl.int32) & 0x7FFF) << 16
        unit = window_anchor(partial_largest, G) - CUT
        again = again | (lowest - 134 < unit)  # the window may truncate
        value = window_close(total, window_anchor(partial_largest, G) - SMALLEST)
        value = tl.where(tl.abs(total) < float("inf"), value, total)
    finish(
        out, rows, stride, num_rows, places, tags, probs, first, tokens, columns, hidden, value, again, wrong,
        K, GROUPS, HAS_MAP, ROWS_BF16, OUT_BF16, PRODUCT, WEIGHT_BF16, ACC, RULE, G, CUT, SMALLEST, SOFT, BLOCK, SUB,
        True,
    )  # fmt: skip
