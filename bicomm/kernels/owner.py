"""The pull kernel of `owner`: a token's owner reads the token's expert rows where they lie, and sums them exactly.

Each tile is a piece of one token. Which rows it reads is looked up on the device, so a captured graph serves any
routing; the sum is that of exact.py, so neither the number of ranks, nor the placement of experts, nor the order of
slots changes a bit.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.kernels.addends import UNROLL, element_at, load_tile, peer_pointer, store_tile, tile_limit
from bicomm.kernels.arithmetic import round_through_bf16
from bicomm.kernels.barrier import enter, leave
from bicomm.kernels.call import RUNTIME_INTEGERS, Pull, Tile, barriers, bits_of, cdiv, grid
from bicomm.kernels.exact import spread_limit, sum_exactly

NO_LIMIT = 1 << 62


@triton.jit
def find_row(slot, at, table, VEC: tl.constexpr):
    """(pointer to the tile at `at` of the slot's row, 1 if it is to be read, 1 if it names what does not exist).

    A slot that is not routed has a pointer that must not be used. at: in units of VEC elements, as `hidden`.
    """
    peers, offset, ranks, rows, hidden, most, W, like = table
    rank = tl.load(ranks + slot).to(tl.int64)
    row = tl.load(rows + slot).to(tl.int64)
    routed = ((rank >= 0) & (row >= 0)).to(tl.int32)
    exists = ((rank < W) & (row < most)).to(tl.int32)
    used = routed * exists
    base = peer_pointer(peers, offset, tl.where(used != 0, rank, 0), like.dtype.element_ty)
    return element_at(base, (row * hidden + at) * VEC, VEC), used, routed - used


@triton.jit
def load_row(args, k, lane, HELD: tl.constexpr, VEC: tl.constexpr):
    """Loader: the tile of slot k's row; zeros where the slot is not routed."""
    held, first, at, limit, table, _weights = args
    if HELD:
        pointer, used = held[k]
    else:
        pointer, used, _wrong = find_row(first + k, at, table, VEC)
    return load_tile(pointer, lane, limit * used)


@triton.jit
def load_product(args, k, lane, HELD: tl.constexpr, VEC: tl.constexpr):
    """Loader: weight * row, rounded to fp32; zeros where the slot is not routed, whatever its weight."""
    held, first, at, limit, table, weights = args
    if HELD:
        pointer, used = held[k]
    else:
        pointer, used, _wrong = find_row(first + k, at, table, VEC)
    weight = tl.where(used != 0, tl.load(weights + (first + k)), 0.0)
    return load_tile(pointer, lane, limit * used) * weight


@triton.jit
def load_product_bf16(args, k, lane, HELD: tl.constexpr, VEC: tl.constexpr):
    """Loader: weight * row, rounded to fp32 and then to bf16."""
    return round_through_bf16(load_product(args, k, lane, HELD, VEC))


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def _owner_kernel(
    peers, out, rows, ranks, weights, count, offset: tl.int64, units: tl.int64, capacity: tl.int64, columns: tl.int64,
    most: tl.int64, rank: tl.int64, control, mine, page, what: tl.int64, shape: tl.int64, tokens: tl.int64,
    mark: tl.int64, patience: tl.int64, SYNC: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    DTYPE: tl.constexpr, WEIGHTED: tl.constexpr, LIMIT: tl.constexpr, COUNTED: tl.constexpr, VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    ok = tl.cast(1, tl.int32)
    if SYNC:
        ok, opened = enter(control, mine, page, what, shape, tokens, mark, patience, rank, W, LANES, SYNC == 2)
    there = tl.cast(capacity, tl.int64)
    if COUNTED:
        there = tl.minimum(tl.maximum(tl.load(count).to(tl.int64), 0), there)
    table = (peers, offset, ranks, rows, units, most, W, tl.cast(0, tl.int64).to(tl.pointer_type(DTYPE)))
    lane = tl.arange(0, BLOCK)
    blocks, across = tl.num_programs(0), tl.cast(columns, tl.int32)
    token = (tl.program_id(0) // across).to(tl.int64)  # a token has `columns` tiles; no division in the loop
    column = tl.program_id(0) % across
    for _tile in tl.range(tl.program_id(0), there * columns, blocks):
        at = column.to(tl.int64) * (BLOCK // VEC)
        limit = tile_limit(units - at, 1, VEC, BLOCK)
        held = ()
        unknown = tl.cast(0, tl.int32)
        if K <= UNROLL:
            for k in tl.static_range(K):
                pointer, used, wrong = find_row(token * K + k, at, table, VEC)
                held = held + ((pointer, used),)  # type: ignore[assignment]  # noqa: RUF005
                unknown += wrong
        else:
            for k in tl.range(0, K):
                _pointer, _used, wrong = find_row(token * K + k, at, table, VEC)
                unknown += wrong
        args = (held, token * K, at, tile_limit(units - at, ok, VEC, BLOCK), table, weights)
        if WEIGHTED == 0:
            value = sum_exactly(load_row, args, lane, K, VEC, BLOCK, 0, LIMIT, 0, 0, 0)
        elif WEIGHTED == 1:
            value = sum_exactly(load_product, args, lane, K, VEC, BLOCK, 0, LIMIT, 0, 0, 0)
        else:
            value = sum_exactly(load_product_bf16, args, lane, K, VEC, BLOCK, 0, LIMIT, 0, 0, 0)
        good = tl.where(unknown == 0, ok, 0)
        store_tile(out, (token * units + at) * VEC, lane, limit, value, good, VEC)
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


def tile_for(tokens: int, hidden: int, weighted: bool = False) -> Tile:
    """The launch for so many tokens of so many elements, measured on an H200 (bench/combine.py --tune owner).

    Two warps a block take 59 and 194 us at 4096 tokens x 2048 and 7168, where four with 152 registers took 71 and 231.
    With weights two warps would spill.
    """
    widest = triton.next_power_of_2(min(max(hidden, 128), 1024))
    if tokens * hidden <= 1 << 17:
        return Tile(min(widest, 512), 4, 8)
    if weighted:
        return Tile(min(widest, 512), 4, 8) if tokens * hidden <= 1 << 20 else Tile(widest, 4, 8, 152)
    return Tile(widest, 2, 8 if tokens * hidden <= 1 << 20 else 16)


def pull(call: Pull, *, tile: Tile | None = None) -> Tensor:
    """This rank's tokens under the contract `owner`. Returns call.out. Asynchronous on the current stream.

    A token without routed slots gets +0.
    """
    tokens, hidden = call.out.shape
    slots = call.row_of_slot.shape[1]
    if slots == 0:
        raise ValueError("a combine of rows needs at least one slot a token: row_of_slot is [t, K] with K >= 1")
    tile = tile or tile_for(tokens, hidden, call.weights is not None)
    if call.sync is not None and call.world_size > 32 * tile.warps:  # the barriers need a thread for each rank
        tile = dataclasses.replace(tile, warps=4)
    vector = call.vector
    columns = cdiv(hidden, tile.block)
    weighted = 0 if call.weights is None else 2 if call.product_dtype == torch.bfloat16 else 1
    short = weighted == 2 or (weighted == 0 and call.dtype == torch.bfloat16)
    _owner_kernel[grid(tokens * columns, tile, call.out.device, call.sync)](
        call.peers, bits_of(call.out), call.row_of_slot, call.rank_of_slot, call.weights, call.count, call.offset,
        hidden // vector, tokens, columns, NO_LIMIT if call.rows is None else call.rows, call.rank,
        W=call.peers.numel(), K=slots, DTYPE=tl.int16 if call.dtype == torch.bfloat16 else tl.float32,
        WEIGHTED=weighted, LIMIT=spread_limit(slots, 8 if short else 24), COUNTED=call.count is not None, VEC=vector,
        BLOCK=tile.block, **tile.options, **barriers(call.sync, tile.warps),
    )  # fmt: skip
    return call.out
