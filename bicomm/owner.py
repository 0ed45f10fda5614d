"""The pull kernel of `owner`: a token's owner reads the token's expert rows where they lie, and sums them exactly.

Each tile is a piece of one token. Which rows it reads is looked up on the device, so a captured graph serves any
routing; the sum is that of exact.py, so neither the number of ranks, nor the placement of experts, nor the order of
slots changes a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.addends import UNROLL, load_all, load_tile, tile_limit
from bicomm.arithmetic import round_through_bf16
from bicomm.barrier import enter, leave
from bicomm.call import RUNTIME_INTEGERS, Pull, Tile, barriers, bits_of, cdiv, grid
from bicomm.sums import spread_limit, sum_and_store

NO_LIMIT = 1 << 62


@triton.jit
def find_row(slot, at, table):
    """(address of the tile at `at` of a slot's row, or 0 for nothing to read; 1 if the slot names what is not there).

    at: in elements.
    """
    peers, offset, ranks, rows, hidden, most, W, size = table
    rank = tl.load(ranks + slot).to(tl.int64)
    row = tl.load(rows + slot).to(tl.int64)
    routed = (rank >= 0) & (row >= 0)
    used = routed & (rank < W) & (row < most)
    address = tl.load(peers + tl.where(used, rank, 0)) + offset + (row * hidden + at) * size
    return tl.where(used, address, 0), (routed & (used == 0)).to(tl.int32)


@triton.jit
def find_rows(first, at, table, K: tl.constexpr):
    """The addresses of all K tiles, none where K is larger than UNROLL, and how many slots name what is not there."""
    held = ()
    unknown = tl.cast(0, tl.int32)
    if K <= UNROLL:
        for k in tl.static_range(K):
            address, wrong = find_row(first + k, at, table)
            held = held + (address,)  # type: ignore[assignment]  # noqa: RUF005 (Triton knows no stars)
            unknown += wrong
    else:
        for k in tl.range(0, K):
            _address, wrong = find_row(first + k, at, table)
            unknown += wrong
    return held, unknown


@triton.jit
def load_row(args, k, lane, HELD: tl.constexpr, VEC: tl.constexpr):
    """Loader: the tile of slot k's row; zeros where the slot is not routed."""
    held, first, at, limit, table, _weights, like = args
    if HELD:
        address = held[k]
    else:
        address, _wrong = find_row(first + k, at, table)
    pointer = tl.multiple_of(address.to(like.dtype), VEC * (like.dtype.element_ty.primitive_bitwidth // 8))
    return load_tile(pointer, lane, limit * (address != 0).to(tl.int32))


@triton.jit
def load_product(args, k, lane, HELD: tl.constexpr, VEC: tl.constexpr):
    """Loader: weight * row, rounded to fp32; zeros where the slot is not routed, whatever its weight."""
    held, first, at, limit, table, weights, like = args
    if HELD:
        address = held[k]
    else:
        address, _wrong = find_row(first + k, at, table)
    pointer = tl.multiple_of(address.to(like.dtype), VEC * (like.dtype.element_ty.primitive_bitwidth // 8))
    weight = tl.where(address != 0, tl.load(weights + (first + k)), 0.0)
    return load_tile(pointer, lane, limit * (address != 0).to(tl.int32)) * weight


@triton.jit
def load_product_bf16(args, k, lane, HELD: tl.constexpr, VEC: tl.constexpr):
    """Loader: weight * row, rounded to fp32 and then to bf16."""
    return round_through_bf16(load_product(args, k, lane, HELD, VEC))


@triton.jit
def load_addends(args, lane, K: tl.constexpr, VEC: tl.constexpr, WEIGHTED: tl.constexpr):
    """All K tiles: rows (WEIGHTED 0), products in fp32 (1) or products in bf16 (2)."""
    if WEIGHTED == 0:
        return load_all(load_row, args, lane, K, VEC, 0)
    elif WEIGHTED == 1:
        return load_all(load_product, args, lane, K, VEC, 0)
    else:
        return load_all(load_product_bf16, args, lane, K, VEC, 0)


@triton.jit
def add_addends(
    args, tiles, out, into, lane, limit, ok, K: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr, RULE: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Write the exact sum of the tiles that `load_addends` gave."""
    if WEIGHTED == 0:
        sum_and_store(load_row, args, tiles, out, into, lane, limit, ok, K, VEC, VEC, BLOCK, PART, RULE)
    elif WEIGHTED == 1:
        sum_and_store(load_product, args, tiles, out, into, lane, limit, ok, K, VEC, VEC, BLOCK, PART, RULE)
    else:
        sum_and_store(load_product_bf16, args, tiles, out, into, lane, limit, ok, K, VEC, VEC, BLOCK, PART, RULE)


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def _owner_kernel(
    peers, out, rows, ranks, weights, count, offset: tl.int64, units: tl.int64, capacity: tl.int64, columns: tl.int64,
    most: tl.int64, rank: tl.int64, control, mine, page, what: tl.int64, shape: tl.int64, tokens: tl.int64,
    mark: tl.int64, patience: tl.int64, SYNC: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    DTYPE: tl.constexpr, WEIGHTED: tl.constexpr, LIMIT: tl.constexpr, CASCADE: tl.constexpr,
    COUNTED: tl.constexpr, VEC: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ok = tl.cast(1, tl.int32)
    if SYNC:
        ok, opened = enter(control, mine, page, what, shape, tokens, mark, patience, rank, W, LANES, SYNC == 2)
    there = tl.cast(capacity, tl.int64)
    if COUNTED:
        there = tl.minimum(tl.maximum(tl.load(count).to(tl.int64), 0), there)
    table = (peers, offset, ranks, rows, units * VEC, most, W, DTYPE.primitive_bitwidth // 8)
    like = tl.cast(0, tl.int64).to(tl.pointer_type(DTYPE))
    RULE: tl.constexpr = (LIMIT, CASCADE, 0, 0, 0)
    lane = tl.arange(0, BLOCK)
    blocks, across = tl.num_programs(0), tl.cast(columns, tl.int32)
    token = (tl.program_id(0) // across).to(tl.int64)  # a token has `columns` tiles; no division in the loop
    column = tl.program_id(0) % across
    for _tile in tl.range(tl.program_id(0), there * columns, blocks):
        first, at = token * K, column.to(tl.int64) * BLOCK
        left = units - at // VEC
        held, unknown = find_rows(first, at, table, K)
        args = (held, first, at, tile_limit(left, ok, VEC, BLOCK), table, weights, like)
        tiles = load_addends(args, lane, K, VEC, WEIGHTED)
        good = tl.where(unknown == 0, ok, 0)
        into, limit = token * (units * VEC) + at, tile_limit(left, 1, VEC, BLOCK)
        add_addends(args, tiles, out, into, lane, limit, good, K, VEC, BLOCK, PART, RULE, WEIGHTED)
        column += blocks % across
        token += blocks // across + (column >= across).to(tl.int64)
        column -= tl.where(column >= across, across, 0)
    if SYNC:
        leave(opened, mine, page, ok, patience, rank, W, LANES, SYNC == 2)


def dense_rows(tokens: int, slots: int, first: int | Tensor, device: torch.device) -> Tensor:
    """The `row_of_slot` [tokens, slots] int64 of the dense layout: the row of (token, slot) is token * slots + slot.

    first: this rank's first token among those of the group, an int, or a tensor on the device for uneven counts.
    """
    return torch.arange(tokens * slots, device=device).view(tokens, slots) + first * slots


def tile_for(tokens: int, hidden: int, slots: int) -> Tile:
    """The launch for so many tokens of so many elements and slots."""
    widest = triton.next_power_of_2(min(max(hidden, 128), 1024))
    registers = 104 if slots <= UNROLL.value else 128
    if tokens * hidden <= 1 << 17:
        return Tile(min(widest, 512), 4, 8, registers)
    return Tile(widest, 4, 16, registers)


def pull(call: Pull, *, tile: Tile | None = None, cascade: bool = True) -> Tensor:
    """This rank's tokens under the contract `owner`. Returns call.out. Asynchronous on the current stream.

    A token without routed slots gets +0. cascade: sum in fp32 pairs, not in an fp64 chain; no bit depends on it.
    """
    tokens, hidden = call.out.shape
    slots = call.row_of_slot.shape[1]
    if slots == 0:
        raise ValueError("a combine of rows needs at least one slot a token: row_of_slot is [t, K] with K >= 1")
    tile = tile or tile_for(tokens, hidden, slots)
    vector = call.vector
    columns = cdiv(hidden, tile.block)
    weighted = 0 if call.weights is None else 2 if call.product_dtype == torch.bfloat16 else 1
    short = weighted == 2 or (weighted == 0 and call.dtype == torch.bfloat16)
    _owner_kernel[grid(tokens * columns, tile, call.out.device, call.sync)](
        call.peers, bits_of(call.out), call.row_of_slot, call.rank_of_slot, call.weights, call.count, call.offset,
        hidden // vector, tokens, columns, NO_LIMIT if call.rows is None else call.rows, call.rank,
        W=call.peers.numel(), K=slots, DTYPE=tl.int16 if call.dtype == torch.bfloat16 else tl.float32,
        WEIGHTED=weighted, LIMIT=spread_limit(slots, 8 if short else 24), CASCADE=cascade,
        COUNTED=call.count is not None, VEC=vector, PART=tile.part, BLOCK=tile.block, **tile.options,
        **barriers(call.sync, tile.warps),
    )  # fmt: skip
    return call.out
