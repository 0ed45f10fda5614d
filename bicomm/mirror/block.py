"""One program's block: how a forward kernel reads a token's rows, and how it stores the value or sums it again."""

from __future__ import annotations

import triton
import triton.language as tl

from bicomm.kernels.arithmetic import bf16_bits, round_to_fp32
from bicomm.mirror.addends import LAST_BIT, load_row, row_at
from bicomm.mirror.repeat import exact_partials


@triton.jit
def load_rows(
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
def is_last(tags, first, i, K: tl.constexpr):
    """Nonzero where place i is the last of its engine rank."""
    return tl.load(tags + first * K + i) >> LAST_BIT


@triton.jit
def store_result(out, first, hidden, columns, value, wrong, OUT_BF16: tl.constexpr):
    result = tl.where(wrong != 0, float("nan"), round_to_fp32(value))
    there = out + first * hidden + columns
    if OUT_BF16:
        tl.store(there, bf16_bits(result), mask=columns < hidden)
    else:
        tl.store(there, result, mask=columns < hidden)


@triton.jit
def finish(
    out, rows, stride, num_rows, places, tags, probs, first, tokens, columns, hidden, value, again, wrong,
    K: tl.constexpr, GROUPS: tl.constexpr, HAS_MAP: tl.constexpr, ROWS_BF16: tl.constexpr, OUT_BF16: tl.constexpr,
    PRODUCT: tl.constexpr, WEIGHT_BF16: tl.constexpr, ACC: tl.constexpr, RULE: tl.constexpr,
    G: tl.constexpr, CUT: tl.constexpr, SMALLEST: tl.constexpr, SOFT: tl.constexpr, BLOCK: tl.constexpr,
    SUB: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Store a block's value, or, where some column must be summed again, all of them slice by slice."""
    if not CHECKED or tl.max(again.to(tl.int32), axis=0) == 0:
        store_result(out, first, hidden, columns, value, wrong, OUT_BF16)
    else:
        # A few columns at a time: the state of this path must not cost the other one registers.
        start = (tl.program_id(0) % tl.cdiv(hidden, BLOCK)) * BLOCK
        for part in range(BLOCK // SUB):
            some = start + part * SUB + tl.arange(0, SUB)
            again_value = exact_partials(
                rows, stride, num_rows, places, tags, probs, first, tokens, some, hidden,
                K, GROUPS, HAS_MAP, ROWS_BF16, PRODUCT, WEIGHT_BF16, ACC, RULE, G, CUT, SMALLEST, SOFT,
            )  # fmt: skip
            store_result(out, first, hidden, some, again_value, wrong, OUT_BF16)
