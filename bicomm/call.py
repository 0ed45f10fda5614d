"""What a kernel launch is told, and the decisions every launcher makes alike: vector width, tile, grid.

Nothing here decides a bit: results are the same for every tile, grid and vector width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor

VECTOR_BYTES = 16  # the widest load and store of one thread


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a launch is cut: elements a tile, warps a block, and the most blocks for each multiprocessor."""

    block: int
    warps: int
    blocks_per_sm: int


@dataclasses.dataclass(frozen=True)
class Sync:
    """What the barriers at both ends of a kernel need (see barrier.py).

    control       int64 [W] on the device: the address of every rank's control words.
    mine          int64 on the device: this rank's control words.
    page          int64, in pinned host memory: where kernels tell the host what went wrong.
    what, shape, tokens, mark   this rank's header and its check sum: see signature.py.
    patience      nanoseconds to wait for the other ranks.
    blocks_limit  the most blocks of a launch, where the grids of several ranks must fit one GPU together.
    soft          for the interpreter, which has no assembly and runs one rank after the other.
    """

    control: Tensor
    mine: Tensor
    page: Tensor
    what: int
    shape: int
    tokens: int
    mark: int
    patience: int
    blocks_limit: int | None = None
    soft: bool = False


@dataclasses.dataclass(frozen=True)
class Reduce:
    """One rank's part of a combine: sum its slice of every peer's fp32 buffer.

    peers    int64 [W], on the device: the address of each rank's buffer, in rank order, a multiple of 16.
    offset   bytes from those addresses to row 0 of the data; the same on every rank; a multiple of 4.
    rank     this rank.
    hidden   elements a row.
    out      [rows, hidden], fp32 or bf16, contiguous: the result, and the capacity where `splits` is given.
    start    elements of the buffers before this rank's slice, and
    count    elements in it; both are ignored where
    splits   int64 [W] on the device says how many rows each rank owns: then the slice starts after those of the lower
             ranks, and has min(splits[rank], rows of out) rows. Rows of `out` beyond them are not written.
    rotate   which peer is read first, so that ranks do not all read one link; it has no influence on the result.
    sync     None: no barriers, the buffers are ready and stay as they are.
    """

    peers: Tensor
    offset: int
    rank: int
    hidden: int
    out: Tensor
    start: int = 0
    count: int = 0
    splits: Tensor | None = None
    rotate: int = 0
    sync: Sync | None = None

    @property
    def world_size(self) -> int:
        return self.peers.numel()

    @property
    def vector(self) -> int:
        """fp32 elements that one load may take: 4, 2 or 1, as the alignment of every slice allows."""
        rows = (self.start, self.count) if self.splits is None else (self.hidden,)
        return min(vector_width(4, self.offset, *(4 * n for n in rows)), aligned_elements(self.out))

    @property
    def capacity(self) -> int:
        """Elements of the result, at most."""
        return self.count if self.splits is None else self.out.numel()


def vector_width(itemsize: int, *byte_counts: int) -> int:
    """Elements of a vector (16 bytes at most) that divides every one of these byte counts; at least 1."""
    return max(math.gcd(VECTOR_BYTES, *byte_counts) // itemsize, 1)


def aligned_elements(x: Tensor) -> int:
    """Elements of the widest vector that x's first address is aligned to."""
    return vector_width(x.element_size(), x.data_ptr())


def bits_of(x: Tensor) -> Tensor:
    """bf16 as int16 (kernels see bf16 as bits: see arithmetic.py); any other tensor as it is."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 for the interpreter on a CPU, which runs block after block."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def grid(tiles: int, tile: Tile, device: torch.device, sync: Sync | None = None) -> tuple[int]:
    """Blocks of a launch in which each block takes every so-manieth tile; one even without tiles, for the barrier."""
    most = multiprocessors(device) * tile.blocks_per_sm
    if sync is not None and sync.blocks_limit is not None:
        most = min(most, sync.blocks_limit)
    return (max(1, min(tiles, most)),)


def barriers(sync: Sync | None, warps: int) -> dict[str, Any]:
    """The arguments of a kernel that opens with `barrier.enter` and closes with `barrier.leave`; SYNC 0 leaves both out."""
    names = ("control", "mine", "page", "what", "shape", "tokens", "mark", "patience")
    if sync is None:
        return {**{name: None if name in ("control", "mine", "page") else 0 for name in names}, "SYNC": 0, "LANES": 1}
    return {**{name: getattr(sync, name) for name in names}, "SYNC": 2 if sync.soft else 1, "LANES": 32 * warps}


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
