"""What the combine kernels cost on one GPU: W = 8 local buffers, no barriers, beside torch's own sums and a copy.

python bench/combine.py            every kernel, sizes from 8 to 4096 tokens
python bench/combine.py --tune     also the best launches (some minutes); --tune owner or dispatch: of one kernel
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import common
import torch

from bicomm import exact, gather, ordered, owner
from bicomm.call import Gather, Pull, Reduce, Tile

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


# (elements a block, warps, registers a thread), each tried with several blocks a multiprocessor. Fewer registers let
# more blocks run at once; more elements a thread keep more loads on their way.
Shapes = tuple[tuple[int, int, tuple[int | None, ...]], ...]
ORDERED_TILES: Shapes = ((512, 4, (None,)), (1024, 4, (None,)), (1024, 8, (None,)), (2048, 8, (None,)))
DISPATCH_TILES: Shapes = ((512, 4, (None,)), (1024, 4, (None,)), (2048, 8, (None,)), (4096, 8, (None,)))
EXACT_TILES: Shapes = (
    (512, 4, (None, 80, 128)), (1024, 4, (None, 104)), (1024, 8, (None, 80, 128)), (2048, 8, (None, 104)),
)  # fmt: skip
OWNER_TILES: Shapes = (
    (512, 4, (80, 104)), (1024, 4, (None, 80, 104)), (1024, 2, (None, 128, 168)), (1024, 8, (64, 80)),
    (2048, 4, (None, 128, 168)),
)  # fmt: skip


def _tiles(shapes: Shapes) -> Iterator[Tile]:
    for block, warps, registers in shapes:
        for most, per_sm in itertools.product(registers, (2, 8, 16)):
            yield Tile(block, warps, per_sm, most)


def tune_owner(copy: float) -> list[Row]:
    """The best launches of the owner combine: none of them changes a bit."""
    found = []
    for tokens, hidden in ((64, 7168), (4096, 2048), (4096, 7168)):
        rows = torch.randn(W, tokens * TOPK // W, hidden, device=DEVICE).bfloat16()
        shuffled = torch.randperm(tokens * TOPK, device=DEVICE).view(tokens, TOPK)
        held, out = rows.shape[1], torch.empty(tokens, hidden, device=DEVICE)
        pull = Pull(_addresses(rows), 0, 0, torch.bfloat16, out, shuffled % held, shuffled // held, rows=held)
        times = []
        for tile, cascade in itertools.product(_tiles(OWNER_TILES), (True, False)):
            us = common.time_graph(lambda c=pull, t=tile, p=cascade: owner.pull(c, tile=t, cascade=p), replays=11)
            times.append((us, f"owner in {'pairs' if cascade else 'fp64'}, {tile}"))
        for us, what in sorted(times)[:4]:
            found.append(_row(what, tokens, hidden, us, tokens * hidden * (TOPK * 2 + 4), copy))
    return found


def tune_dispatch(copy: float) -> list[Row]:
    """The best launches of the dispatch."""
    found = []
    for tokens, hidden in ((8, 2048), (512, 2048), (4096, 2048), (4096, 7168)):
        rows = torch.randn(W, tokens // W, hidden, device=DEVICE).bfloat16()
        out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=DEVICE)
        call = Gather(_addresses(rows), 0, 0, out, (tokens // W,) * W)
        times = []
        for tile, planned in itertools.product(_tiles(DISPATCH_TILES), (True, False)):
            us = common.time_graph(lambda c=call, t=tile, p=planned: gather.gather(c, tile=t, planned=p), replays=11)
            times.append((us, f"dispatch{' by plan' if planned else ''}, {tile}"))
        for us, what in sorted(times)[:3]:
            found.append(_row(what, tokens, hidden, us, 4 * out.numel(), copy))
    return found


def tune(copy: float) -> list[Row]:
    """The same for the reductions."""
    found = []
    for tokens, hidden in ((8, 2048), (512, 2048), (4096, 2048), (4096, 7168)):
        buffers = torch.randn(W, tokens, hidden, device=DEVICE)
        out = torch.empty(tokens, hidden, device=DEVICE)
        call = Reduce(_addresses(buffers), 0, 0, hidden, out, start=0, count=tokens * hidden)
        sums: dict[str, tuple[Callable[[Tile], object], Shapes]] = {
            "ordered": (lambda t, c=call: ordered.reduce(c, tile=t), ORDERED_TILES),
            "exact in fp64": (lambda t, c=call: exact.reduce(c, tile=t, cascade=False), EXACT_TILES),
            "exact in pairs": (lambda t, c=call: exact.reduce(c, tile=t, cascade=True), EXACT_TILES),
        }
        for name, (launch, tiles) in sums.items():
            times = [
                (common.time_graph(lambda f=launch, t=tile: f(t), replays=11), f"{name}, {tile}")
                for tile in _tiles(tiles)
            ]
            for us, what in sorted(times)[:3]:
                found.append(_row(what, tokens, hidden, us, (W + 1) * tokens * hidden * 4, copy))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", nargs="?", const="all", choices=("all", "owner", "dispatch"))
    given = parser.parse_args()
    bandwidth = common.copy_bandwidth()
    empty = common.empty_kernel_time()
    measured = []
    for size in SIZES:
        measured += reductions(*size, bandwidth) + owners(*size, bandwidth) + dispatches(*size, bandwidth)
    common.save("combine", measured, copy_GBps=bandwidth, empty_kernel_us=empty)
    common.table(f"combine, W = {W}, top-k {TOPK}; copy {bandwidth:.0f} GB/s, an empty kernel {empty:.2f} us", measured)
    if given.tune:
        wanted = [tune_owner, tune_dispatch, tune]
        if given.tune != "all":
            wanted = [tune_owner if given.tune == "owner" else tune_dispatch]
        best = [row for search in wanted for row in search(bandwidth)]
        common.save("combine_tune", best, copy_GBps=bandwidth)
        common.table("best launches", best)
