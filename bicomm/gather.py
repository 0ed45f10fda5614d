"""The dispatch: every rank copies every peer's rows, whatever their type, as words of 1, 2 or 4 bytes."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.addends import UNROLL, element_at, peer_pointer, tile_limit
from bicomm.barrier import enter, leave
from bicomm.call import RUNTIME_INTEGERS, Gather, Tile, barriers, cdiv, grid

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def _no_result(itemsize: int, word: int) -> int:
    """A word of what stands for no result after a fault: NaN in fp32, bf16, fp16 and the fp8 types."""
    return (0x7F7F7F7F if itemsize == 1 else 0x7FC07FC0) & ((1 << 8 * word) - 1)


@triton.jit
def copy_tile(base, out, into, tile, owned, ok, lane, VEC: tl.constexpr, FILL: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a tile of the rows at base to out + into, both the starts of a rank's rows; owned: how long these are."""
    done = tl.cast(tile, tl.int64) * (BLOCK // VEC)
    source = element_at(base, done * VEC, VEC) + lane
    words = tl.load(source, mask=lane < tile_limit(owned - done, ok, VEC, BLOCK), other=FILL)
    target = element_at(out, (into + done) * VEC, VEC) + lane
    tl.store(target, words, mask=lane < tile_limit(owned - done, 1, VEC, BLOCK))


@triton.jit
def fitting(splits, r, first, units, capacity):
    """(rows of rank r, how much of them lies before the capacity, in units), where `first` rows come before them."""
    rows = tl.maximum(tl.load(splits + r), 0)
    return rows, tl.minimum(rows, tl.maximum(capacity - first, 0)) * units


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def _gather_kernel(
    peers, out, splits, offset: tl.int64, units: tl.int64, capacity: tl.int64, rank: tl.int64, control, mine, page,
    what: tl.int64, shape: tl.int64, tokens: tl.int64, mark: tl.int64, patience: tl.int64, SYNC: tl.constexpr,
    LANES: tl.constexpr, W: tl.constexpr, ROTATE: tl.constexpr, VEC: tl.constexpr, FILL: tl.constexpr,
    PLANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Planned: where each rank's rows come from, begin and end, and their tiles, all loaded together while the barrier
    # waits. That takes registers, so long copies walk through the ranks instead.
    per_tile: tl.constexpr = BLOCK // VEC
    first = tl.cast(0, tl.int64)
    plan = ()
    if PLANNED:
        for r in tl.static_range(W):
            rows, owned = fitting(splits, r, first, units, capacity)
            base = tl.load(peers + r) + offset
            plan = plan + ((base, first * units, owned, tl.cdiv(owned, per_tile).to(tl.int32)),)  # noqa: RUF005
            first += rows
    ok = tl.cast(1, tl.int32)
    if SYNC:
        ok, opened = enter(control, mine, page, what, shape, tokens, mark, patience, rank, W, LANES, SYNC == 2)
    lane = tl.arange(0, BLOCK)
    blocks = tl.num_programs(0)
    if PLANNED:
        total = tl.cast(0, tl.int32)
        for i in tl.static_range(W):
            total += plan[i][3]
        for turn in tl.range(tl.program_id(0), total, blocks):
            base, into, owned, _tiles = plan[ROTATE]
            tile = tl.cast(turn, tl.int32)
            passed = plan[ROTATE][3]
            for i in tl.static_range(1, W):
                later = turn >= passed
                base = tl.where(later, plan[(i + ROTATE) % W][0], base)
                into = tl.where(later, plan[(i + ROTATE) % W][1], into)
                owned = tl.where(later, plan[(i + ROTATE) % W][2], owned)
                tile = tl.where(later, turn - passed, tile)
                passed += plan[(i + ROTATE) % W][3]
            copy_tile(base.to(out.dtype), out, into, tile, owned, ok, lane, VEC, FILL, BLOCK)
    else:
        turn = tl.program_id(0)  # the tile of the coming rank that is this block's first: blocks take turns
        for i in tl.range(0, ROTATE):
            first += tl.maximum(tl.load(splits + i), 0)
        for i in tl.range(0, W):
            r = tl.cast(i, tl.int64) + ROTATE
            if r == W:
                first = tl.cast(0, tl.int64)
            r = tl.where(r >= W, r - W, r)
            rows, owned = fitting(splits, r, first, units, capacity)
            base = peer_pointer(peers, offset, r, out.dtype.element_ty)
            tiles = tl.cdiv(owned, per_tile).to(tl.int32)
            for tile in tl.range(turn, tiles, blocks):
                copy_tile(base, out, first * units, tile, owned, ok, lane, VEC, FILL, BLOCK)
            turn = (turn - tiles) % blocks
            turn = tl.where(turn < 0, turn + blocks, turn)
            first += rows
    if SYNC:
        leave(opened, mine, page, ok, patience, rank, W, LANES, SYNC == 2)


SMALL = 1 << 22  # bytes of a result that is copied by plan


def tile_for(nbytes: int) -> Tile:
    """The launch for a result of so many bytes; a block is in words of 4 bytes."""
    return Tile(512, 4, 16) if nbytes <= SMALL else Tile(2048, 8, 8)


def gather(call: Gather, *, tile: Tile | None = None, planned: bool | None = None) -> Tensor:
    """All ranks' rows, rank 0's first, in call.out. Returns call.out. Asynchronous on the current stream.

    Rows that do not fit are not copied; rows of `out` beyond sum(splits) are not written. Splits on the host are copied
    to the device the first time they come: under capture, give a device tensor or call once before. planned: which of
    the kernel's two ways is taken; None: by size.
    """
    nbytes = call.out.numel() * call.out.element_size()
    tile = tile or tile_for(nbytes)
    few = call.peers.numel() <= UNROLL.value
    word = min(call.unit, 4)
    vector = call.unit // word
    flat = call.out.view(-1).view(_WORDS[word])
    _gather_kernel[grid(cdiv(nbytes // word, tile.block) + call.peers.numel(), tile, call.out.device, call.sync)](
        call.peers, flat, call.device_splits, call.offset, call.row_bytes // call.unit, call.out.shape[0], call.rank,
        W=call.peers.numel(), ROTATE=call.rotate, VEC=vector, FILL=_no_result(call.out.element_size(), word),
        PLANNED=few and (nbytes <= SMALL if planned is None else planned), BLOCK=tile.block, **tile.options,
        **barriers(call.sync, tile.warps),
    )  # fmt: skip
    return call.out
