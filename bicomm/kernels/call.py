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

from bicomm.errors import CaptureError

VECTOR_BYTES = 16  # the widest load and store of one thread

# Integer arguments of kernels that may take any value: a launch must never wait for another compilation because one of
# them is 1 or a multiple of 16. (Their alignment reaches the compiler as the constexpr VEC.)
RUNTIME_INTEGERS = (
    "offset", "start", "units", "hidden", "rows", "rank", "capacity", "columns", "most", "multicast",
    "what", "shape", "tokens", "mark", "patience",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a launch is cut: elements a tile, warps a block, and the most blocks for each multiprocessor.

    registers: what the assembler may use for a thread. Left alone, it aims at some occupancy and spills a few words in
    the path that goes slice by slice.
    """

    block: int
    warps: int
    blocks_per_sm: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Launch options. No kernel may fuse a product with a sum: that rounds once where contracts round twice."""
        return {"num_warps": self.warps, "maxnreg": self.registers, "enable_fp_fusion": False}


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


@dataclasses.dataclass(frozen=True)
class Pull:
    """One rank's part of an `owner` combine: for each of its tokens, sum the rows that its slots name.

    peers         int64 [W], on the device: the address of each rank's buffer, in rank order, a multiple of 16.
    offset        bytes from those addresses to row 0 of the rows; the same on every rank; a multiple of the itemsize.
    rank          this rank.
    dtype         of the rows, fp32 or bf16; a row has as many elements as one of `out`.
    out           [t, H], fp32 or bf16, contiguous: the result.
    row_of_slot   [t, K] int32 or int64, contiguous: a row of the rank that has it. See `owner.dense_rows`.
    rank_of_slot  the same: that rank. A slot whose rank or row is negative is skipped: neither read nor added.
    weights       [t, K] fp32, contiguous, or None: addends are weight * row, rounded to `product_dtype`, fp32 or bf16
                  (through fp32).
    count         int32 or int64 [1] on the device, or None: tokens that are there; others are not read or written.
    rows          rows that every rank's buffer holds, if known. A token whose slot names a row beyond, or a rank that
                  does not exist, gets NaN.
    sync          None: no barriers, the buffers are ready and stay as they are.
    """

    peers: Tensor
    offset: int
    rank: int
    dtype: torch.dtype
    out: Tensor
    row_of_slot: Tensor
    rank_of_slot: Tensor
    weights: Tensor | None = None
    product_dtype: torch.dtype = torch.float32
    count: Tensor | None = None
    rows: int | None = None
    sync: Sync | None = None

    @property
    def world_size(self) -> int:
        return self.peers.numel()

    @property
    def vector(self) -> int:
        """Elements of a row that one load may take."""
        wide = vector_width(self.dtype.itemsize, self.offset, self.out.shape[1] * self.dtype.itemsize)
        target = aligned_elements(self.out)
        return wide if target * self.out.element_size() == VECTOR_BYTES else min(wide, target)


@dataclasses.dataclass(frozen=True)
class Gather:
    """One rank's part of a dispatch: copy every peer's rows, those of rank 0 first.

    peers, offset, rank, rotate, sync   as in `Reduce`; offset is a multiple of the itemsize.
    out      [rows, hidden] of any type, contiguous: the result, and its capacity; rows beyond sum(splits) stay.
    splits   rows of each rank: int64 [W] on the device, or W integers.
    """

    peers: Tensor
    offset: int
    rank: int
    out: Tensor
    splits: Tensor | tuple[int, ...]
    rotate: int = 0
    sync: Sync | None = None

    @property
    def row_bytes(self) -> int:
        return self.out.shape[1] * self.out.element_size()

    @property
    def unit(self) -> int:
        """Bytes that every row, address and offset is a multiple of: 16, 8, 4, 2 or 1."""
        return math.gcd(VECTOR_BYTES, self.offset, self.row_bytes, self.out.data_ptr())

    @property
    def device_splits(self) -> Tensor:
        """The splits as int64 [W] on the device."""
        return self.splits if isinstance(self.splits, Tensor) else _on_device(self.splits, self.out.device)


_MOST_TABLES = 256
_tables: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
_captured: dict[int, Tensor] = {}  # by address: captured graphs read these for ever


def _on_device(splits: tuple[int, ...], device: torch.device) -> Tensor:
    """A small tensor on the device, kept: equal splits come again and again, and a copy to the GPU costs 10 us."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    table = _tables.get((splits, device))
    if table is None:
        if capturing:
            raise CaptureError(
                f"splits {list(splits)} are on the host, and a CUDA graph cannot hold their copy to the GPU: make this "
                f"call once before the capture, or pass splits as an int64 tensor on the GPU"
            )
        if len(_tables) >= _MOST_TABLES:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # kernels on any stream may still read them
            _tables.clear()
        table = torch.tensor(splits, dtype=torch.int64, device="cpu").to(device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams will read it
        _tables[splits, device] = table
    if capturing:
        _captured[table.data_ptr()] = table
    return table


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
    """What a kernel passes to `barrier.enter` at its start and `barrier.leave` at its end; SYNC 0 leaves both out."""
    names = ("control", "mine", "page", "what", "shape", "tokens", "mark", "patience")
    if sync is None:
        return {**{name: None if name in ("control", "mine", "page") else 0 for name in names}, "SYNC": 0, "LANES": 1}
    return {**{name: getattr(sync, name) for name in names}, "SYNC": 2 if sync.soft else 1, "LANES": 32 * warps}


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
