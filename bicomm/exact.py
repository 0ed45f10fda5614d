"""The exact sum, rounded once: `exact` and `window(g, t, s)`, over the peers' buffers. The sum itself is in sums.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bicomm.addends import UNROLL, load_all, load_peer, own_slice, peer_pointers, tile_limit
from bicomm.barrier import enter, leave
from bicomm.call import RUNTIME_INTEGERS, Reduce, Tile, barriers, bits_of, cdiv, few_fp64_units, grid
from bicomm.sums import spread_limit, sum_and_store


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def _exact_kernel(
    peers, out, splits, offset: tl.int64, start: tl.int64, units: tl.int64, hidden: tl.int64, rows: tl.int64,
    rank: tl.int64, control, mine, page, what: tl.int64, shape: tl.int64, tokens: tl.int64, mark: tl.int64,
    patience: tl.int64, SYNC: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr, ROTATE: tl.constexpr,
    ON_DEVICE: tl.constexpr, LIMIT: tl.constexpr, CASCADE: tl.constexpr, G: tl.constexpr, T: tl.constexpr,
    S: tl.constexpr, VEC: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, owned = own_slice(splits, start, units, hidden, rows, rank, W, ON_DEVICE)  # loaded while the barrier waits
    bases = peer_pointers(peers, offset, tl.float32, W)
    ok = tl.cast(1, tl.int32)
    if SYNC:
        ok, opened = enter(control, mine, page, what, shape, tokens, mark, patience, rank, W, LANES, SYNC == 2)
    RULE: tl.constexpr = (LIMIT, CASCADE, G, T, S)
    lane = tl.arange(0, BLOCK)
    per_tile: tl.constexpr = BLOCK // VEC
    for tile in tl.range(tl.program_id(0), tl.cdiv(owned, per_tile), tl.num_programs(0)):
        done = tl.cast(tile, tl.int64) * per_tile
        limit = tile_limit(owned - done, 1, VEC, BLOCK)
        args = (bases, peers, offset, (first + done) * VEC, tile_limit(owned - done, ok, VEC, BLOCK))
        tiles = load_all(load_peer, args, lane, W, VEC, ROTATE)
        sum_and_store(load_peer, args, tiles, out, done * VEC, lane, limit, ok, W, VEC, VEC, BLOCK, PART, RULE)
    if SYNC:
        leave(opened, mine, page, ok, patience, rank, W, LANES, SYNC == 2)


def tile_for(elements: int, addends: int) -> Tile:
    """The launch for a result of so many elements, measured on an H200 (bench/combine.py --tune).

    Two blocks a multiprocessor, which all run at once, take 72 us for 4096 x 2048 where 4 warps took 83; in between 512
    elements a block are quicker. Looped loads of more than 16 addends would spill at 1,024.
    """
    if addends > UNROLL.value:
        return Tile(512, 4, 8, 128)
    if 1 << 15 < elements <= 1 << 20:
        return Tile(512, 4, 8, 128)
    return Tile(1024, 8, 2, 128)  # so many registers that two blocks fit


def reduce(
    call: Reduce, parameters: tuple[int, ...] = (), *, tile: Tile | None = None, cascade: bool | None = None
) -> Tensor:
    """This rank's slice under the contract `exact`, or `window(*parameters)` with three of them. Returns call.out.

    Every rank's buffer holds fp32 [sum(splits), hidden] at peers[r] + offset. Asynchronous on the current stream.
    cascade: sum in fp32 pairs; None: where the GPU has few fp64 units. Neither it nor the tile changes a bit.
    """
    tile = tile or tile_for(call.capacity, call.world_size)
    vector = call.vector
    g, t, s = parameters or (0, 0, 0)
    pairs = few_fp64_units(call.out.device) if cascade is None else cascade
    _exact_kernel[grid(cdiv(call.capacity, tile.block), tile, call.out.device, call.sync)](
        call.peers, bits_of(call.out), call.splits, call.offset, call.start // vector, call.count // vector,
        call.hidden // vector, call.out.shape[0], call.rank, W=call.world_size, ROTATE=call.rotate,
        ON_DEVICE=call.splits is not None, LIMIT=spread_limit(call.world_size), CASCADE=pairs, G=g, T=t, S=s,
        VEC=vector, PART=tile.part, BLOCK=tile.block, **tile.options, **barriers(call.sync, tile.warps),
    )  # fmt: skip
    return call.out
