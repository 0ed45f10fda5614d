"""What the combine kernels cost on one GPU: W = 8 local buffers, no barriers, beside torch's own sums and a copy.

python bench/combine.py            every kernel, sizes from 8 to 4096 tokens
python bench/combine.py --tune     also tiles, warps and blocks (another 40 s); --tune owner for the owner combine alone
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import common
import torch

from bicomm.kernels import exact, gather, ordered, owner
from bicomm.kernels.call import Gather, Pull, Reduce, Tile

W, TOPK = 8, 8
SIZES = ((8, 2048), (64, 7168), (512, 2048), (4096, 2048), (4096, 7168))
DEVICE = torch.device("cuda")
Row = dict[str, Any]


def _addresses(buffers: torch.Tensor) -> torch.Tensor:
    return torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64, device=DEVICE)


def _row(what: str, tokens: int, hidden: int, us: float, nbytes: int, copy: float) -> Row:
    rate = nbytes / us / 1e3
    return {
        "what": what,
        "tokens": tokens,
        "hidden": hidden,
        "us": us,
        "MB": nbytes / 1e6,
        "GB/s": rate,
        "of copy": rate / copy,
    }


def reductions(tokens: int, hidden: int, copy: float) -> list[Row]:
    """The contracts over eight fp32 buffers, and what torch offers for the same sum."""
    buffers = torch.randn(W, tokens, hidden, device=DEVICE)
    hard = buffers * torch.exp2(torch.randint(-60, 61, buffers.shape, device=DEVICE).float())
    out = torch.empty(tokens, hidden, device=DEVICE)

    def call(data: torch.Tensor) -> Reduce:
        return Reduce(_addresses(data), 0, 0, hidden, out, start=0, count=tokens * hidden)

    normal, wide = call(buffers), call(hard)
    compiled = torch.compile(lambda x: x.sum(0))
    timed: dict[str, Callable[[], object]] = {
        "ordered": lambda: ordered.reduce(normal),
        "fp64": lambda: ordered.reduce(normal, accumulator=torch.float64),
        "exact": lambda: exact.reduce(normal),
        "window(16,95,86)": lambda: exact.reduce(normal, (16, 95, 86)),
        "exact, every element hard": lambda: exact.reduce(wide),
        "torch.sum of a stacked copy": lambda: torch.sum(buffers, 0, out=out),
        "torch.compile of that sum": lambda: compiled(buffers),
    }
    nbytes = (W + 1) * tokens * hidden * 4
    return [_row(name, tokens, hidden, common.time_graph(fn), nbytes, copy) for name, fn in timed.items()]


def owners(tokens: int, hidden: int, copy: float) -> list[Row]:
    """Top-k bf16 rows of a token, from random ranks, summed exactly."""
    rows = torch.randn(W, tokens * TOPK // W, hidden, device=DEVICE).bfloat16()
    shuffled = torch.randperm(tokens * TOPK, device=DEVICE).view(tokens, TOPK)
    held = rows.shape[1]
    ranks, places = shuffled // held, shuffled % held
    weights = torch.rand(tokens, TOPK, device=DEVICE)
    out = torch.empty(tokens, hidden, device=DEVICE)
    nbytes = tokens * hidden * (TOPK * 2 + 4)
    timed = []
    for name, given in (("owner, bf16 rows", None), ("owner, bf16 rows, weighted", weights)):
        call = Pull(
            peers=_addresses(rows), offset=0, rank=0, dtype=torch.bfloat16, out=out, row_of_slot=places,
            rank_of_slot=ranks, weights=given, rows=held,
        )  # fmt: skip
        timed.append(_row(name, tokens, hidden, common.time_graph(lambda c=call: owner.pull(c)), nbytes, copy))
    flat = rows.view(-1, hidden)
    index = shuffled.view(-1)
    peer = common.time_graph(lambda: torch.sum(flat[index].view(tokens, TOPK, hidden).float(), 1, out=out))
    return [*timed, _row("torch: gather the rows, sum in fp32", tokens, hidden, peer, nbytes, copy)]


def dispatches(tokens: int, hidden: int, copy: float) -> list[Row]:
    """All ranks' bf16 tokens, one below the other; `tokens` counts those of all ranks."""
    share = max(1, tokens // W)
    rows = torch.randn(W, share, hidden, device=DEVICE).bfloat16()
    out = torch.empty(W * share, hidden, dtype=torch.bfloat16, device=DEVICE)
    call = Gather(peers=_addresses(rows), offset=0, rank=0, out=out, splits=(share,) * W)
    nbytes = 2 * out.numel() * 2
    return [
        _row("dispatch, bf16", W * share, hidden, common.time_graph(lambda: gather.gather(call)), nbytes, copy),
        _row("torch.cat", W * share, hidden, common.time_graph(lambda: torch.cat(list(rows), out=out)), nbytes, copy),
    ]


def tune_owner(copy: float) -> list[Row]:
    """The best launches of the owner combine: none of them changes a bit."""
    found = []
    for tokens, hidden in ((64, 7168), (4096, 2048), (4096, 7168)):
        rows = torch.randn(W, tokens * TOPK // W, hidden, device=DEVICE).bfloat16()
        shuffled = torch.randperm(tokens * TOPK, device=DEVICE).view(tokens, TOPK)
        held, out = rows.shape[1], torch.empty(tokens, hidden, device=DEVICE)
        pull = Pull(_addresses(rows), 0, 0, torch.bfloat16, out, shuffled % held, shuffled // held, rows=held)
        times = []
        for block, warps, per_sm in itertools.product((512, 1024, 2048), (2, 4, 8), (2, 4, 8, 16)):
            if 4 <= block // (32 * warps) <= 16:
                tile = Tile(block, warps, per_sm)
                times.append((common.time_graph(lambda c=pull, t=tile: owner.pull(c, tile=t), replays=11), tile))
        for us, tile in sorted(times, key=lambda pair: pair[0])[:3]:
            found.append(_row(f"owner, {tile}", tokens, hidden, us, tokens * hidden * (TOPK * 2 + 4), copy))
    return found


def tune(copy: float) -> list[Row]:
    """The same for the reductions."""
    found = []
    for tokens, hidden in ((8, 2048), (512, 2048), (4096, 2048), (4096, 7168)):
        buffers = torch.randn(W, tokens, hidden, device=DEVICE)
        out = torch.empty(tokens, hidden, device=DEVICE)
        call = Reduce(_addresses(buffers), 0, 0, hidden, out, start=0, count=tokens * hidden)
        for name, module in (("ordered", ordered), ("exact", exact)):
            times = []
            for block, warps, per_sm in itertools.product((512, 1024, 2048), (4, 8), (2, 4, 8, 16)):
                if block // (32 * warps) < 4:
                    continue
                tile = Tile(block, warps, per_sm)
                us = common.time_graph(lambda m=module, c=call, t=tile: m.reduce(c, tile=t), replays=11)
                times.append((us, tile))
            for us, tile in sorted(times, key=lambda pair: pair[0])[:3]:
                row = _row(f"{name}, {tile}", tokens, hidden, us, (W + 1) * tokens * hidden * 4, copy)
                found.append(row)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", nargs="?", const="all", choices=("all", "owner"))
    given = parser.parse_args()
    common.need_gpu()
    bandwidth = common.copy_bandwidth()
    empty = common.empty_kernel_time()
    measured = []
    for size in SIZES:
        measured += reductions(*size, bandwidth) + owners(*size, bandwidth) + dispatches(*size, bandwidth)
    common.save("combine", measured, copy_GBps=bandwidth, empty_kernel_us=empty)
    common.table(f"combine, W = {W}, top-k {TOPK}; copy {bandwidth:.0f} GB/s, an empty kernel {empty:.2f} us", measured)
    if given.tune:
        best = tune_owner(bandwidth) + (tune(bandwidth) if given.tune == "all" else [])
        common.save("combine_tune", best, copy_GBps=bandwidth)
        common.table("best launches", best)
