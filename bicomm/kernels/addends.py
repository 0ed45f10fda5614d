"""Where a kernel's addends lie and how a tile of them is read and a result written: for every executor the same.

A tile is BLOCK consecutive elements. Lengths come in units of VEC elements, so that the compiler knows that masks
change only between vectors and uses 16-byte loads. A loader is a function (args, r, lane, HELD, VEC) -> fp32 tile of
addend r, with HELD by pointers that the caller holds in a tuple (r known at compile time), without it by a look-up. The
sums take one as a constexpr, so that peers' slices, routed rows and weighted rows share one sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bicomm.kernels.arithmetic import bf16_bits, from_bf16_bits

# Up to so many addends are unrolled and held in registers at once; more are read in a loop (72 unrolled would spill).
UNROLL = tl.constexpr(16)


@triton.jit
def rows_before(splits, rank, W: tl.constexpr):
    """splits[0] + ... + splits[rank - 1], of int64 [W] in memory; negative entries count as 0."""
    total = tl.cast(0, tl.int64)
    if W <= UNROLL:
        for r in tl.static_range(W):
            total += tl.where(r < rank, tl.maximum(tl.load(splits + r), 0), 0)
    else:
        for r in tl.range(0, W, loop_unroll_factor=8):
            total += tl.where(r < rank, tl.maximum(tl.load(splits + r), 0), 0)
    return total


@triton.jit
def own_slice(splits, start, units, hidden, rows, rank, W: tl.constexpr, ON_DEVICE: tl.constexpr):
    """(first unit, number of units) of this rank's slice; hidden is units a row, rows the capacity."""
    if ON_DEVICE:
        first = rows_before(splits, rank, W) * hidden
        owned = tl.minimum(tl.maximum(tl.load(splits + rank), 0), rows) * hidden
    else:
        first = tl.cast(start, tl.int64)
        owned = tl.cast(units, tl.int64)
    return first, owned


@triton.jit
def peer_pointer(peers, offset, r, DTYPE: tl.constexpr):
    """The address of rank r's data, as a pointer to DTYPE."""
    return (tl.load(peers + r) + offset).to(tl.pointer_type(DTYPE))


@triton.jit
def peer_pointers(peers, offset, DTYPE: tl.constexpr, W: tl.constexpr):
    """All ranks' pointers, to be held outside the loop over tiles; none where there are too many to unroll."""
    bases = ()
    if W <= UNROLL:
        for r in tl.static_range(W):
            bases = bases + (peer_pointer(peers, offset, r, DTYPE),)  # noqa: RUF005 (Triton knows no stars)
    return bases


@triton.jit
def element_at(base, at, VEC: tl.constexpr):
    """base + at, known to be a multiple of VEC elements (the compiler loses that of a function's arguments)."""
    return tl.multiple_of(base + at, VEC * (base.dtype.element_ty.primitive_bitwidth // 8))


@triton.jit
def tile_limit(units, ok, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Elements of a tile, where `units` vectors are left from its start on; 0 or less where `ok` is 0."""
    return tl.minimum(tl.where(ok != 0, units, 0), BLOCK // VEC).to(tl.int32) * VEC


@triton.jit
def load_tile(pointer, lane, limit):
    """fp32 of fp32, or of bf16 held as int16; 0 from `limit` on, where nothing is read."""
    x = tl.load(pointer + lane, mask=lane < limit, other=0)
    if pointer.dtype.element_ty == tl.int16:
        return from_bf16_bits(x)
    else:
        return x


@triton.jit
def load_peer(args, r, lane, HELD: tl.constexpr, VEC: tl.constexpr):
    """Loader: the tile at `at` of rank r's fp32 buffer. args = (bases, peers, offset, at, limit)."""
    bases, peers, offset, at, limit = args
    if HELD:
        base = bases[r]
    else:
        base = peer_pointer(peers, offset, r, tl.float32)
    return load_tile(element_at(base, at, VEC), lane, limit)


@triton.jit
def load_all(LOAD: tl.constexpr, args, lane, N: tl.constexpr, VEC: tl.constexpr, ROTATE: tl.constexpr):
    """A tuple of all N tiles, read from peer ROTATE on: tile r stands at (r - ROTATE) mod N.

    All loads of a tile are on their way before the first addition, in this order, so that ranks begin at different
    links; what is done with the tiles goes by rank.
    """
    tiles = ()
    for i in tl.static_range(N):
        tiles = tiles + (LOAD(args, (i + ROTATE) % N, lane, True, VEC),)  # noqa: RUF005
    return tiles


@triton.jit
def store_tile(base, at, lane, limit, value, ok, VEC: tl.constexpr):
    """Write an fp32 tile at `at`, as bf16 where base points to int16; NaN if `ok` is 0; nothing from `limit` on."""
    value = tl.where(ok != 0, value, float("nan"))
    WIDE: tl.constexpr = min(VEC, 16 // (base.dtype.element_ty.primitive_bitwidth // 8))  # bf16 rows, fp32 result
    target = element_at(base, at, WIDE)
    if base.dtype.element_ty == tl.int16:
        tl.store(target + lane, bf16_bits(value), mask=lane < limit)
    else:
        tl.store(target + lane, value, mask=lane < limit)
