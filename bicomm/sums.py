"""The sum of N tiles, exact and rounded once: the contracts `exact`, `window` and `owner`, for every kernel.

Three ways lead to it, and give the same bits. A chain in fp64 is exact while an element's exponents lie close together,
which integers watch. A cascade in fp32 carries the error of every addition along, and is exact while the errors of
these errors are zero; it needs no fp64 units and fewer registers. A tile in which some element fails its test is
summed again slice by slice (see arithmetic.py), in parts: what this path holds in registers would otherwise bound how
many blocks share a multiprocessor, also where it is never taken.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from bicomm.addends import UNROLL, load_all, store_tile
from bicomm.arithmetic import (
    add_round_to_odd,
    magnitude_bits,
    round_to_fp32,
    round_to_slice,
    slice_constant,
    two_sum,
    window_anchor,
    window_close,
    window_truncate,
)

# Up to so many addends are held in registers while they are sliced; 16 would spill.
SLICED = tl.constexpr(8)


def spread_limit(addends: int, significand: int = 24) -> int:
    """The widest spread of exponents at which every partial sum of so many addends fits the 53 bits of fp64.

    significand: bits of one addend, 24 for fp32 and 8 for bf16.
    """
    return 53 - significand - (addends - 1).bit_length()


@triton.jit
def seen(x, unit, G: tl.constexpr):
    """The addend as the contract sees it: itself, or truncated to the window's unit."""
    if G > 0:
        return window_truncate(x, unit)
    else:
        return x


@triton.jit
def watch(largest, smallest, x):
    """The largest magnitude (its bits) and the smallest nonzero one (its bits - 1, unsigned: a zero is the largest)."""
    bits = magnitude_bits(x)
    return tl.maximum(largest, bits), tl.minimum(smallest, (bits - 1).to(tl.uint32, bitcast=True))


@triton.jit
def lowest_field(smallest):
    """The exponent field of the smallest nonzero magnitude, at least 1: its ulp is 2**(field - 150)."""
    return tl.maximum(((smallest + 1) >> 23).to(tl.int32, bitcast=True), 1)


@triton.jit
def largest_magnitude(LOAD: tl.constexpr, args, tiles, lane, N: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of each element's largest magnitude, before anything is truncated."""
    largest = tl.zeros([BLOCK], tl.int32)
    if N <= UNROLL:
        for r in tl.static_range(N):
            largest = tl.maximum(largest, magnitude_bits(tiles[r]))
    else:
        for r in tl.range(0, N, loop_unroll_factor=8):
            largest = tl.maximum(largest, magnitude_bits(LOAD(args, r, lane, False, VEC)))
    return largest


@triton.jit
def chain(
    LOAD: tl.constexpr, args, tiles, lane, unit, N: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """The sum in fp64, in any order, with the largest and smallest magnitudes seen."""
    if N <= UNROLL:
        first = seen(tiles[0], unit, G)
        total = first.to(tl.float64)
        largest = magnitude_bits(first)
        smallest = (largest - 1).to(tl.uint32, bitcast=True)
        for r in tl.static_range(1, N):
            x = seen(tiles[r], unit, G)
            largest, smallest = watch(largest, smallest, x)
            total += x.to(tl.float64)
    else:
        total = tl.zeros([BLOCK], tl.float64)
        largest = tl.zeros([BLOCK], tl.int32)
        smallest = tl.full([BLOCK], 0xFFFFFFFF, tl.uint32)
        for r in tl.range(0, N, loop_unroll_factor=8):
            x = seen(LOAD(args, r, lane, False, VEC), unit, G)
            largest, smallest = watch(largest, smallest, x)
            total += x.to(tl.float64)
    return total, largest, smallest


@triton.jit
def cascade_step(total, errors, flaws, x):
    """total + errors, and bits that are not all zero once an error of the errors was lost."""
    total, error = two_sum(total, x)
    errors, flaw = two_sum(errors, error)
    return total, errors, flaws | magnitude_bits(flaw)


@triton.jit
def cascade(LOAD: tl.constexpr, args, tiles, lane, N: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """The sum in two fp32 numbers, added up, and not 0 where that may be wrong; infinities and NaN count as wrong."""
    flaws = tl.zeros([BLOCK], tl.int32)
    errors = tl.zeros([BLOCK], tl.float32)
    if N <= UNROLL:
        total = tiles[0]
        if N > 1:
            total, errors = two_sum(total, tiles[1])
        for r in tl.static_range(2, N):
            total, errors, flaws = cascade_step(total, errors, flaws, tiles[r])
    else:
        total = tl.zeros([BLOCK], tl.float32)
        for r in tl.range(0, N, loop_unroll_factor=8):
            total, errors, flaws = cascade_step(total, errors, flaws, LOAD(args, r, lane, False, VEC))
    value = total + errors
    return value, tl.where(tl.abs(value) < float("inf"), flaws, 1)


@triton.jit
def slices_of_tiles(tiles, unit, first, last, N: tl.constexpr, BLOCK: tl.constexpr, G: tl.constexpr):
    """The exact sum of N finite tiles, rounded to odd into fp64, from slice `first` to the one before `last`."""
    WIDTH: tl.constexpr = 47
    rest = ()
    for r in tl.static_range(N):
        rest = rest + (seen(tiles[r], unit, G).to(tl.float64),)  # noqa: RUF005 (Triton knows no stars)
    total = tl.zeros([BLOCK], tl.float64)
    carry = tl.zeros([BLOCK], tl.float64)
    for j in tl.range(first, last):
        above = slice_constant(j + 1, WIDTH)
        part = carry
        higher = ()
        for i in tl.static_range(N):
            upper = round_to_slice(rest[i], above)
            part += rest[i] - upper
            higher = higher + (upper,)  # noqa: RUF005
        rest = higher
        carry = (part + above) - above  # without it a slice may exceed half a unit of the next, and the fold is wrong
        total = add_round_to_odd(part - carry, total)
    return add_round_to_odd(carry, total)


@triton.jit
def slices_in_loops(
    LOAD: tl.constexpr, args, lane, unit, first, last, N: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
    G: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The same for more tiles than registers hold: they are read again for every slice."""
    total = tl.zeros([BLOCK], tl.float64)
    carry = tl.zeros([BLOCK], tl.float64)
    for j in tl.range(first, last):
        here = slice_constant(j, WIDTH)
        above = slice_constant(j + 1, WIDTH)
        part = carry
        for r in tl.range(0, N, loop_unroll_factor=4):
            x = seen(LOAD(args, r, lane, False, VEC), unit, G).to(tl.float64)
            part += round_to_slice(x, here) - round_to_slice(x, above)
        carry = (part + above) - above
        total = add_round_to_odd(part - carry, total)
    return add_round_to_odd(carry, total)


@triton.jit
def sum_by_slices(
    LOAD: tl.constexpr, args, lane, N: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr
):
    """RN32 of the exact sum of any addends, or of what the window sees of it."""
    G: tl.constexpr = RULE[2]
    WIDTH: tl.constexpr = 47 if N <= 120 else 40
    tiles = load_all(LOAD, args, lane, N, VEC, 0, False)
    total, largest, smallest = chain(LOAD, args, tiles, lane, 0, N, VEC, BLOCK, 0)
    anchor = 0
    if G > 0:
        anchor = window_anchor(largest, G)
    unit = anchor - RULE[3]
    first = (lowest_field(tl.min(smallest, 0)) - 1) // WIDTH
    last = ((tl.max(largest, 0) >> 23) + 24 + WIDTH - 1) // WIDTH
    if N <= SLICED:
        sliced = slices_of_tiles(tiles, unit, first, last, N, BLOCK, G)
    else:
        sliced = slices_in_loops(LOAD, args, lane, unit, first, last, N, VEC, BLOCK, G, WIDTH)
    if G > 0:
        sliced = window_close(sliced, anchor - RULE[4])
    total = tl.where(tl.abs(total) < float("inf"), sliced, total)  # NaN and infinity: the plain chain's are right
    return round_to_fp32(total)


@triton.jit
def sum_quickly(
    LOAD: tl.constexpr, args, tiles, lane, N: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr
):
    """RN32 of the same sum, and a number for each element that is not 0 where it may be wrong."""
    LIMIT: tl.constexpr = RULE[0]
    G: tl.constexpr = RULE[2]
    if RULE[1] and G == 0:
        value, doubts = cascade(LOAD, args, tiles, lane, N, VEC, BLOCK)
    else:
        # A window whose edges no element within LIMIT can reach changes nothing there: only the slices need it.
        REACH: tl.constexpr = LIMIT + 22 + G
        CLEAR: tl.constexpr = G == 0 or (RULE[3] >= REACH and RULE[4] >= REACH)
        anchor = 0
        if not CLEAR:
            anchor = window_anchor(largest_magnitude(LOAD, args, tiles, lane, N, VEC, BLOCK), G)
        value, largest, smallest = chain(LOAD, args, tiles, lane, anchor - RULE[3], N, VEC, BLOCK, 0 if CLEAR else G)
        doubts = ((largest >> 23) - lowest_field(smallest) > LIMIT).to(tl.int32)
        if not CLEAR:
            value = window_close(value, anchor - RULE[4])
    return round_to_fp32(value), doubts


@triton.jit
def sum_and_store(
    LOAD: tl.constexpr, args, tiles, out, at, lane, limit, ok, N: tl.constexpr, VEC: tl.constexpr,
    OUT_VEC: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Write RN32 of the sum of N tiles to out + at, as `store_tile` does.

    tiles    what `load_all` gave for lane, arange(0, BLOCK).
    OUT_VEC  elements that out + at is a multiple of.
    PART     elements that go slice by slice at a time: one a thread, `Tile.part`.
    RULE     (limit, cascade, g, t, s): `spread_limit` of the addends; whether fp32 pairs replace the fp64 chain (not
             for a window); the window, or g = 0 for the exact sum.
    """
    value, doubts = sum_quickly(LOAD, args, tiles, lane, N, VEC, BLOCK, RULE)
    if tl.max(doubts, 0) == 0:
        store_tile(out, at, lane, limit, value, ok, OUT_VEC)
    else:
        for part in tl.range(0, BLOCK // PART):
            some = part * PART + tl.arange(0, PART)
            again = sum_by_slices(LOAD, args, some, N, VEC, PART, RULE)
            store_tile(out, at, some, limit, again, ok, OUT_VEC)
