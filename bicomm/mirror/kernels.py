"""The mirror's Triton kernels: sort a token's slots into the engine's tree, and sum its rows through that tree.

`unpermute` reads each row once and keeps all state in registers. An fp64 chain decides most sums: while the exponents
of its addends span few enough binades it is exact, and the kernel tracks just that span. A block of columns where it
is too wide is summed again slice by slice (see arithmetic.py), from rows that are still in the cache.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, type-arg"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.arithmetic import (
    add_round_to_odd,
    bf16_bits,
    canonical_nan,
    from_bf16_bits,
    magnitude_bits,
    round_through_bf16,
    round_to_fp32,
    round_to_slice,
    slice_constant,
    window_anchor,
    window_close,
    window_truncate,
)
from bicomm.contract import Contract, Partial
from bicomm.mirror import maps

EXACT_SLICES = tl.constexpr(7)
WIDTH = tl.constexpr(47)
MAX_SLOTS = 120  # addends of a slice without a rounding error
LAST_BIT = tl.constexpr(30)  # as definition.LAST and SLOT
SLOT_BITS = tl.constexpr((1 << 30) - 1)
NOT_A_ROW = tl.constexpr(0x7FFFFFFF)
NO_SUCH_PLACE = tl.constexpr(maps.NO_SUCH_PLACE)

# The codes of a contract's parts in the kernels.
ACC_EXACT, ACC_FP64, ACC_FP32, ACC_BF16 = (tl.constexpr(i) for i in range(4))
ORDERED, FP64, EXACT, WINDOW = (tl.constexpr(i) for i in range(4))
PLAIN, PRODUCT_FP32, PRODUCT_BF16, FMA = (tl.constexpr(i) for i in range(4))
EACH, ALL, TAGGED = (tl.constexpr(i) for i in range(3))  # groups: every slot one, one of all slots, or by the tags


# ---------------------------------------------------------------------------------------------------------- sorting


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
    there = token[:, None] * K + place
    tl.store(rows_out + there, tl.where(routed, tl.minimum(row, NOT_A_ROW), -1).to(tl.int32), mask=inside)
    tl.store(tags_out + there, slot[None, :] + (last.to(tl.int32) << LAST_BIT), mask=inside)


# ---------------------------------------------------------------------------------------------------------- summing


@triton.jit
def _row_at(places, first, i, tokens, K: tl.constexpr, HAS_MAP: tl.constexpr):
    """The row at place i of token `first`, -1 beyond the last place; without a map, rank i's partial of the token."""
    i = tl.cast(i, tl.int64)
    if HAS_MAP:
        row = tl.load(places + first * K + i, mask=i < K, other=-1).to(tl.int64)
    else:
        row = tl.where(i < K, i * tokens + first, -1)
    return row


@triton.jit
def _load_row(rows, row, stride, num_rows, columns, hidden):
    """Raw data of a row; 0 where the slot is not routed, or the row does not exist."""
    exists = (row >= 0) & (row < num_rows)
    limit = tl.where(exists, hidden, 0)  # a scalar: the interpreter cannot join a scalar condition to a mask
    return tl.load(rows + tl.where(exists, row, 0) * stride + columns, mask=columns < limit, other=0)


@triton.jit
def _weight_at(probs, tags, first, i, row, K: tl.constexpr, GROUPS: tl.constexpr, WEIGHT_BF16: tl.constexpr):
    """The weight of place i in fp32, rounded as the contract says; 0 where the slot is not routed."""
    slot = i
    if GROUPS == TAGGED:
        slot = tl.load(tags + first * K + i) & SLOT_BITS
    weight = tl.load(probs + first * K + slot, mask=row >= 0, other=0.0)
    if WEIGHT_BF16:
        weight = round_through_bf16(weight)
    return weight


@triton.jit
def _addend(raw, weight, ROWS_BF16: tl.constexpr, PRODUCT: tl.constexpr):
    """The fp32 addend of raw row data: the row, or its rounded product with the weight (not with FMA)."""
    x = from_bf16_bits(raw) if ROWS_BF16 else raw
    if PRODUCT == PRODUCT_FP32 or PRODUCT == PRODUCT_BF16:
        x = weight * x
    if PRODUCT == PRODUCT_BF16:
        x = round_through_bf16(x)
    return x


@triton.jit
def _fma(w, x, acc, SOFT: tl.constexpr):
    """RN32(w * x + acc) in one rounding: the instruction, or its twin for the interpreter (see partial.py)."""
    if SOFT:
        product = (w.to(tl.float64) * x.to(tl.float64)) + tl.zeros_like(x).to(tl.float64)
        plain = product + acc.to(tl.float64)
        odd = add_round_to_odd(product, acc.to(tl.float64))
        result = tl.where(tl.abs(plain) < float("inf"), odd, plain).to(tl.float32)
    else:
        result = tl.fma(tl.zeros_like(x) + w, x, acc)
    return result


@triton.jit
def _accumulate(acc, x, weight, ACC: tl.constexpr, PRODUCT: tl.constexpr, SOFT: tl.constexpr):
    """One step of the chain within a rank; acc is fp64 for the accumulators exact and fp64, else fp32."""
    if PRODUCT == FMA:
        acc = _fma(weight, x, acc, SOFT)
    elif ACC == ACC_EXACT or ACC == ACC_FP64:
        acc = acc + x.to(tl.float64)
    elif ACC == ACC_BF16:
        acc = round_through_bf16(acc + x)
    else:
        acc = acc + x
    return acc


@triton.jit
def _span(largest, smallest, x):
    """Follow the largest and the smallest nonzero magnitude (as bits)."""
    bits = magnitude_bits(x)
    return tl.maximum(largest, bits), tl.minimum(smallest, tl.where(bits == 0, 0x7FFFFFFF, bits))


@triton.jit
def _too_wide(largest, smallest, LIMIT: tl.constexpr):
    """Whether an fp64 chain of the addends may have rounded: their exponents span more than LIMIT binades."""
    return ((largest >> 23) - (smallest >> 23)) > LIMIT


@triton.jit
def _exact_slots(
    rows, stride, num_rows, places, tags, probs, first, tokens, begin, end, columns, hidden,
    K: tl.constexpr, GROUPS: tl.constexpr, HAS_MAP: tl.constexpr, ROWS_BF16: tl.constexpr, PRODUCT: tl.constexpr,
    WEIGHT_BF16: tl.constexpr,
):  # fmt: skip
    """The exact sum of the addends at places [begin, end), rounded to odd into fp64: no condition on their exponents."""
    plain = tl.zeros_like(columns).to(tl.float64)
    for i in range(begin, end):
        row = _row_at(places, first, i, tokens, K, HAS_MAP)
        raw = _load_row(rows, row, stride, num_rows, columns, hidden)
        weight = 0.0
        if PRODUCT != PLAIN:
            weight = _weight_at(probs, tags, first, i, row, K, GROUPS, WEIGHT_BF16)
        plain += _addend(raw, weight, ROWS_BF16, PRODUCT).to(tl.float64)
    carry = tl.zeros_like(plain)
    result = tl.zeros_like(plain)
    for j in range(EXACT_SLICES):
        c = slice_constant(j, WIDTH)
        above = slice_constant(j + 1, WIDTH)
        total = carry
        for i in range(begin, end):
            row = _row_at(places, first, i, tokens, K, HAS_MAP)
            raw = _load_row(rows, row, stride, num_rows, columns, hidden)
            weight = 0.0
            if PRODUCT != PLAIN:
                weight = _weight_at(probs, tags, first, i, row, K, GROUPS, WEIGHT_BF16)
            x = _addend(raw, weight, ROWS_BF16, PRODUCT).to(tl.float64)
            total += round_to_slice(x, c) - round_to_slice(x, above)
        carry = (total + above) - above
        result = add_round_to_odd(total - carry, result)
    return tl.where(tl.abs(plain) < float("inf"), result, plain)


@triton.jit
def _exact_partials(
    rows, stride, num_rows, places, tags, probs, first, tokens, columns, hidden,
    K: tl.constexpr, GROUPS: tl.constexpr, HAS_MAP: tl.constexpr, ROWS_BF16: tl.constexpr, PRODUCT: tl.constexpr,
    WEIGHT_BF16: tl.constexpr, ACC: tl.constexpr, RULE: tl.constexpr, G: tl.constexpr, CUT: tl.constexpr,
    SMALLEST: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """The token's value once more, with no condition on exponents. Pass -1 looks at the partials, then one per slice.

    For the rules ordered and fp64 the single pass is their chain over exact partials.
    """
    plain = tl.zeros_like(columns).to(tl.float64)
    chain = tl.zeros_like(columns).to(tl.float32)
    largest = tl.zeros_like(columns).to(tl.int32)
    carry = tl.zeros_like(plain)
    result = tl.zeros_like(plain)
    passes: tl.constexpr = EXACT_SLICES + 1 if RULE == EXACT or RULE == WINDOW else 1
    for turn in range(passes):
        c = slice_constant(turn - 1, WIDTH)
        above = slice_constant(turn, WIDTH)
        total = carry
        acc = tl.zeros_like(plain) if ACC == ACC_EXACT or ACC == ACC_FP64 else tl.zeros_like(chain)
        begin = 0
        for i in range(K):
            row = _row_at(places, first, i, tokens, K, HAS_MAP)
            last = i == K - 1
            if GROUPS == EACH:
                last = i >= 0
            elif GROUPS == TAGGED:
                last = (tl.load(tags + first * K + i) >> LAST_BIT) != 0
            if ACC != ACC_EXACT or GROUPS == EACH:
                raw = _load_row(rows, row, stride, num_rows, columns, hidden)
                weight = 0.0
                if PRODUCT != PLAIN:
                    weight = _weight_at(probs, tags, first, i, row, K, GROUPS, WEIGHT_BF16)
                x = _addend(raw, weight, ROWS_BF16, PRODUCT)
                if GROUPS == EACH:
                    acc = x.to(acc.dtype)
                else:
                    acc = _accumulate(acc, x, weight, ACC, PRODUCT, SOFT)
            if last:
                if ACC == ACC_EXACT and GROUPS != EACH:
                    acc = _exact_slots(
                        rows, stride, num_rows, places, tags, probs, first, tokens, begin, i + 1, columns, hidden,
                        K, GROUPS, HAS_MAP, ROWS_BF16, PRODUCT, WEIGHT_BF16,
                    )  # fmt: skip
                partial = acc.to(tl.float32)
                acc = tl.zeros_like(acc)
                begin = i + 1
                if turn == 0:
                    plain += partial.to(tl.float64)
                    chain += partial
                    largest = tl.maximum(largest, magnitude_bits(partial))
                else:
                    if RULE == WINDOW:
                        partial = window_truncate(partial, window_anchor(largest, G) - CUT)
                    part = round_to_slice(partial.to(tl.float64), c) - round_to_slice(partial.to(tl.float64), above)
                    total += part
        if turn > 0:
            carry = (total + above) - above
            result = add_round_to_odd(total - carry, result)
    if RULE == ORDERED:
        value = chain
    elif RULE == FP64:
        value = plain
    else:
        if RULE == WINDOW:
            result = window_close(result, window_anchor(largest, G) - SMALLEST)
        value = tl.where(tl.abs(plain) < float("inf"), result, plain)
    return value


@triton.jit
def _store_result(out, first, hidden, columns, value, wrong, OUT_BF16: tl.constexpr):
    result = tl.where(wrong != 0, float("nan"), round_to_fp32(value))
    there = out + first * hidden + columns
    if OUT_BF16:
        tl.store(there, bf16_bits(result), mask=columns < hidden)
    else:
        tl.store(there, canonical_nan(result), mask=columns < hidden)


@triton.jit
def _unpermute_kernel(
    out, rows, stride, num_rows, places, tags, probs, tokens, hidden,
    K: tl.constexpr, GROUPS: tl.constexpr, HAS_MAP: tl.constexpr, ROWS_BF16: tl.constexpr, OUT_BF16: tl.constexpr,
    PRODUCT: tl.constexpr, WEIGHT_BF16: tl.constexpr, ACC: tl.constexpr, RULE: tl.constexpr,
    G: tl.constexpr, CUT: tl.constexpr, SMALLEST: tl.constexpr,
    ADDEND_LIMIT: tl.constexpr, PARTIAL_LIMIT: tl.constexpr, SOFT: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
    SUB: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(hidden, BLOCK)
    first = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)

    wide: tl.constexpr = ACC == ACC_EXACT or ACC == ACC_FP64
    acc = tl.zeros([BLOCK], tl.float64 if wide else tl.float32)
    total = tl.zeros([BLOCK], tl.float32 if RULE == ORDERED else tl.float64)
    largest = tl.zeros([BLOCK], tl.int32)  # of the partials
    smallest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    inner_largest = tl.zeros([BLOCK], tl.int32)  # of the addends of one partial
    inner_smallest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    again = tl.zeros([BLOCK], tl.int1)
    wrong = tl.full([], 0, tl.int32)

    # Two rows are on their way while one is added.
    row = _row_at(places, first, 0, tokens, K, HAS_MAP)
    raw = _load_row(rows, row, stride, num_rows, columns, hidden)
    next_row = _row_at(places, first, 1, tokens, K, HAS_MAP)
    next_raw = _load_row(rows, next_row, stride, num_rows, columns, hidden)
    for i in tl.range(0, K, loop_unroll_factor=UNROLL):
        this_row = row
        this_raw = raw
        row = next_row
        raw = next_raw
        next_row = _row_at(places, first, i + 2, tokens, K, HAS_MAP)
        next_raw = _load_row(rows, next_row, stride, num_rows, columns, hidden)
        wrong = wrong | (this_row >= num_rows).to(tl.int32)
        weight = 0.0
        if PRODUCT != PLAIN:
            weight = _weight_at(probs, tags, first, i, this_row, K, GROUPS, WEIGHT_BF16)
        x = _addend(this_raw, weight, ROWS_BF16, PRODUCT)
        if GROUPS == EACH:
            if RULE == ORDERED:
                total = total + x
            else:
                total = total + x.to(tl.float64)
            if RULE == EXACT or RULE == WINDOW:
                largest, smallest = _span(largest, smallest, x)
        else:
            acc = _accumulate(acc, x, weight, ACC, PRODUCT, SOFT)
            if ACC == ACC_EXACT:
                inner_largest, inner_smallest = _span(inner_largest, inner_smallest, x)
            last = i == K - 1
            if GROUPS == TAGGED:
                last = (tl.load(tags + first * K + i) >> LAST_BIT) != 0
            if last:
                partial = acc.to(tl.float32)
                acc = tl.zeros_like(acc)
                if RULE == ORDERED:
                    total = total + partial
                else:
                    total = total + partial.to(tl.float64)
                if RULE == EXACT or RULE == WINDOW:
                    largest, smallest = _span(largest, smallest, partial)
                if ACC == ACC_EXACT:
                    again = again | _too_wide(inner_largest, inner_smallest, ADDEND_LIMIT)
                    inner_largest = tl.zeros_like(inner_largest)
                    inner_smallest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)

    value = total
    if RULE == EXACT or RULE == WINDOW:
        again = again | _too_wide(largest, smallest, PARTIAL_LIMIT)
    if RULE == WINDOW:
        unit = window_anchor(largest, G) - CUT
        again = again | ((smallest >> 23) - 150 < unit)  # the window may truncate
        value = window_close(total, window_anchor(largest, G) - SMALLEST)
        value = tl.where(tl.abs(total) < float("inf"), value, total)
    CHAIN: tl.constexpr = (RULE == ORDERED or RULE == FP64) and ACC != ACC_EXACT
    if CHAIN:
        _store_result(out, first, hidden, columns, value, wrong, OUT_BF16)
    elif tl.max(again.to(tl.int32), axis=0) == 0:
        _store_result(out, first, hidden, columns, value, wrong, OUT_BF16)
    else:
        # A few columns at a time: the state of this path must not cost the other one registers.
        for part in range(BLOCK // SUB):
            some = (tl.program_id(0) % blocks) * BLOCK + part * SUB + tl.arange(0, SUB)
            again_value = _exact_partials(
                rows, stride, num_rows, places, tags, probs, first, tokens, some, hidden,
                K, GROUPS, HAS_MAP, ROWS_BF16, PRODUCT, WEIGHT_BF16, ACC, RULE, G, CUT, SMALLEST, SOFT,
            )  # fmt: skip
            _store_result(out, first, hidden, some, again_value, wrong, OUT_BF16)


# --------------------------------------------------------------------------------------------------------- gradients


@triton.jit
def _mark_kernel(used, places, count, num_rows, BLOCK: tl.constexpr):
    """used[row] = 1 for every row that some slot names."""
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(places + here, mask=here < count, other=-1).to(tl.int64)
    tl.store(used + row, tl.full([BLOCK], 1, tl.uint8), mask=(row >= 0) & (row < num_rows))


@triton.jit
def _fill_unused(d_rows, used, part, num_rows, hidden, FILL: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros into those rows of [part * FILL, (part + 1) * FILL) that no slot names."""
    begin = part.to(tl.int64) * FILL
    rows = begin + tl.arange(0, FILL)
    if tl.min(tl.load(used + rows, mask=rows < num_rows, other=1).to(tl.int32), axis=0) == 0:
        for i in range(FILL):
            row = begin + i
            if tl.load(used + row, mask=row < num_rows, other=1) == 0:
                for start in range(0, hidden, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    zero = tl.zeros([BLOCK], d_rows.dtype.element_ty)
                    tl.store(d_rows + row * hidden + columns, zero, mask=columns < hidden)


@triton.jit
def _load_grad(grad, first, hidden, columns, limit, GRAD_BF16: tl.constexpr):
    raw = tl.load(grad + first * hidden + columns, mask=columns < limit, other=0)
    return from_bf16_bits(raw) if GRAD_BF16 else raw


@triton.jit
def _store_row(d_rows, row, num_rows, hidden, columns, g, ROWS_BF16: tl.constexpr):
    exists = (row >= 0) & (row < num_rows)
    inside = columns < tl.where(exists, hidden, 0)
    there = d_rows + tl.where(exists, row, 0) * hidden + columns
    if ROWS_BF16:
        tl.store(there, bf16_bits(g), mask=inside)
    else:
        tl.store(there, canonical_nan(g), mask=inside)


@triton.jit
def _scatter_kernel(
    d_rows, grad, places, tags, probs, used, tokens, num_rows, hidden,
    K: tl.constexpr, GROUPS: tl.constexpr, GRAD_BF16: tl.constexpr, ROWS_BF16: tl.constexpr, WEIGHTED: tl.constexpr,
    WEIGHT_BF16: tl.constexpr, FILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every slot's row gets its token's gradient (times its weight); rows without a slot get 0."""
    blocks = tl.cdiv(hidden, BLOCK)
    if tl.program_id(0) >= tokens * blocks:
        _fill_unused(d_rows, used, tl.program_id(0) - tokens * blocks, num_rows, hidden, FILL, BLOCK)
    else:
        first = (tl.program_id(0) // blocks).to(tl.int64)
        columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        g = _load_grad(grad, first, hidden, columns, hidden, GRAD_BF16)
        for i in range(K):
            row = _row_at(places, first, i, tokens, K, True)
            if WEIGHTED:
                weight = _weight_at(probs, tags, first, i, row, K, GROUPS, WEIGHT_BF16)
                _store_row(d_rows, row, num_rows, hidden, columns, weight * g, ROWS_BF16)
            else:
                _store_row(d_rows, row, num_rows, hidden, columns, g, ROWS_BF16)


@triton.jit
def _weighted_kernel(
    d_rows, d_probs, grad, rows, stride, places, tags, probs, used, tokens, num_rows, hidden,
    K: tl.constexpr, GROUPS: tl.constexpr, GRAD_BF16: tl.constexpr, ROWS_BF16: tl.constexpr,
    WEIGHT_BF16: tl.constexpr, NEED_ROWS: tl.constexpr, FILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As above, and every slot's weight gets the dot product of its row and the gradient; one program a token."""
    if tl.program_id(0) >= tokens:
        _fill_unused(d_rows, used, tl.program_id(0) - tokens, num_rows, hidden, FILL, BLOCK)
    else:
        first = tl.program_id(0).to(tl.int64)
        for i in range(K):
            row = _row_at(places, first, i, tokens, K, True)
            slot = i
            if GROUPS == TAGGED:
                slot = tl.load(tags + first * K + i) & SLOT_BITS
            weight = _weight_at(probs, tags, first, i, row, K, GROUPS, WEIGHT_BF16)
            dot = tl.zeros([BLOCK], tl.float64)
            for start in range(0, hidden, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                g = _load_grad(grad, first, hidden, columns, tl.where(row >= 0, hidden, 0), GRAD_BF16)
                raw = _load_row(rows, row, stride, num_rows, columns, hidden)
                x = from_bf16_bits(raw) if ROWS_BF16 else raw
                dot += x.to(tl.float64) * g.to(tl.float64)
                if NEED_ROWS:
                    _store_row(d_rows, row, num_rows, hidden, columns, weight * g, ROWS_BF16)
            tl.store(d_probs + first * K + slot, canonical_nan(tl.sum(dot, axis=0).to(tl.float32)))


# --------------------------------------------------------------------------------------------------------- launchers


def _interpreted() -> bool:
    return not isinstance(_unpermute_kernel, triton.JITFunction)


def _raw(x: Tensor) -> Tensor:
    """bf16 as its bits; fp32 as it is."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _on_device(tensor: Tensor) -> Any:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else torch.autograd.profiler.record_function("mirror")


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
        with _on_device(places):
            _sort_kernel[(triton.cdiv(tokens, block),)](
                places, tags, row_of_slot.contiguous(),
                None if rank_of_slot is None else rank_of_slot.contiguous(),
                None if order_of_slot is None else order_of_slot.contiguous(),
                tokens, ep_size, K=slots, K2=width, HAS_RANK=rank_of_slot is not None,
                HAS_ORDER=order_of_slot is not None, BLOCK=block, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return places, tags


@functools.lru_cache(maxsize=256)
def _codes(contract: Contract, weighted: bool, rows_bf16: bool, slots: int, groups: int) -> dict[str, Any]:
    """The kernel's constants for a contract: the parts of the tree, and how wide exponents may span."""
    tree = contract.partial or Partial(probability="combine" if weighted else "activation")
    product = {"fp32": PRODUCT_FP32, "bf16": PRODUCT_BF16, "fma": FMA}[tree.product] if weighted else PLAIN
    acc = {"exact": ACC_EXACT, "fp64": ACC_FP64, "fp32": ACC_FP32, "bf16": ACC_BF16}[tree.accumulator]
    rule = {"ordered": ORDERED, "fp64": FP64, "exact": EXACT, "owner": EXACT, "window": WINDOW}[contract.rule]
    g, t, s = contract.parameters or (1, 1, 1)
    if groups == EACH.value:
        acc = ACC_FP32
    # An fp64 chain of N addends of b bits is exact while their exponents span at most 53 - b - ceil(log2 N) binades.
    narrow = (rows_bf16 and product == PLAIN) or product == PRODUCT_BF16
    room = 53 - (slots - 1).bit_length()
    addend_limit = room - (8 if narrow else 24)
    partial_limit = addend_limit if groups == EACH.value else room - 24
    if slots > MAX_SLOTS and (rule in (EXACT, WINDOW) or acc == ACC_EXACT):
        raise ValueError(f"an exact sum on a GPU takes at most {MAX_SLOTS} addends a token, got {slots}")
    return {
        "PRODUCT": product, "WEIGHT_BF16": weighted and tree.weight == "bf16", "ACC": acc, "RULE": rule,
        "G": g, "CUT": t, "SMALLEST": s, "ADDEND_LIMIT": addend_limit, "PARTIAL_LIMIT": partial_limit,
    }  # fmt: skip


def forward_constants(
    contract: Contract, weighted: bool, rows_bf16: bool, out_bf16: bool, slots: int, hidden: int, groups: tl.constexpr,
    has_map: bool, soft: bool,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """What the forward kernel is compiled for, and its warps: nothing here depends on the number of tokens."""
    block = min(1024, triton.next_power_of_2(hidden))
    constants = {
        "K": slots, "GROUPS": groups, "HAS_MAP": has_map, "ROWS_BF16": rows_bf16, "OUT_BF16": out_bf16, "SOFT": soft,
        "UNROLL": min(slots, 8), "BLOCK": block, "SUB": min(256, block),
        **_codes(contract, weighted, rows_bf16, slots, groups.value),
    }  # fmt: skip
    return constants, 4


def unpermute(
    rows: Tensor, places: Tensor | None, tags: Tensor | None, probs: Tensor | None, contract: Contract,
    out_dtype: torch.dtype, tokens: int, slots: int, each: bool,
) -> Tensor:  # fmt: skip
    """One launch of the forward kernel. rows [R, H]; places, tags int [T, K]; probs fp32 [T, K]; returns [T, H].

    places None: row i * tokens + t is rank i's partial of token t. tags None: the slots stand in their own order, and
    are one group, or one group each (`each`).
    """
    hidden = rows.shape[1]
    out = torch.empty(tokens, hidden, dtype=out_dtype, device=rows.device)
    if slots == 0:
        return out.zero_()
    if out.numel() == 0:
        return out
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    groups = EACH if each else ALL if tags is None else TAGGED
    constants, warps = forward_constants(
        contract, probs is not None, rows.dtype == torch.bfloat16, out_dtype == torch.bfloat16, slots, hidden, groups,
        places is not None, _interpreted(),
    )  # fmt: skip
    with _on_device(out):
        _unpermute_kernel[(tokens * triton.cdiv(hidden, constants["BLOCK"]),)](
            _raw(out), _raw(rows), rows.stride(0), rows.shape[0], places, tags, probs, tokens, hidden,
            num_warps=warps, enable_fp_fusion=False, **constants,
        )  # fmt: skip
    return out


def backward(
    grad: Tensor, places: Tensor, tags: Tensor | None, rows: Tensor | None, probs: Tensor | None, weight_bf16: bool,
    num_rows: int, dtype: torch.dtype, need_rows: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`definition.backward` as one kernel, after a small one that marks which rows have a slot."""
    tokens, slots = places.shape
    hidden = grad.shape[1]
    grad, places = grad.contiguous(), places.contiguous()
    d_rows = torch.empty(num_rows if need_rows else 0, hidden, dtype=dtype, device=grad.device)
    d_probs = torch.empty(places.shape if rows is not None else (0, 0), dtype=torch.float32, device=grad.device)
    if hidden == 0:
        return d_rows, d_probs.zero_()
    block, fill = min(1024, triton.next_power_of_2(hidden)), 32
    used = torch.zeros(d_rows.shape[0], dtype=torch.uint8, device=grad.device)
    fillers = triton.cdiv(d_rows.shape[0], fill)
    groups = ALL if tags is None else TAGGED
    common = {
        "K": slots, "GROUPS": groups, "GRAD_BF16": grad.dtype == torch.bfloat16, "ROWS_BF16": dtype == torch.bfloat16,
        "WEIGHT_BF16": weight_bf16, "FILL": fill, "enable_fp_fusion": False,
    }  # fmt: skip
    with _on_device(grad):
        if used.numel() and places.numel():
            _mark_kernel[(triton.cdiv(places.numel(), 1024),)](used, places, places.numel(), num_rows, BLOCK=1024)
        if rows is not None:
            if rows.stride(1) != 1:
                rows = rows.contiguous()
            if tokens + fillers:
                # A whole row in one block, up to 8192 columns: then the compiler keeps the gradient in registers.
                wide = min(8192, triton.next_power_of_2(hidden))
                _weighted_kernel[(tokens + fillers,)](
                    _raw(d_rows), d_probs, _raw(grad), _raw(rows), rows.stride(0), places, tags, probs, used,
                    tokens, num_rows, hidden, NEED_ROWS=need_rows, BLOCK=wide,
                    num_warps=max(1, min(16, wide // 512)), **common,
                )  # fmt: skip
        elif tokens * triton.cdiv(hidden, block) + fillers:
            _scatter_kernel[(tokens * triton.cdiv(hidden, block) + fillers,)](
                _raw(d_rows), _raw(grad), places, tags, probs, used, tokens, num_rows, hidden,
                WEIGHTED=probs is not None, BLOCK=block, num_warps=4, **common,
            )  # fmt: skip
    return d_rows, d_probs
