"""The exact sum, rounded once: `exact` and `window(g, t, s)`, over the peers' buffers.

A plain fp64 chain is exact while the exponents of an element's addends lie close together. Each block watches their
spread in integers; a block in which some element's is too wide reads its addends again, slice by slice (see
arithmetic.py), and only those slices that its addends touch. Every path gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bicomm.kernels.addends import UNROLL, load_all, load_peer, own_slice, peer_pointers, store_tile, tile_limit
from bicomm.kernels.arithmetic import (
    add_round_to_odd,
    magnitude_bits,
    round_to_fp32,
    round_to_slice,
    slice_constant,
    window_anchor,
    window_close,
    window_truncate,
)
from bicomm.kernels.barrier import enter, leave
from bicomm.kernels.call import RUNTIME_INTEGERS, Reduce, Tile, barriers, bits_of, cdiv, grid


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
def plain_sum(
    LOAD: tl.constexpr, args, tiles, lane, unit, N: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """The fp64 chain, in any order, with the largest and smallest magnitudes seen."""
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
def piece(x, here, above):
    """The part of x between two neighbouring slices."""
    wide = x.to(tl.float64)
    return round_to_slice(wide, here) - round_to_slice(wide, above)


@triton.jit
def slice_sum(
    LOAD: tl.constexpr, args, lane, unit, largest, smallest, N: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """The exact sum of any finite addends, rounded to odd into fp64: read again for every slice, from the lowest on."""
    WIDTH: tl.constexpr = 47 if N <= 120 else 40
    lowest = ((tl.min(smallest, 0) + 1) >> 23).to(tl.int32)  # exponent fields; an ulp is 2**(max(field, 1) - 150)
    highest = tl.max(largest, 0) >> 23
    total = tl.zeros([BLOCK], tl.float64)
    carry = tl.zeros([BLOCK], tl.float64)
    for j in tl.range((tl.maximum(lowest, 1) - 1) // WIDTH, (highest + 24 + WIDTH - 1) // WIDTH):
        here = slice_constant(j, WIDTH)
        above = slice_constant(j + 1, WIDTH)
        part = carry
        for r in tl.range(0, N):  # unrolled, it would need twice the registers
            part += piece(seen(LOAD(args, r, lane, False, VEC), unit, G), here, above)
        carry = (part + above) - above  # without it a slice may exceed half a unit of the next, and the fold is wrong
        total = add_round_to_odd(part - carry, total)
    return add_round_to_odd(carry, total)


@triton.jit
def sum_exactly(
    LOAD: tl.constexpr, args, lane, N: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, ROTATE: tl.constexpr,
    LIMIT: tl.constexpr, G: tl.constexpr, T: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """RN32 of the sum of N tiles: exact, or window(G, T, S) where G > 0.

    LIMIT: the widest spread of exponents for which a chain of N additions in fp64 is exact; see `spread_limit`.
    """
    tiles = ()
    if N <= UNROLL:
        tiles = load_all(LOAD, args, lane, N, VEC, ROTATE)
    anchor = 0
    if G > 0:
        anchor = window_anchor(largest_magnitude(LOAD, args, tiles, lane, N, VEC, BLOCK), G)
    total, largest, smallest = plain_sum(LOAD, args, tiles, lane, anchor - T, N, VEC, BLOCK, G)
    lowest = ((smallest + 1) >> 23).to(tl.int32, bitcast=True)
    wide = (largest >> 23) - tl.maximum(lowest, 1) > LIMIT
    if tl.max(wide.to(tl.int32), 0) != 0:
        sliced = slice_sum(LOAD, args, lane, anchor - T, largest, smallest, N, VEC, BLOCK, G)
        total = tl.where(tl.abs(total) < float("inf"), sliced, total)  # NaN and infinity: the plain chain's are right
    if G > 0:
        total = window_close(total, anchor - S)
    return round_to_fp32(total)


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def _exact_kernel(
    peers, out, splits, offset: tl.int64, start: tl.int64, units: tl.int64, hidden: tl.int64, rows: tl.int64,
    rank: tl.int64, control, mine, page, what: tl.int64, shape: tl.int64, tokens: tl.int64, mark: tl.int64,
    patience: tl.int64, SYNC: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr, ROTATE: tl.constexpr,
    ON_DEVICE: tl.constexpr, LIMIT: tl.constexpr, G: tl.constexpr, T: tl.constexpr, S: tl.constexpr, VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first, owned = own_slice(splits, start, units, hidden, rows, rank, W, ON_DEVICE)  # loaded while the barrier waits
    bases = peer_pointers(peers, offset, tl.float32, W)
    ok = tl.cast(1, tl.int32)
    if SYNC:
        ok, opened = enter(control, mine, page, what, shape, tokens, mark, patience, rank, W, LANES, SYNC == 2)
    lane = tl.arange(0, BLOCK)
    per_tile: tl.constexpr = BLOCK // VEC
    for tile in tl.range(tl.program_id(0), tl.cdiv(owned, per_tile), tl.num_programs(0)):
        done = tl.cast(tile, tl.int64) * per_tile
        limit = tile_limit(owned - done, 1, VEC, BLOCK)
        args = (bases, peers, offset, (first + done) * VEC, tile_limit(owned - done, ok, VEC, BLOCK))
        value = sum_exactly(load_peer, args, lane, W, VEC, BLOCK, ROTATE, LIMIT, G, T, S)
        store_tile(out, done * VEC, lane, limit, value, ok, VEC)
    if SYNC:
        leave(opened, mine, page, ok, patience, rank, W, LANES, SYNC == 2)


def spread_limit(addends: int, significand: int = 24) -> int:
    """The widest spread of exponents at which every partial sum of so many addends fits the 53 bits of fp64.

    significand: bits of one addend, 24 for fp32 and 8 for bf16.
    """
    return 53 - significand - (addends - 1).bit_length()


def tile_for(elements: int, addends: int) -> Tile:
    """The launch for a result of so many elements, measured on an H200 (bench/combine.py --tune).

    Two blocks a multiprocessor, which all run at once, take 72 us for 4096 x 2048 where 4 warps took 83; in between 512
    elements a block are quicker. Looped loads of more than 16 addends would spill at 1,024.
    """
    if addends > UNROLL.value:
        return Tile(512, 4, 8, 128)
    if 1 << 15 < elements <= 1 << 20:
        return Tile(512, 4, 8)
    return Tile(1024, 8, 2, 128)  # so many registers that two blocks fit


def reduce(call: Reduce, parameters: tuple[int, ...] = (), *, tile: Tile | None = None) -> Tensor:
    """This rank's slice under the contract `exact`, or `window(*parameters)` with three of them. Returns call.out.

    Every rank's buffer holds fp32 [sum(splits), hidden] at peers[r] + offset. Asynchronous on the current stream.
    """
    tile = tile or tile_for(call.capacity, call.world_size)
    vector = call.vector
    g, t, s = parameters or (0, 0, 0)
    _exact_kernel[grid(cdiv(call.capacity, tile.block), tile, call.out.device, call.sync)](
        call.peers, bits_of(call.out), call.splits, call.offset, call.start // vector, call.count // vector,
        call.hidden // vector, call.out.shape[0], call.rank, W=call.world_size, ROTATE=call.rotate,
        ON_DEVICE=call.splits is not None, LIMIT=spread_limit(call.world_size), G=g, T=t, S=s, VEC=vector,
        BLOCK=tile.block, **tile.options, **barriers(call.sync, tile.warps),
    )  # fmt: skip
    return call.out
