"""The way of an operand into symmetric memory: a copy that a rank which has given up does not make any more.

A rank that gave up waiting may be waited for by nobody, but a slower rank may still read its last operand. The copy
looks at the LOST word first, as every kernel does, and leaves the operand alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.kernels.addends import element_at, tile_limit
from bicomm.kernels.barrier import EPOCH, LOST
from bicomm.kernels.call import Tile, aligned_elements, cdiv, grid

_WORD = 4  # bytes


@triton.jit(do_not_specialize=["units"])
def _copy_in_kernel(source, target, mine, units: tl.int64, VEC: tl.constexpr, BLOCK: tl.constexpr):
    going = (tl.load(mine + LOST) < tl.load(mine + EPOCH)).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    per_tile: tl.constexpr = BLOCK // VEC
    for tile in tl.range(tl.program_id(0), tl.cdiv(units, per_tile), tl.num_programs(0)):
        done = tl.cast(tile, tl.int64) * per_tile
        limit = tile_limit(units - done, going, VEC, BLOCK)
        words = tl.load(element_at(source, done * VEC, VEC) + lane, mask=lane < limit)
        tl.store(element_at(target, done * VEC, VEC) + lane, words, mask=lane < limit)


def tile_for(nbytes: int) -> Tile:
    """The launch for so many bytes; a block is in words of 4 bytes."""
    return Tile(512, 4, 8) if nbytes <= 1 << 22 else Tile(2048, 8, 8)


def copy_in(x: Tensor, place: Tensor, mine: Tensor) -> None:
    """Copy x into its place in symmetric memory: a tensor of its shape and type, 16-byte aligned, unless given up.

    mine: this rank's control words. Asynchronous on the current stream. An x that is not contiguous is laid out first.
    """
    nbytes = x.numel() * x.element_size()
    if nbytes == 0:
        return
    if nbytes % _WORD or x.data_ptr() % _WORD or not x.is_contiguous():
        x = x.contiguous()
        if nbytes % _WORD or x.data_ptr() % _WORD:  # an odd number of 2-byte or 1-byte elements
            place.copy_(x)
            return
    source, target = x.view(-1).view(torch.int32), place.view(-1).view(torch.int32)
    words = source.numel()
    vector = min(aligned_elements(source), 4 if words % 4 == 0 else 1)
    tile = tile_for(nbytes)
    _copy_in_kernel[grid(cdiv(words, tile.block), tile, x.device)](
        source, target, mine, words // vector, VEC=vector, BLOCK=tile.block, num_warps=tile.warps,
        enable_fp_fusion=False,
    )  # fmt: skip
