"""Router and auxiliary loss on one GPU, beside their peers and bounds, under CUDA graphs.

    python bench/router.py                 everything, and the bounds that the project set (below a minute)
    python bench/router.py --tune          launch shapes of the top-k router instead (below 40 s)

The peer of the auxiliary loss is the same kernel with one float atomic a block, kept here only: the sum it gives
depends on which block comes first.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from typing import Any

import common
import torch
import triton
import triton.language as tl

from bicomm.model_hooks import aux_loss_kernel, router, router_kernel, scores
from bicomm.model_hooks.aux_loss import coefficient, fused_moe_aux_loss
from bicomm.model_hooks.aux_loss_order import Partition
from bicomm.model_hooks.gate import gate

CUDA = torch.device("cuda")
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
EXPERTS = (32, 64, 128, 256, 512)


@triton.jit
def _tile(probs, r, last, c, cols, row_stride):
    return tl.load(probs + r * row_stride + c, mask=(r < last) & (c < cols), other=0.0)


@triton.jit
def atomic_aux_loss(
    probs, counts, loss, c, rows, cols, row_stride, rows_per_block,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    first = block.to(tl.int64) * rows_per_block
    last = tl.minimum(first + rows_per_block, rows)
    lane_row = tl.arange(0, TILE_ROWS)[:, None]
    lane_col = tl.arange(0, TILE_COLS)[None, :]
    partial = 0.0
    for col in range(0, cols, TILE_COLS):
        c_index = col + lane_col
        n = tl.load(counts + c_index, mask=c_index < cols, other=0).to(tl.float32)
        acc = tl.zeros([TILE_ROWS, TILE_COLS], tl.float32)
        for base in range(0, rows_per_block, TILE_ROWS * UNROLL):
            r = first + base + lane_row
            if UNROLL == 4:
                x0 = _tile(probs, r, last, c_index, cols, row_stride)
                x1 = _tile(probs, r + TILE_ROWS, last, c_index, cols, row_stride)
                x2 = _tile(probs, r + 2 * TILE_ROWS, last, c_index, cols, row_stride)
                x3 = _tile(probs, r + 3 * TILE_ROWS, last, c_index, cols, row_stride)
                acc = acc + x0 + x1 + x2 + x3
            else:
                acc += _tile(probs, r, last, c_index, cols, row_stride)
        partial += tl.sum(tl.sum(acc * n, axis=1), axis=0)
    tl.atomic_add(loss, partial * c)


def atomic_forward(
    probs: torch.Tensor, counts: torch.Tensor, c: float, zero: bool = True, warps: int | None = None
) -> torch.Tensor:
    """The atomic peer. zero=False leaves out the zeroing that a real call needs: a floor, not a peer."""
    rows, cols = probs.shape
    loss = torch.zeros((), device=CUDA) if zero else torch.empty((), device=CUDA)
    p = Partition.of(rows, cols)
    atomic_aux_loss[(p.blocks,)](
        probs, counts, loss, c, rows, cols, probs.stride(0), p.rows_per_block, TILE_ROWS=p.tile_rows,
        TILE_COLS=p.tile_cols, UNROLL=1 if p.steps == 1 else 4,
        num_warps=warps or aux_loss_kernel.warps_of(p),
    )  # fmt: skip
    return loss


def unfused(probs: torch.Tensor, counts: torch.Tensor, c: float) -> torch.Tensor:
    return torch.sum(probs.sum(dim=0) * counts) * c


def with_gradient(loss: Callable[[torch.Tensor], torch.Tensor], leaf: torch.Tensor) -> Callable[[], object]:
    """Forward and gradient, as the layer before would get it: an expanded row stays one."""
    return lambda: torch.autograd.grad(loss(leaf), leaf)


def with_backward(loss: Callable[[torch.Tensor], torch.Tensor], leaf: torch.Tensor) -> Callable[[], None]:
    """Forward and `backward()` into a leaf, which writes the gradient out in full."""

    def step() -> None:
        leaf.grad = None
        loss(leaf).backward()

    return step


def auxiliary(copy: float) -> list[dict[str, Any]]:
    rows = []
    for tokens, experts in itertools.product(TOKENS, EXPERTS):
        probs = torch.softmax(torch.randn(tokens, experts, device=CUDA), -1)
        counts = torch.randint(1, tokens, (experts,), device=CUDA)
        c = coefficient(experts, 0.01, 8, tokens)
        start = coefficient(experts, 0.01, 8, 1)
        workspace = torch.empty(256, device=CUDA)
        out, const = torch.empty((), device=CUDA), torch.empty(2, device=CUDA)
        leaf = probs.clone().requires_grad_()
        nbytes = probs.numel() * 4

        def ours(p: torch.Tensor = probs, n: torch.Tensor = counts, k: float = c, s: float = start) -> object:
            return aux_loss_kernel.forward(p, n, k, s, None)

        def peer(p: torch.Tensor = probs, n: torch.Tensor = counts, k: float = c, w: int | None = None) -> object:
            return atomic_forward(p, n, k, warps=w)

        def floor(p: torch.Tensor = probs, n: torch.Tensor = counts, k: float = c) -> object:
            return atomic_forward(p, n, k, zero=False)

        def given(p=probs, n=counts, k=c, s=start, o=out, b=const, w=workspace) -> object:  # type: ignore[no-untyped-def]
            return aux_loss_kernel.forward_out(p, n, k, s, None, o, b, w)

        def fused(p: torch.Tensor, n: torch.Tensor = counts, t: int = tokens, e: int = experts) -> torch.Tensor:
            return fused_moe_aux_loss(p, n, t, e, 8, 0.01, True)

        def plain(p: torch.Tensor, n: torch.Tensor = counts, k: float = c) -> torch.Tensor:
            return unfused(p, n, k)

        row: dict[str, Any] = {"what": "auxiliary loss", "T": tokens, "E": experts}
        row["us"] = common.time_graph(ours)
        row["with workspace"] = common.time_graph(given)
        row["atomic"] = min(common.time_graph(peer), common.time_graph(lambda p=peer: p(w=8)))  # its better launch
        row["atomic, not zeroed"] = common.time_graph(floor)
        row["speed against atomic"] = row["atomic"] / row["us"]
        if nbytes >= 32 << 20:
            row["cold us"] = common.time_graph(ours, cold=True)
            row["of copy bandwidth"] = nbytes / row["cold us"] / 1e3 / copy
            row["atomic cold us"] = common.time_graph(peer, cold=True)
        row["forward and gradient"] = common.time_graph(with_gradient(fused, leaf))
        row["torch"] = common.time_graph(with_gradient(plain, leaf))
        row["speed against torch"] = row["torch"] / row["forward and gradient"]
        row["into a leaf"] = common.time_graph(with_backward(fused, leaf))
        row["torch into a leaf"] = common.time_graph(with_backward(plain, leaf))
        row["speed into a leaf"] = row["torch into a leaf"] / row["into a leaf"]
        rows.append(row)
    return rows


def torch_topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = torch.topk(torch.softmax(x, -1, dtype=torch.float32), k, dim=-1)
    return values / values.sum(-1, keepdim=True), ids


def topk(empty: float) -> list[dict[str, Any]]:
    rows = []
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("softmax, renormalised", {"renormalize": True}),
        ("softmax after top-k", {"pre_softmax": False}),
        ("sigmoid, bias, 8 groups", {"score_function": "sigmoid", "num_groups": 8, "group_topk": 4}),
    ]
    for tokens, experts, k in ((64, 256, 8), (8192, 128, 8), (8192, 256, 8)):
        for name, more in kinds:
            for dtype in (torch.float32, torch.bfloat16) if experts == 256 else (torch.float32,):
                x = torch.randn(tokens, experts, device=CUDA).to(dtype)
                if "num_groups" in more:
                    more["expert_bias"] = torch.randn(experts, device=CUDA)
                took = common.time_graph(lambda x=x, k=k, more=more: router.route(x, k, **more))
                row = {"what": f"top-k, {name}", "T": tokens, "E": experts, "k": k, "logits": str(dtype)[6:],
                       "us": took, "above an empty kernel": took - empty}  # fmt: skip
                row["torch"] = common.time_graph(lambda x=x, k=k: torch_topk(x, k))
                leaf = x.clone().requires_grad_()
                row["forward and backward"] = common.time_graph(
                    with_backward(lambda y, k=k, more=more: router.route(y, k, **more).weights.sum(), leaf)
                )
                rows.append(row)
    return rows


def tune_topk() -> list[dict[str, Any]]:
    """Rows a program and warps: eight launch shapes, which change times and no bits."""
    rows = []
    rule = scores.Rule(8, renormalize=True)
    for shape in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (8, 4)):
        for tokens, experts in ((64, 256), (8192, 128), (8192, 256)):
            x = torch.randn(tokens, experts, device=CUDA)
            weights, ids = torch.empty(tokens, 8, device=CUDA), torch.empty(tokens, 8, dtype=torch.int64, device=CUDA)
            grad = torch.randn(tokens, 8, device=CUDA)

            def forward(x=x, w=weights, i=ids, s=shape) -> object:  # type: ignore[no-untyped-def]
                return router_kernel.run_forward(
                    x, None, None, None, rule, weights=w, ids=i, dense=None, routing_map=None, shape=s
                )

            def backward(x=x, i=ids, g=grad, s=shape) -> object:  # type: ignore[no-untyped-def]
                return router_kernel.run_backward(x, None, i, g, rule, dense=False, shape=s)

            forward()
            rows.append(
                {"what": "tune top-k", "T": tokens, "E": experts, "rows": shape[0], "warps": shape[1],
                 "us": common.time_graph(forward), "backward": common.time_graph(backward)}
            )  # fmt: skip
    return sorted(rows, key=lambda r: (r["T"], r["E"], r["us"]))


def gates() -> list[dict[str, Any]]:
    rows = []
    for tokens, hidden, experts in (
        (1, 2048, 128),
        (64, 2048, 128),
        (8192, 2048, 128),
        (64, 7168, 256),
        (8192, 7168, 256),
    ):
        x = torch.randn(tokens, hidden, device=CUDA, dtype=torch.bfloat16)
        w = torch.randn(experts, hidden, device=CUDA, dtype=torch.bfloat16)
        with torch.no_grad():
            took = common.time_graph(lambda x=x, w=w: gate(x, w))
        peer = common.time_graph(lambda x=x, w=w: torch.mm(x, w.t(), out_dtype=torch.float32))
        rows.append({"what": "gate, bf16 to fp32", "T": tokens, "K": hidden, "E": experts, "us": took, "cuBLAS": peer})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tune", action="store_true")
    arguments = parser.parse_args()
    common.need_gpu()
    if arguments.tune:
        tuned = tune_topk()
        common.save("router_tune", tuned)
        common.table("top-k router by launch shape (us)", tuned)
        return
    copy, empty = common.copy_bandwidth(), common.empty_kernel_time()
    losses, chosen, linear = auxiliary(copy), topk(empty), gates()
    large = [r for r in losses if "of copy bandwidth" in r]
    main_topk = next(r for r in chosen if (r["T"], r["E"]) == (8192, 256))
    small = next(r for r in chosen if (r["T"], r["E"]) == (64, 256))

    def mean(key: str) -> float:
        return math.exp(sum(math.log(r[key]) for r in losses) / len(losses))

    summary = [
        {"bound": "auxiliary loss against the atomic path, geometric mean (x)", "want": ">= 1.00",
         "got": mean("speed against atomic")},
        {"bound": "share of copy bandwidth from 32 MB, cold, least", "want": ">= 0.80",
         "got": min(r["of copy bandwidth"] for r in large)},
        {"bound": "forward and gradient against torch, geometric mean (x)", "want": ">= 5",
         "got": mean("speed against torch")},
        {"bound": "forward and backward into a leaf against torch, geometric mean (x)", "want": ">= 5",
         "got": mean("speed into a leaf")},
        {"bound": "forward and gradient against torch, least (x)", "want": ">= 5",
         "got": min(r["speed against torch"] for r in losses)},
        {"bound": "top-k, T = 8192, E = 256, k = 8 (us)", "want": "<= 15", "got": main_topk["us"]},
        {"bound": "top-k, T = 64 above an empty kernel (us)", "want": "<= 2", "got": small["above an empty kernel"]},
    ]  # fmt: skip
    common.save(
        "router", losses + chosen + linear, summary=summary, copy_GB_per_s=copy, empty_kernel_us=empty,
    )  # fmt: skip
    common.table("auxiliary loss (us)", losses)
    common.table("top-k router (us)", chosen)
    common.table("gate (us)", linear)
    common.table("bounds", summary)


if __name__ == "__main__":
    main()
