"""Sorting a token's slots into the engine's tree: `definition.sort_slots` as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.mirror import maps
from bicomm.mirror.addends import FIRST_BIT, LAST_BIT, MANY_BIT, on_device

NOT_A_ROW = tl.constexpr(0x7FFFFFFF)
NO_SUCH_PLACE = tl.constexpr(maps.NO_SUCH_PLACE)


@triton.jit
def _sort_kernel(
    rows_out, tags_out, row_of_slot, rank_of_slot, order_of_slot, tokens, ep_size,
    K: tl.constexpr, K2: tl.constexpr, HAS_RANK: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, K2)
    here = token[:, None] * K + slot[None, :]
    inside = (token < tokens)[:, None] & (slot < K)[None, :]
    row = tl.load(row_of_slot + here, mask=inside, other=-1).to(tl.int64)
    routed = row >= 0
    key = tl.zeros([BLOCK, K2], tl.int64)
    if HAS_RANK:
        rank = tl.load(rank_of_slot + here, mask=inside, other=-1).to(tl.int64)
        routed = routed & (rank >= 0)
        row = tl.where(rank >= ep_size, NOT_A_ROW, row)
        key = rank << 32
    group = key >> 32
    if HAS_ORDER:
        order = tl.load(order_of_slot + here, mask=inside, other=0).to(tl.int64)
        row = tl.where(order == NO_SUCH_PLACE, NOT_A_ROW, row)
        key = key + order
    group = tl.where(routed, group, -1)
    key = tl.where(routed, key, 0x7FFFFFFFFFFFFFFF)
    # place of slot i = how many slots j come before it; ties go by slot, so that the order is a total one
    tie = slot[None, :, None] > slot[None, None, :]
    before = (key[:, None, :] < key[:, :, None]) | ((key[:, None, :] == key[:, :, None]) & tie)  # [token, i, j]
    before = before & (slot < K)[None, None, :]
    place = tl.sum(before.to(tl.int32), axis=2)
    later = (group[:, None, :] == group[:, :, None]) & (before == 0) & (slot[None, :, None] != slot[None, None, :])
    last = routed & (tl.sum((later & (slot < K)[None, None, :]).to(tl.int32), axis=2) == 0)
    same = (group[:, None, :] == group[:, :, None]) & (slot < K)[None, None, :]
    first = routed & (tl.sum((same & before).to(tl.int32), axis=2) == 0)
    many = routed & (tl.sum(same.to(tl.int32), axis=2) >= 3)
    flags = (last.to(tl.int32) << LAST_BIT) + (first.to(tl.int32) << FIRST_BIT) + (many.to(tl.int32) << MANY_BIT)
    there = token[:, None] * K + place
    tl.store(rows_out + there, tl.where(routed, tl.minimum(row, NOT_A_ROW), -1).to(tl.int32), mask=inside)
    tl.store(tags_out + there, slot[None, :] + flags, mask=inside)


def sort_slots(
    row_of_slot: Tensor, rank_of_slot: Tensor | None, order_of_slot: Tensor | None, ep_size: int
) -> tuple[Tensor, Tensor]:
    """`definition.sort_slots` as one kernel; a rank or place that does not exist makes its row one that does not."""
    tokens, slots = row_of_slot.shape
    places = torch.empty(tokens, slots, dtype=torch.int32, device=row_of_slot.device)
    tags = torch.empty_like(places)
    if places.numel():
        width = triton.next_power_of_2(slots)
        block = max(1, min(32, 4096 // (width * width)))
        with on_device(places):
            _sort_kernel[(triton.cdiv(tokens, block),)](
                places, tags, row_of_slot.contiguous(),
                None if rank_of_slot is None else rank_of_slot.contiguous(),
                None if order_of_slot is None else order_of_slot.contiguous(),
                tokens, ep_size, K=slots, K2=width, HAS_RANK=rank_of_slot is not None,
                HAS_ORDER=order_of_slot is not None, BLOCK=block, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return places, tags
