"""The forward kernels of the mirror, and their launcher.

Each row is read once, and all state is in registers. An fp64 chain decides most sums: while the exponents of its
addends span few enough binades it is exact, and the kernel tracks just that span. A block of columns where it is too
wide is summed again, slice by slice (repeat.py).
"""

# ruff: noqa: SIM109 (Triton compares constants one by one)

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.contract import Contract, Partial
from bicomm.kernels.arithmetic import magnitude_bits, window_anchor, window_close
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
    on_device,
    raw_bits,
    weight_at,
)
from bicomm.mirror.block import finish, is_last, load_rows
from bicomm.mirror.plain import plain_bf16_kernel
from bicomm.mirror.repeat import MAX_SLOTS


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
        held, raws = load_rows(
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
                    last = is_last(tags, first, i, K) != 0
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
    finish(
        out, rows, stride, num_rows, places, tags, probs, first, tokens, columns, hidden, value, again, wrong,
        K, GROUPS, HAS_MAP, ROWS_BF16, OUT_BF16, PRODUCT, WEIGHT_BF16, ACC, RULE, G, CUT, SMALLEST, SOFT, BLOCK, SUB,
        CHECKED,
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
) -> tuple[Any, dict[str, Any], dict[str, Any]]:  # fmt: skip
    """The forward kernel for a contract, its constants and the launch's options, whatever the number of tokens."""
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
            kernel = plain_bf16_kernel
    # Columns and warps as bench/mirror.py --tune chose them on an H200, registers as reckoned (bench/mirror_notes.md).
    # No bit depends on them.
    warps, registers = 4, None
    if kernel is plain_bf16_kernel and groups.value != EACH.value:
        # Left alone, the compiler takes 110 to 160, and too few loads are on their way; with these nothing spills.
        registers = 80 if constants["RULE"] == ORDERED else 96
    elif weighted:
        warps = 2
        constants.update(BLOCK=min(512, block), SUB=min(256, block))
    return kernel, constants, {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": False}


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
    kernel, constants, options = forward_constants(
        contract, probs is not None, rows.dtype == torch.bfloat16, out_dtype == torch.bfloat16, slots, hidden, groups,
        places is not None, interpreted(),
    )  # fmt: skip
    with on_device(out):
        kernel[(tokens * triton.cdiv(hidden, constants["BLOCK"]),)](
            raw_bits(out), raw_bits(rows), rows.stride(0), rows.shape[0], places, tags, probs, tokens, hidden,
            **options, **constants,
        )  # fmt: skip
    return out
