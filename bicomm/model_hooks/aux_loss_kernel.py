"""The blocked auxiliary loss as Triton kernels: the bits of `aux_loss.definition` at the speed of reading probs once.

Forward: one block a part of the rows writes one fp32 partial, already scaled by C; the block that arrives last (an
integer ticket tells) adds the partials. No float atomics, and nothing depends on the number of SMs.
Scratch is kept per device and stream. A call captured in a graph has its own: partials in the graph's memory, and a
ticket that no other call ever gets, since it has to be zero before the first replay (each replay leaves it at zero).
With a caller's workspace, whose contents are free, a second launch adds the partials.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.model_hooks import pinned_triton as pin
from bicomm.model_hooks.aux_loss_order import BLOCKS, WIDE_COUNTS, Partition

HALF_BLOCKS = tl.constexpr(BLOCKS // 2)


@triton.jit
def _constant(c_host, total, start, DEVICE_TOTAL: tl.constexpr):
    if DEVICE_TOTAL and total.dtype.element_ty == tl.float32:
        c = tl.load(total)
    elif DEVICE_TOTAL:
        t = tl.load(total)
        f = tl.maximum(t, 1).to(tl.float32)
        c = tl.where(t > 0, tl.div_rn(tl.div_rn(start, f), f), 0.0)
    else:
        c = c_host
    return c


@triton.jit
def _counts(counts, pointer, mask, WIDE: tl.constexpr):
    """Counts as fp32 hi and lo, of which lo means nothing unless WIDE."""
    n = tl.load(counts + pointer, mask=mask, other=0)
    hi = pin.widen(n)
    if WIDE:
        lo = (n.to(tl.int64) - hi.to(tl.int64)).to(tl.float32)
    else:
        lo = hi
    return hi, lo


@triton.jit
def _times_counts(x, hi, lo, WIDE: tl.constexpr):
    out = x * hi
    if WIDE:
        out = out + x * lo
    return out


@triton.jit
def _tile(probs, padding, r, last, c, cols, row_stride, PADDING: tl.constexpr):
    # a lane's row beyond the block belongs to the next block: masked, so that it is added once
    mask = (r < last) & (c < cols)
    if PADDING:
        mask = mask & (tl.load(padding + r, mask=r < last, other=1) == 0)
    return pin.widen(tl.load(probs + r * row_stride + c, mask=mask, other=0.0))


@triton.jit
def _finish(partials, loss, const, c, blocks, WARPS: tl.constexpr):
    """The sum of the partials, by each warp for itself: a row of the tile is a warp's, so that no warp waits."""
    row = tl.arange(0, WARPS)[:, None]
    i = tl.arange(0, HALF_BLOCKS)[None, :] + row * 0
    # .cg: read from L2, where the other blocks' partials are; this SM's L1 may hold older lines
    low = tl.load(partials + i, mask=i < blocks, other=0.0, cache_modifier=".cg")
    high = tl.load(partials + HALF_BLOCKS + i, mask=i + HALF_BLOCKS < blocks, other=0.0, cache_modifier=".cg")
    total = pin.fixed_sum(tl.reshape(tl.join(low, high), (WARPS, 2 * HALF_BLOCKS)), 1)
    tl.store(const + row * 0, c + tl.zeros_like(total), mask=row == 0)
    tl.store(const + 1 + row * 0, total, mask=row == 0)
    tl.store(loss + row * 0, pin.narrow(total, loss.dtype.element_ty), mask=row == 0)


@triton.jit(do_not_specialize=["rows", "rows_per_block"])
def aux_loss_partials(
    probs, counts, padding, total, partials, ticket, loss, const, c_host, start, rows: tl.int64, cols: tl.int32,
    row_stride: tl.int64, rows_per_block: tl.int64,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, DEVICE_TOTAL: tl.constexpr, WIDE: tl.constexpr,
    PADDING: tl.constexpr, UNROLL: tl.constexpr, FINISH: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    first = block.to(tl.int64) * rows_per_block
    last = tl.minimum(first + rows_per_block, rows)
    lane_row = tl.arange(0, TILE_ROWS)[:, None]
    lane_col = tl.arange(0, TILE_COLS)[None, :]
    partial = tl.zeros([1, 1], tl.float32)
    for col in range(0, cols, TILE_COLS):
        c_index = col + lane_col
        # before the rows: under way together with them, and in the layout of the sum
        hi, lo = _counts(counts, c_index, c_index < cols, WIDE)
        acc = tl.zeros([TILE_ROWS, TILE_COLS], tl.float32)
        for base in range(0, rows_per_block, TILE_ROWS * UNROLL):
            r = first + base + lane_row
            if (
                UNROLL == 4
            ):  # all four loads are under way before the first addition, and the additions keep their order
                x0 = _tile(probs, padding, r, last, c_index, cols, row_stride, PADDING)
                x1 = _tile(probs, padding, r + TILE_ROWS, last, c_index, cols, row_stride, PADDING)
                x2 = _tile(probs, padding, r + 2 * TILE_ROWS, last, c_index, cols, row_stride, PADDING)
                x3 = _tile(probs, padding, r + 3 * TILE_ROWS, last, c_index, cols, row_stride, PADDING)
                acc = acc + x0
                acc = acc + x1
                acc = acc + x2
                acc = acc + x3
            else:
                acc = acc + _tile(probs, padding, r, last, c_index, cols, row_stride, PADDING)
        weighted = _times_counts(acc, hi, lo, WIDE)
        partial += pin.fixed_sum(tl.reshape(weighted, (1, TILE_ROWS * TILE_COLS)), 1)
    c = _constant(c_host, total, start, DEVICE_TOTAL)
    tl.store(partials + block, tl.sum(tl.sum(partial * c, axis=1), axis=0))
    if FINISH:
        tl.debug_barrier()
        blocks = tl.num_programs(0)
        arrived = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu")
        if arrived == blocks - 1:
            _finish(partials, loss, const, c, blocks, WARPS)
            tl.store(ticket, 0)


@triton.jit(do_not_specialize=["blocks"])
def aux_loss_finish(partials, total, loss, const, c_host, start, blocks: tl.int32, DEVICE_TOTAL: tl.constexpr):
    _finish(partials, loss, const, _constant(c_host, total, start, DEVICE_TOTAL), blocks, 1)


@triton.jit(do_not_specialize=["rows"])
def aux_loss_backward(
    const, counts, padding, grad, grad_probs, rows: tl.int64, cols: tl.int32, TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr, WIDE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None].to(tl.int64)
    c_index = tl.program_id(1) * TILE_COLS + tl.arange(0, TILE_COLS)[None, :]
    hi, lo = _counts(counts, c_index, c_index < cols, WIDE)
    row = _times_counts(tl.load(const), hi, lo, WIDE) * pin.widen(tl.load(grad))
    row = tl.broadcast_to(pin.narrow(row, grad_probs.dtype.element_ty), (TILE_ROWS, TILE_COLS))
    if PADDING:
        row = tl.where(tl.load(padding + r, mask=r < rows, other=1) == 0, row, 0.0)
    tl.store(grad_probs + r * cols + c_index, row, mask=(r < rows) & (c_index < cols))


# --------------------------------------------------------------------------------------------------------- launchers


def warps_of(p: Partition) -> int:
    """Warps of a block: time only, never bits. One where the tile is small (no barriers), eight where loads queue."""
    if p.tile_rows * p.tile_cols <= 256:
        return 1
    return 4 if p.steps == 1 else 8


_scratch: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
_CAPTURED = 1 << 16  # tickets for captured calls on one device; after these, a graph zeroes its own in each replay
_tickets: dict[int, tuple[Tensor, itertools.count[int]]] = {}


def _scratch_of_stream(device: torch.device) -> tuple[Tensor, Tensor]:
    """(partials, ticket = 0) of this device and stream; a captured call's own where a graph is captured."""
    if device.type != "cuda":
        return torch.empty(BLOCKS, dtype=torch.float32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing():
        slab, taken = _tickets.get(index, (None, None))
        at = _CAPTURED if taken is None else next(taken)
        partials = torch.empty(BLOCKS, dtype=torch.float32, device=device)
        if slab is not None and at < _CAPTURED:
            return partials, slab[at : at + 1]
        return partials, torch.zeros(1, dtype=torch.int32, device=device)
    key = (index, torch.cuda.current_stream(device).cuda_stream)
    if key not in _scratch:
        if index not in _tickets:
            _tickets[index] = torch.zeros(_CAPTURED, dtype=torch.int32, device=device), itertools.count()
            torch.cuda.current_stream(device).synchronize()  # a graph on another stream may take one at once
        _scratch[key] = (
            torch.empty(BLOCKS, dtype=torch.float32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
    return _scratch[key]


def _launch(
    probs: Tensor, counts: Tensor, c: float | Tensor, start: float, padding_mask: Tensor | None, loss: Tensor,
    const: Tensor, partials: Tensor, ticket: Tensor | None,
) -> None:  # fmt: skip
    """c: the constant, or the total T as an int64 tensor, or the constant as an fp32 tensor."""
    x = probs if probs.stride(1) == 1 or probs.shape[1] == 1 else probs.contiguous()
    rows, cols = x.shape
    p = Partition.of(rows, cols)
    warps = warps_of(p)
    device_total = isinstance(c, Tensor)
    c_host = 0.0 if isinstance(c, Tensor) else c
    total = c if isinstance(c, Tensor) else counts
    aux_loss_partials[(p.blocks,)](
        x, counts.contiguous(), x if padding_mask is None else padding_mask.contiguous().view(torch.uint8), total,
        partials, partials if ticket is None else ticket, loss, const, c_host, start,
        rows, cols, x.stride(0), p.rows_per_block,
        TILE_ROWS=p.tile_rows, TILE_COLS=p.tile_cols, DEVICE_TOTAL=device_total, WIDE=counts.dtype in WIDE_COUNTS,
        PADDING=padding_mask is not None, UNROLL=1 if p.steps == 1 else 4, FINISH=ticket is not None,
        WARPS=warps, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    if ticket is None:
        aux_loss_finish[(1,)](
            partials, total, loss, const, c_host, start, p.blocks, DEVICE_TOTAL=device_total, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip


def forward(
    probs: Tensor, counts: Tensor, c: float | Tensor, start: float, padding_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(loss, const_buf). c: C, or T as a 0-dim int64 tensor, or C as a 0-dim fp32 tensor; start = E * coeff / topk."""
    with torch.cuda.device_of(probs):
        loss = torch.empty((), dtype=probs.dtype, device=probs.device)
        const = torch.empty(2, dtype=torch.float32, device=probs.device)
        _launch(probs, counts, c, start, padding_mask, loss, const, *_scratch_of_stream(probs.device))
        return loss, const


def forward_out(
    probs: Tensor, counts: Tensor, c: float | Tensor, start: float, padding_mask: Tensor | None, out: Tensor,
    const: Tensor, workspace: Tensor,
) -> None:  # fmt: skip
    """The same into given memory, in two launches, with the caller's workspace."""
    with torch.cuda.device_of(probs):
        _launch(probs, counts, c, start, padding_mask, out, const, workspace, None)


def backward(
    const: Tensor, counts: Tensor, grad: Tensor, rows: int, dtype: torch.dtype, padding_mask: Tensor | None
) -> Tensor:
    """d probs [rows, cols] in `dtype`. Without padding all rows are one: it is computed once, and expanded."""
    cols = counts.shape[0]
    distinct = min(rows, 1) if padding_mask is None else rows
    with torch.cuda.device_of(counts):
        out = torch.empty(distinct, cols, dtype=dtype, device=counts.device)
        if out.numel():
            tile_cols = min(triton.next_power_of_2(cols), 1024)
            tile_rows = min(triton.next_power_of_2(distinct), max(1, 4096 // tile_cols))
            aux_loss_backward[(triton.cdiv(distinct, tile_rows), triton.cdiv(cols, tile_cols))](
                const, counts.contiguous(),
                counts if padding_mask is None else padding_mask.contiguous().view(torch.uint8), grad, out, distinct,
                cols, TILE_ROWS=tile_rows, TILE_COLS=tile_cols, WIDE=counts.dtype in WIDE_COUNTS,
                PADDING=padding_mask is not None, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
        return out.expand(rows, cols)
