"""The dispatch that pushes: `multimem.st` writes this rank's rows into every rank's buffer at once.

One store of 16 aligned bytes to a multicast address reaches all ranks; rows of other sizes have their ends stored to
each rank's own address. Nothing is computed, so there is no contract to certify; the word `trusted` turns the switch
off here as well. `gather.py` is the dispatch that pulls, and needs no multicast: `Communicator.dispatch` runs that one
alone. This one is not wired in; docs/design.md, The switch, says why.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.kernels.addends import element_at, peer_pointer, rows_before, tile_limit
from bicomm.kernels.barrier import enter, leave
from bicomm.kernels.call import RUNTIME_INTEGERS, VECTOR_BYTES, Sync, Tile, aligned_elements, barriers, cdiv, grid
from bicomm.kernels.multimem import proxy_fence

_WORDS = {2: torch.int16, 4: torch.int32}


@dataclasses.dataclass(frozen=True)
class Broadcast:
    """One rank's part of a dispatch that pushes: write its rows into every rank's buffer, after those of lower ranks.

    peers, rank, sync   as in `Reduce`.
    multicast  the address through which all ranks' buffers are reached at once, a multiple of 16.
    offset     bytes from these addresses to row 0 of the result; the same on every rank; a multiple of the itemsize.
    rows       [t, hidden], this rank's rows, contiguous; a row has an even number of bytes.
    splits     int64 [W] on the device: rows of each rank, of which this one has at most t.
    capacity   rows of the result; rows that do not fit are not written.
    trusted    int32 [1] on the device; while it is 0 the rows go to each rank's own address.
    """

    peers: Tensor
    multicast: int
    offset: int
    rank: int
    rows: Tensor
    splits: Tensor
    capacity: int
    trusted: Tensor
    sync: Sync | None = None


@triton.jit
def switch_store(address, words, limit, BLOCK: tl.constexpr):
    """Store int32 [BLOCK] at a multicast address (int64, 16-byte aligned), up to element `limit`, a multiple of 4."""
    vector = tl.arange(0, BLOCK // 4)
    even, odd = tl.split(tl.reshape(words, [BLOCK // 4, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        setp.ne.s32 p, $6, 0;
        @p multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5};
        mov.b32 $0, 0;
        }
        """,
        "=r,l,r,r,r,r,r",
        [address + vector.to(tl.int64) * 16, a, b, c, d, (vector * 4 < limit).to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def as_int32(words, BLOCK: tl.constexpr):
    """int32 words of int32, or of pairs of int16."""
    if words.dtype == tl.int16:
        low, high = tl.split(tl.reshape(words, [BLOCK // 2, 2]))
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        return words


@triton.jit
def store_to_peers(peers, offset, at, words, lane, limit, like, W: tl.constexpr, VEC: tl.constexpr):
    """Software twin of the multicast store: the words to every rank's own address."""
    for r in tl.range(0, W):
        base = peer_pointer(peers, offset, r, like.dtype.element_ty)
        tl.store(element_at(base, at, VEC) + lane, words, mask=lane < limit)


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def _broadcast_kernel(
    peers, source, splits, trusted, multicast: tl.int64, offset: tl.int64, hidden: tl.int64, rows: tl.int64,
    capacity: tl.int64, rank: tl.int64, control, mine, page, what: tl.int64, shape: tl.int64, tokens: tl.int64,
    mark: tl.int64, patience: tl.int64, SYNC: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr,
    HARDWARE: tl.constexpr, EDGES: tl.constexpr, SIZE: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    trust = tl.load(trusted)
    before = rows_before(splits, rank, W)
    own = tl.minimum(tl.maximum(tl.load(splits + rank), 0), rows)
    ok = tl.cast(1, tl.int32)
    if SYNC:
        ok, opened = enter(control, mine, page, what, shape, tokens, mark, patience, rank, W, LANES, SYNC == 2)
    own = tl.where(ok != 0, tl.maximum(tl.minimum(own, capacity - before), 0), 0)  # after a fault nobody writes

    # In words of SIZE bytes; see _reduce_kernel.
    PER: tl.constexpr = 16 // SIZE
    first = before * hidden
    owned = own * hidden
    head = tl.cast(0, tl.int64)
    if EDGES:
        head = tl.minimum((PER - (first + offset // SIZE) % PER) % PER, owned)
    vectors = (owned - head) // PER
    lane = tl.arange(0, BLOCK)
    for tile in tl.range(tl.program_id(0), tl.cdiv(vectors, BLOCK // PER), tl.num_programs(0)):
        done = head + tl.cast(tile, tl.int64) * BLOCK
        limit = tile_limit(vectors - tl.cast(tile, tl.int64) * (BLOCK // PER), 1, PER, BLOCK)
        words = tl.load(element_at(source, done, VEC) + lane, mask=lane < limit, other=0)
        if HARDWARE:
            if trust != 0:
                address = multicast + offset + (first + done) * SIZE
                switch_store(address, as_int32(words, BLOCK), limit // (4 // SIZE), BLOCK // (4 // SIZE))
            else:
                store_to_peers(peers, offset, first + done, words, lane, limit, source, W, PER)
        else:
            store_to_peers(peers, offset, first + done, words, lane, limit, source, W, PER)
    if EDGES:  # noqa: SIM102 (decided at compile time)
        if tl.program_id(0) == 0:
            few = tl.arange(0, PER)
            for edge in tl.range(0, 2):
                at = tl.where(edge == 0, 0, head + vectors * PER)
                left = tile_limit(tl.where(edge == 0, head, owned - head - vectors * PER), 1, 1, PER)
                words = tl.load(source + at + few, mask=few < left, other=0)
                store_to_peers(peers, offset, first + at, words, few, left, source, W, 1)
    if HARDWARE:
        ok = proxy_fence(ok)  # the peers read through their own addresses
    if SYNC:
        leave(opened, mine, page, ok, patience, rank, W, LANES, SYNC == 2)


def broadcast(call: Broadcast, *, hardware: bool = True, tile: Tile | None = None) -> None:
    """Write this rank's rows where every rank finds them in its buffer at call.offset. Asynchronous.

    After all ranks' kernels, each buffer holds sum(splits) rows, rank 0's first. hardware=False leaves the instruction
    out. Raises ValueError for rows of an odd number of bytes: those are pulled (gather.py).
    """
    row_bytes = call.rows.shape[1] * call.rows.element_size()
    unit = math.gcd(VECTOR_BYTES, call.offset, row_bytes)
    if unit < 2:
        raise ValueError(
            f"a multicast dispatch needs rows and an offset of whole 2-byte words, got {row_bytes} bytes a row"
        )
    nbytes = call.rows.numel() * call.rows.element_size()
    tile = tile or Tile(1024, 4, 8)
    size = min(math.gcd(unit, call.rows.data_ptr()), 4)
    edges = unit < VECTOR_BYTES
    source = call.rows.view(-1).view(_WORDS[size])
    _broadcast_kernel[grid(cdiv(nbytes // size, tile.block), tile, call.rows.device, call.sync)](
        call.peers, source, call.splits, call.trusted, call.multicast, call.offset, row_bytes // size,
        call.rows.shape[0], call.capacity, call.rank, W=call.peers.numel(), HARDWARE=hardware, EDGES=edges, SIZE=size,
        VEC=1 if edges else aligned_elements(source), BLOCK=tile.block, **tile.options,
        **barriers(call.sync, tile.warps),
    )  # fmt: skip
