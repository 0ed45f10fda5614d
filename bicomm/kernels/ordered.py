"""The chain in rank order: `ordered` (fp32) and `fp64`, over the peers' buffers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.kernels.addends import UNROLL, load_all, load_peer, own_slice, peer_pointers, store_tile, tile_limit
from bicomm.kernels.arithmetic import round_to_fp32
from bicomm.kernels.barrier import enter, leave
from bicomm.kernels.call import RUNTIME_INTEGERS, Reduce, Tile, barriers, bits_of, cdiv, grid


@triton.jit
def chain(args, lane, W: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr, ROTATE: tl.constexpr):
    """acc = +0; for r = 0..W-1: acc = acc + addend_r, in ACC (fp32 or fp64)."""
    if W <= UNROLL:
        tiles = load_all(load_peer, args, lane, W, VEC, ROTATE)
        acc = tiles[(W - ROTATE) % W].to(ACC)  # a leading +0 would change nothing but the sign of a zero: made + below
        for r in tl.static_range(1, W):
            acc += tiles[(r + W - ROTATE) % W].to(ACC)
    else:
        acc = tl.zeros([BLOCK], ACC)
        for r in tl.range(0, W, loop_unroll_factor=8):
            acc += load_peer(args, r, lane, False, VEC).to(ACC)
    return acc


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def _ordered_kernel(
    peers, out, splits, offset: tl.int64, start: tl.int64, units: tl.int64, hidden: tl.int64, rows: tl.int64,
    rank: tl.int64, control, mine, page, what: tl.int64, shape: tl.int64, tokens: tl.int64, mark: tl.int64,
    patience: tl.int64, SYNC: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr, ROTATE: tl.constexpr,
    ON_DEVICE: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
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
        acc = chain(args, lane, W, VEC, BLOCK, ACC, ROTATE)
        store_tile(out, done * VEC, lane, limit, round_to_fp32(acc), ok, VEC)
    if SYNC:
        leave(opened, mine, page, ok, patience, rank, W, LANES, SYNC == 2)


def tile_for(elements: int) -> Tile:
    """The launch for a result of so many elements, measured on an H200 (bench/combine.py --tune): 2% over 4 warps."""
    return Tile(512, 4, 8) if elements <= 1 << 20 else Tile(1024, 8, 8)


def reduce(call: Reduce, *, accumulator: torch.dtype = torch.float32, tile: Tile | None = None) -> Tensor:
    """This rank's slice under the contract `ordered`, or with accumulator=torch.float64 under `fp64`. Returns call.out.

    Every rank's buffer holds fp32 [sum(splits), hidden] at peers[r] + offset. Asynchronous on the current stream.
    """
    tile = tile or tile_for(call.capacity)
    vector = call.vector
    _ordered_kernel[grid(cdiv(call.capacity, tile.block), tile, call.out.device, call.sync)](
        call.peers, bits_of(call.out), call.splits, call.offset, call.start // vector, call.count // vector,
        call.hidden // vector, call.out.shape[0], call.rank, W=call.world_size, ROTATE=call.rotate,
        ON_DEVICE=call.splits is not None, ACC=tl.float64 if accumulator == torch.float64 else tl.float32, VEC=vector,
        BLOCK=tile.block, **tile.options, **barriers(call.sync, tile.warps),
    )  # fmt: skip
    return call.out
