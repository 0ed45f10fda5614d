"""The dispatch: every rank copies every peer's rows, whatever their type, as words of 1, 2 or 4 bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.kernels.addends import element_at, peer_pointer, tile_limit
from bicomm.kernels.barrier import enter, leave
from bicomm.kernels.call import RUNTIME_INTEGERS, Gather, Tile, barriers, cdiv, grid

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def _no_result(itemsize: int, word: int) -> int:
    """A word of what stands for no result after a fault: NaN in fp32, bf16, fp16 and the fp8 types."""
    return (0x7F7F7F7F if itemsize == 1 else 0x7FC07FC0) & ((1 << 8 * word) - 1)


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def _gather_kernel(
    peers, out, splits, offset: tl.int64, units: tl.int64, capacity: tl.int64, rank: tl.int64, control, mine, page,
    what: tl.int64, shape: tl.int64, tokens: tl.int64, mark: tl.int64, patience: tl.int64, SYNC: tl.constexpr,
    LANES: tl.constexpr, W: tl.constexpr, ROTATE: tl.constexpr, VEC: tl.constexpr, FILL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    ok = tl.cast(1, tl.int32)
    if SYNC:
        ok, opened = enter(control, mine, page, what, shape, tokens, mark, patience, rank, W, LANES, SYNC == 2)
    lane = tl.arange(0, BLOCK)
    per_tile: tl.constexpr = BLOCK // VEC
    blocks = tl.num_programs(0)
    turn = tl.program_id(0)  # the tile of the coming rank that is this block's first: blocks take turns
    first = tl.cast(0, tl.int64)
    for i in tl.range(0, ROTATE):
        first += tl.maximum(tl.load(splits + i), 0)
    for i in tl.range(0, W):
        r = tl.cast(i, tl.int64) + ROTATE
        if r == W:
            first = tl.cast(0, tl.int64)
        r = tl.where(r >= W, r - W, r)
        rows = tl.maximum(tl.load(splits + r), 0)
        owned = tl.minimum(rows, tl.maximum(capacity - first, 0)) * units
        base = peer_pointer(peers, offset, r, out.dtype.element_ty)
        tiles = tl.cdiv(owned, per_tile).to(tl.int32)
        for tile in tl.range(turn, tiles, blocks):
            done = tl.cast(tile, tl.int64) * per_tile
            limit = tile_limit(owned - done, 1, VEC, BLOCK)
            source = element_at(base, done * VEC, VEC) + lane
            words = tl.load(source, mask=lane < tile_limit(owned - done, ok, VEC, BLOCK), other=FILL)
            target = element_at(out, (first * units + done) * VEC, VEC) + lane
            tl.store(target, words, mask=lane < limit)
        turn = (turn - tiles) % blocks
        turn = tl.where(turn < 0, turn + blocks, turn)
        first += rows
    if SYNC:
        leave(opened, mine, page, ok, patience, rank, W, LANES, SYNC == 2)


def tile_for(nbytes: int) -> Tile:
    """The launch for a result of so many bytes; a block is in words of 4 bytes."""
    return Tile(512, 4, 16) if nbytes <= 1 << 22 else Tile(2048, 8, 8)


def gather(call: Gather, *, tile: Tile | None = None) -> Tensor:
    """All ranks' rows, rank 0's first, in call.out. Returns call.out. Asynchronous on the current stream.

    Rows that do not fit are not copied; rows of `out` beyond sum(splits) are not written. Splits on the host are copied
    to the device the first time they come: under capture, give a device tensor or call once before.
    """
    nbytes = call.out.numel() * call.out.element_size()
    tile = tile or tile_for(nbytes)
    word = min(call.unit, 4)
    vector = call.unit // word
    flat = call.out.view(-1).view(_WORDS[word])
    _gather_kernel[grid(cdiv(nbytes // word, tile.block) + call.peers.numel(), tile, call.out.device, call.sync)](
        call.peers, flat, call.device_splits, call.offset, call.row_bytes // call.unit, call.out.shape[0], call.rank,
        W=call.peers.numel(), ROTATE=call.rotate, VEC=vector, FILL=_no_result(call.out.element_size(), word),
        BLOCK=tile.block, **tile.options, **barriers(call.sync, tile.warps),
    )  # fmt: skip
    return call.out
