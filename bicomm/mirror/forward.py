"""The forward kernels of the mirror, and their launcher.

Each row is read once, and all state is in registers. An fp64 chain decides most sums: while the exponents of its
addends span few enough binades it is exact, and the kernel tracks just that span. A block of columns where it is too
wide is summed again, slice by slice (repeat.py).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM109 (Triton compares constants one by one)

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.arithmetic import bf16_bits, magnitude_bits, round_to_fp32, window_anchor, window_close
from bicomm.contract import Contract, Partial
from bicomm.mirror.addends import (
    ACC_BF16,
    ACC_EXACT,
    ACC_FP32,
    ACC_FP64,
    ALL,
    EACH,
    EXACT,
    FMA,
    FP64,
    LAST_BIT,
    ORDERED,
    PLAIN,
    PRODUCT_BF16,
    PRODUCT_FP32,
    TAGGED,
    WINDOW,
    accumulate,
    addend,
    at_once,
    interpreted,
    load_row,
    on_device,
    raw_bits,
    row_at,
    weight_at,
)
from bicomm.mirror.repeat import MAX_SLOTS, exact_partials

SIGN_AND_LOW_28 = tl.constexpr(-0x70000001)  # 0x8fffffff as int32
BEYOND = tl.constexpr(1 << 30)
UNSCALE = tl.constexpr(2.0**896)


@triton.jit
def _span(largest, smallest, x):
    """Follow the largest magnitude (its bits) and the smallest nonzero one (its bits - 1, unsigned: 0 comes last)."""
    bits = magnitude_bits(x)
    return tl.maximum(largest, bits), tl.minimum(smallest, (bits - 1).to(tl.uint32, bitcast=True))


@triton.jit
def _too_wide(largest, smallest, LIMIT: tl.constexpr):
    """Whether an fp64 chain of the addends may have rounded: their exponents span more than LIMIT binades."""
    return (largest >> 23) - ((smallest + 1) >> 23).to(tl.int32, bitcast=True) > LIMIT


@triton.jit
def _span_bf16(high, low, raw, SOFT: tl.constexpr):
    """As `_span`, of bf16 bits: high holds 0x8000 + the largest, low 0x7fff + the smallest nonzero (0x7fff: none).

    All are int16, and both orders are the signed one, so that one instruction follows two columns.
    """
    if SOFT:
        moved = raw | -0x8000
        high = tl.maximum(high, moved)
        low = tl.minimum(low, moved - 1)
    else:
        high, low = tl.inline_asm_elementwise(
            "{ .reg .b32 moved; or.b32 moved, $2, 0x80008000; max.s16x2 $0, $3, moved;"
            " sub.u32 moved, moved, 0x00010001; min.s16x2 $1, $4, moved; }",
            "=&r,=r,r,r,r", [raw, high, low], dtype=(tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip
    return high, low


@triton.jit
def _ends_bf16(high, low):
    """The exponent fields of the largest and of the smallest nonzero magnitude (256 where there is none)."""
    return (high.to(tl.int32) & 0x7FFF) >> 7, ((low.to(tl.int32) + 0x8001) & 0xFFFF) >> 7


@triton.jit
def _widen(bits):
    """x * 2**-896 in fp64 of a finite bf16 x, given as fp32 bits: the bits moved, also those of a subnormal."""
    return (((bits >> 3) & SIGN_AND_LOW_28).to(tl.int64) << 32).to(tl.float64, bitcast=True)


@triton.jit
def _load_rows(
    rows, stride, num_rows, places, first, base, tokens, columns, hidden, K: tl.constexpr, HAS_MAP: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The rows at places [base, base + N) and their data, all on their way before the first is added."""
    held = ()
    raws = ()
    for j in tl.static_range(N):
        held = held + (row_at(places, first, base + j, tokens, K, HAS_MAP),)  # noqa: RUF005 (Triton knows no stars)
    for j in tl.static_range(N):
        raws = raws + (load_row(rows, held[j], stride, num_rows, columns, hidden),)  # noqa: RUF005
    return held, raws


@triton.jit
def _is_last(tags, first, i, K: tl.constexpr):
    """Nonzero where place i is the last of its engine rank, and beyond the last place."""
    return tl.load(tags + first * K + i, mask=i < K, other=BEYOND) >> LAST_BIT


@triton.jit
def _store_result(out, first, hidden, columns, value, wrong, OUT_BF16: tl.constexpr):
    result = tl.where(wrong != 0, float("nan"), round_to_fp32(value))
    there = out + first * hidden + columns
    if OUT_BF16:
        tl.store(there, bf16_bits(result), mask=columns < hidden)
    else:
        tl.store(there, result, mask=columns < hidden)


@triton.jit
def _finish(
    out, rows, stride, num_rows, places, tags, probs, first, tokens, columns, hidden, value, again, wrong,
    K: tl.constexpr, GROUPS: tl.constexpr, HAS_MAP: tl.constexpr, ROWS_BF16: tl.constexpr, OUT_BF16: tl.constexpr,
    PRODUCT: tl.constexpr, WEIGHT_BF16: tl.constexpr, ACC: tl.constexpr, RULE: tl.constexpr,
    G: tl.constexpr, CUT: tl.constexpr, SMALLEST: tl.constexpr, SOFT: tl.constexpr, BLOCK: tl.constexpr,
    SUB: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Store a block's value, or, where some column must be summed again, all of them slice by slice."""
    if not CHECKED or tl.max(again.to(tl.int32), axis=0) == 0:
        _store_result(out, first, hidden, columns, value, wrong, OUT_BF16)
    else:
        # A few columns at a time: the state of this path must not cost the other one registers.
        start = (tl.program_id(0) % tl.cdiv(hidden, BLOCK)) * BLOCK
        for part in range(BLOCK // SUB):
            some = start + part * SUB + tl.arange(0, SUB)
            again_value = exact_partials(
                rows, stride, num_rows, places, tags, probs, first, tokens, some, hidden,
                K, GROUPS, HAS_MAP, ROWS_BF16, PRODUCT, WEIGHT_BF16, ACC, RULE, G, CUT, SMALLEST, SOFT,
            )  # fmt: skip
            _store_result(out, first, hidden, some, again_value, wrong, OUT_BF16)


@triton.jit
def _unpermute_kernel(
    out, rows, stride, num_rows, places, tags, probs, tokens, hidden,
    K: tl.constexpr, GROUPS: tl.constexpr, HAS_MAP: tl.constexpr, ROWS_BF16: tl.constexpr, OUT_BF16: tl.constexpr,
    PRODUCT: tl.constexpr, WEIGHT_BF16: tl.constexpr, ACC: tl.constexpr, RULE: tl.constexpr,
    G: tl.constexpr, CUT: tl.constexpr, SMALLEST: tl.constexpr,
    ADDEND_LIMIT: tl.constexpr, PARTIAL_LIMIT: tl.constexpr, SOFT: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(hidden, BLOCK)
    first = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)

    wide: tl.constexpr = ACC == ACC_EXACT or ACC == ACC_FP64
    acc = tl.zeros([BLOCK], tl.float64 if wide else tl.float32)
    total = tl.zeros([BLOCK], tl.float32 if RULE == ORDERED else tl.float64)
    largest = tl.zeros([BLOCK], tl.int32)  # of the partials
    smallest = tl.full([BLOCK], 0xFFFFFFFF, tl.uint32)
    inner_largest = tl.zeros([BLOCK], tl.int32)  # of the addends of one partial
    inner_smallest = tl.full([BLOCK], 0xFFFFFFFF, tl.uint32)
    again = tl.zeros([BLOCK], tl.int1)
    wrong = tl.full([], 0, tl.int32)
    for base in range(0, K, AT_ONCE):
        held, raws = _load_rows(
            rows, stride, num_rows, places, first, base, tokens, columns, hidden, K, HAS_MAP, AT_ONCE
        )
        for j in tl.static_range(AT_ONCE):
            i = base + j
            wrong = wrong | (held[j] >= num_rows).to(tl.int32)
            weight = 0.0
            if PRODUCT != PLAIN:
                weight = weight_at(probs, tags, first, i, held[j], K, GROUPS, WEIGHT_BF16)
            x = addend(raws[j], weight, ROWS_BF16, PRODUCT, SOFT)
            if GROUPS == EACH:
                if RULE == ORDERED:
                    total = total + x
                else:
                    total = total + x.to(tl.float64)
                if RULE == EXACT or RULE == WINDOW:
                    largest, smallest = _span(largest, smallest, x)
            else:
                acc = accumulate(acc, x, weight, ACC, PRODUCT, SOFT)
                if ACC == ACC_EXACT:
                    inner_largest, inner_smallest = _span(inner_largest, inner_smallest, x)
                last = i == K - 1
                if GROUPS == TAGGED:
                    last = _is_last(tags, first, i, K) != 0
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
                        inner_smallest = tl.full([BLOCK], 0xFFFFFFFF, tl.uint32)

    value = total
    if RULE == EXACT or RULE == WINDOW:
        again = again | _too_wide(largest, smallest, PARTIAL_LIMIT)
    if RULE == WINDOW:
        unit = window_anchor(largest, G) - CUT
        lowest = ((smallest + 1) >> 23).to(tl.int32, bitcast=True)
        again = again | ((smallest != 0xFFFFFFFF) & (lowest - 150 < unit))  # the window may truncate
        value = window_close(total, window_anchor(largest, G) - SMALLEST)
        value = tl.where(tl.abs(total) < float("inf"), value, total)
    CHECKED: tl.constexpr = RULE == EXACT or RULE == WINDOW or ACC == ACC_EXACT
    _finish(
        out, rows, stride, num_rows, places, tags, probs, first, tokens, columns, hidden, value, again, wrong,
        K, GROUPS, HAS_MAP, ROWS_BF16, OUT_BF16, PRODUCT, WEIGHT_BF16, ACC, RULE, G, CUT, SMALLEST, SOFT, BLOCK, SUB,
        CHECKED,
    )  # fmt: skip


@triton.jit
def _plain_bf16_kernel(
    out, rows, stride, num_rows, places, tags, probs, tokens, hidden,
    K: tl.constexpr, GROUPS: tl.constexpr, HAS_MAP: tl.constexpr, ROWS_BF16: tl.constexpr, OUT_BF16: tl.constexpr,
    PRODUCT: tl.constexpr, WEIGHT_BF16: tl.constexpr, ACC: tl.constexpr, RULE: tl.constexpr,
    G: tl.constexpr, CUT: tl.constexpr, SMALLEST: tl.constexpr,
    ADDEND_LIMIT: tl.constexpr, PARTIAL_LIMIT: tl.constexpr, SOFT: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """As above for bf16 rows without weights that are summed in fp64 or exactly, at half the instructions.

    One or two bf16 addends of an engine rank are summed in fp32: fp64 and then fp32 would give that rounding too, as
    an fp64 sum of two 8-bit numbers is either exact or within 2**-45 of the larger. Three and more go through fp64. A
    conversion to fp64 is 1/8 the rate of an integer operation on Hopper, so bf16 is widened by moving its bits, which
    gives x * 2**-896 (also for subnormals). Sums of these round as those of x do: all are multiples of 2**-133, whose
    fp64 image 2**-1029 is above the smallest fp64 number. NaN and infinities come out finite, so they take the slices.
    All partials are multiples of their addends' lowest bit: the addends' span vouches for the sum across ranks too.
    """
    blocks = tl.cdiv(hidden, BLOCK)
    first = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)

    ACROSS: tl.constexpr = RULE == EXACT or RULE == WINDOW  # otherwise only what goes through fp64 is followed
    short = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK], tl.float64)
    total = tl.zeros([BLOCK], tl.float32 if RULE == ORDERED else tl.float64)
    high = tl.full([BLOCK], -0x8000, tl.int16)  # of the addends
    low = tl.full([BLOCK], 0x7FFF, tl.int16)
    partial_largest = tl.zeros([BLOCK], tl.int32)
    wrong = tl.full([], 0, tl.int32)
    begins = tl.full([], 1, tl.int32)  # whether an engine rank begins here, and whether it has three slots or more
    three = tl.full([], 0, tl.int32)
    for base in range(0, K, AT_ONCE):
        held, raws = _load_rows(
            rows, stride, num_rows, places, first, base, tokens, columns, hidden, K, HAS_MAP, AT_ONCE
        )
        lasts = ()
        if GROUPS == TAGGED:
            for j in tl.static_range(AT_ONCE + 1):
                lasts = lasts + (_is_last(tags, first, base + j, K),)  # noqa: RUF005
        for j in tl.static_range(AT_ONCE):
            wrong = wrong | (held[j] >= num_rows).to(tl.int32)
            bits = raws[j].to(tl.int32) << 16
            if ACROSS or GROUPS != TAGGED:
                high, low = _span_bf16(high, low, raws[j], SOFT)
            if GROUPS == EACH:
                total = total + _widen(bits)
            elif GROUPS == ALL:
                acc = acc + _widen(bits)
            else:
                three = tl.where(begins != 0, ((lasts[j] | lasts[j + 1]) == 0).to(tl.int32), three)
                short = tl.where(begins != 0, 0.0, short) + bits.to(tl.float32, bitcast=True)
                if three != 0:
                    acc = tl.where(begins != 0, 0.0, acc) + _widen(bits)
                    if not ACROSS:
                        high, low = _span_bf16(high, low, raws[j], SOFT)
                if lasts[j] != 0:
                    partial = short
                    if three != 0:
                        partial = (acc * UNSCALE).to(tl.float32)
                    total = total + partial.to(total.dtype)
                    if RULE == WINDOW:
                        partial_largest = tl.maximum(partial_largest, magnitude_bits(partial))
                begins = lasts[j]
    if GROUPS == EACH:
        total = total * UNSCALE
    elif GROUPS == ALL:
        partial = (acc * UNSCALE).to(tl.float32)
        total = partial.to(total.dtype)
        partial_largest = magnitude_bits(partial)

    value = total
    highest, lowest = _ends_bf16(high, low)
    again = highest == 255
    if ACROSS or ACC == ACC_EXACT:
        spare: tl.constexpr = 0 if GROUPS == EACH else 1  # partials are rounded, at most to the next binade
        again = again | (highest - lowest > ADDEND_LIMIT - spare)
    if RULE == WINDOW:
        if GROUPS == EACH:
            partial_largest = (high.to(tl.int32) & 0x7FFF) << 16
        unit = window_anchor(partial_largest, G) - CUT
        again = again | (lowest - 134 < unit)  # the window may truncate
        value = window_close(total, window_anchor(partial_largest, G) - SMALLEST)
        value = tl.where(tl.abs(total) < float("inf"), value, total)
    _finish(
        out, rows, stride, num_rows, places, tags, probs, first, tokens, columns, hidden, value, again, wrong,
        K, GROUPS, HAS_MAP, ROWS_BF16, OUT_BF16, PRODUCT, WEIGHT_BF16, ACC, RULE, G, CUT, SMALLEST, SOFT, BLOCK, SUB,
        True,
    )  # fmt: skip


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
) -> tuple[Any, dict[str, Any], int]:  # fmt: skip
    """The forward kernel for a contract, its constants and its warps: nothing depends on the number of tokens."""
    block = min(1024, max(16, triton.next_power_of_2(hidden)))  # instructions that take two columns need two
    constants = {
        "K": slots, "GROUPS": groups, "HAS_MAP": has_map, "ROWS_BF16": rows_bf16, "OUT_BF16": out_bf16, "SOFT": soft,
        "AT_ONCE": at_once(slots), "BLOCK": block, "SUB": min(256, block),
        **_codes(contract, weighted, rows_bf16, slots, groups.value),
    }  # fmt: skip
    kernel = _unpermute_kernel
    if rows_bf16 and not weighted:
        acc, rule = constants["ACC"], constants["RULE"]
        sums_exactly = rule in (EXACT, WINDOW)
        if sums_exactly if groups.value == EACH.value else acc in (ACC_EXACT, ACC_FP64):
            kernel = _plain_bf16_kernel
    return kernel, constants, 4


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
    kernel, constants, warps = forward_constants(
        contract, probs is not None, rows.dtype == torch.bfloat16, out_dtype == torch.bfloat16, slots, hidden, groups,
        places is not None, interpreted(),
    )  # fmt: skip
    with on_device(out):
        kernel[(tokens * triton.cdiv(hidden, constants["BLOCK"]),)](
            raw_bits(out), raw_bits(rows), rows.stride(0), rows.shape[0], places, tags, probs, tokens, hidden,
            num_warps=warps, enable_fp_fusion=False, **constants,
        )  # fmt: skip
    return out
