"""A token's value with no condition on its addends' exponents, slice by slice (see arithmetic.py).

The fast kernels take this path for a block of columns whose exponents span too many binades for an fp64 chain, or that
holds a NaN or an infinity. It reads the rows again, from the cache, once for each slice.
"""

# ruff: noqa: SIM109 (Triton compares constants one by one)

from __future__ import annotations

import triton
import triton.language as tl

from bicomm.kernels.arithmetic import (
    add_round_to_odd,
    magnitude_bits,
    round_to_slice,
    slice_constant,
    window_anchor,
    window_close,
    window_truncate,
)
from bicomm.mirror.addends import (
    ACC_EXACT,
    ACC_FP64,
    EACH,
    EXACT,
    FP64,
    LAST_BIT,
    ORDERED,
    PLAIN,
    TAGGED,
    WINDOW,
    accumulate,
    addend,
    load_row,
    row_at,
    weight_at,
)

SLICES = tl.constexpr(7)
WIDTH = tl.constexpr(47)
MAX_SLOTS = 120  # addends of a slice without a rounding error


@triton.jit
def _exact_slots(
    rows, stride, num_rows, places, tags, probs, first, tokens, begin, end, columns, hidden,
    K: tl.constexpr, GROUPS: tl.constexpr, HAS_MAP: tl.constexpr, ROWS_BF16: tl.constexpr, PRODUCT: tl.constexpr,
    WEIGHT_BF16: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """The exact sum of the addends at places [begin, end), rounded to odd into fp64.

    The loops count from 0: Triton 3.6 takes a value that an outer loop carries for dead where it is an inner loop's
    bound and nothing else (its pull request 9036 says so), and every sum would begin at place 0.
    """
    plain = tl.zeros_like(columns).to(tl.float64)
    for n in range(end - begin):
        i = begin + n
        row = row_at(places, first, i, tokens, K, HAS_MAP)
        raw = load_row(rows, row, stride, num_rows, columns, hidden)
        weight = 0.0
        if PRODUCT != PLAIN:
            weight = weight_at(probs, tags, first, i, row, K, GROUPS, WEIGHT_BF16)
        plain += addend(raw, weight, ROWS_BF16, PRODUCT, SOFT).to(tl.float64)
    carry = tl.zeros_like(plain)
    result = tl.zeros_like(plain)
    for j in range(SLICES):
        c = slice_constant(j, WIDTH)
        above = slice_constant(j + 1, WIDTH)
        total = carry
        for n in range(end - begin):
            i = begin + n
            row = row_at(places, first, i, tokens, K, HAS_MAP)
            raw = load_row(rows, row, stride, num_rows, columns, hidden)
            weight = 0.0
            if PRODUCT != PLAIN:
                weight = weight_at(probs, tags, first, i, row, K, GROUPS, WEIGHT_BF16)
            x = addend(raw, weight, ROWS_BF16, PRODUCT, SOFT).to(tl.float64)
            total += round_to_slice(x, c) - round_to_slice(x, above)
        carry = (total + above) - above
        result = add_round_to_odd(total - carry, result)
    return tl.where(tl.abs(plain) < float("inf"), result, plain)


@triton.jit
def exact_partials(
    rows, stride, num_rows, places, tags, probs, first, tokens, columns, hidden,
    K: tl.constexpr, GROUPS: tl.constexpr, HAS_MAP: tl.constexpr, ROWS_BF16: tl.constexpr, PRODUCT: tl.constexpr,
    WEIGHT_BF16: tl.constexpr, ACC: tl.constexpr, RULE: tl.constexpr, G: tl.constexpr, CUT: tl.constexpr,
    SMALLEST: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """The token's value once more, with no condition on exponents. Pass -1 looks at the partials, then one per slice.

    For the rules ordered and fp64 the single pass is their chain over exact partials.
    """
    plain = tl.zeros_like(columns).to(tl.float64)
    chain = tl.zeros_like(columns).to(tl.float32)
    largest = tl.zeros_like(columns).to(tl.int32)
    carry = tl.zeros_like(plain)
    result = tl.zeros_like(plain)
    passes: tl.constexpr = SLICES + 1 if RULE == EXACT or RULE == WINDOW else 1
    for turn in range(passes):
        c = slice_constant(turn - 1, WIDTH)
        above = slice_constant(turn, WIDTH)
        total = carry
        acc = tl.zeros_like(plain) if ACC == ACC_EXACT or ACC == ACC_FP64 else tl.zeros_like(chain)
        begin = 0
        for i in range(K):
            row = row_at(places, first, i, tokens, K, HAS_MAP)
            last = i == K - 1
            if GROUPS == EACH:
                last = i >= 0
            elif GROUPS == TAGGED:
                last = (tl.load(tags + first * K + i) >> LAST_BIT) != 0
            if ACC != ACC_EXACT or GROUPS == EACH:
                raw = load_row(rows, row, stride, num_rows, columns, hidden)
                weight = 0.0
                if PRODUCT != PLAIN:
                    weight = weight_at(probs, tags, first, i, row, K, GROUPS, WEIGHT_BF16)
                x = addend(raw, weight, ROWS_BF16, PRODUCT, SOFT)
                if GROUPS == EACH:
                    acc = x.to(acc.dtype)
                else:
                    acc = accumulate(acc, x, weight, ACC, PRODUCT, SOFT)
            if last:
                if ACC == ACC_EXACT and GROUPS != EACH:
                    acc = _exact_slots(
                        rows, stride, num_rows, places, tags, probs, first, tokens, begin, i + 1, columns, hidden,
                        K, GROUPS, HAS_MAP, ROWS_BF16, PRODUCT, WEIGHT_BF16, SOFT,
                    )  # fmt: skip
                partial = acc.to(tl.float32)
                acc = tl.zeros_like(acc)
                begin = i + 1
                if turn == 0:
                    plain += partial.to(tl.float64)
                    chain += partial
                    largest = tl.maximum(largest, magnitude_bits(partial))
                else:
                    if RULE == WINDOW:
                        partial = window_truncate(partial, window_anchor(largest, G) - CUT)
                    part = round_to_slice(partial.to(tl.float64), c) - round_to_slice(partial.to(tl.float64), above)
                    total += part
        if turn > 0:
            carry = (total + above) - above
            result = add_round_to_odd(total - carry, result)
    if RULE == ORDERED:
        value = chain
    elif RULE == FP64:
        value = plain
    else:
        if RULE == WINDOW:
            result = window_close(result, window_anchor(largest, G) - SMALLEST)
        value = tl.where(tl.abs(plain) < float("inf"), result, plain)
    return value
