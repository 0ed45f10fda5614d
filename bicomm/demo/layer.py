"""A Mixture-of-Experts layer in the shape of Qwen3's, small and seeded; no row depends on the rest of the batch.

Router: softmax over all experts, the top-k of it, renormalised. Expert: SwiGLU, with the router's weight at the
activation, so that the combine is a plain sum. Everything that reduces along a row runs in tiles of 64 rows, the last
one padded with zeros: a GEMM may add in another order for other numbers of rows, so here it always gets the same one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from bicomm.contract import Partial
from bicomm.partial import partial_sum
from bicomm.presets import PARTIALS

TILE = 64  # rows; on CPUs fp32 products of 1 to 3 rows were seen to differ from those of more
TREE: Partial = PARTIALS["megatron-vllm-swiglu"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the layer. The defaults are half of Qwen3-30B-A3B's in every dimension but top_k."""

    hidden: int = 1024
    intermediate: int = 384
    experts: int = 64
    top_k: int = 8

    def experts_of(self, rank: int, size: int) -> range:
        """The experts that live on a rank: equal shares as far as possible."""
        return range(rank * self.experts // size, (rank + 1) * self.experts // size)


@dataclasses.dataclass(frozen=True, eq=False)
class Routing:
    """expert: int64 [T, K], the experts of each token by falling score. weight: fp32 [T, K], they sum to about 1."""

    expert: Tensor
    weight: Tensor


def in_tiles(work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`work` on the rows of x [n, C], 64 at a time: [n, D]. What it makes of the zero rows at the end is dropped."""
    done = []
    for rows in x.split(TILE):
        tile = x.new_zeros(TILE, x.shape[1])
        tile[: rows.shape[0]] = rows
        done.append(work(tile)[: rows.shape[0]])
    return torch.cat(done)


def weights(shape: tuple[int, ...], fan_in: int, seed: int, device: torch.device) -> Tensor:
    """Normal weights, drawn on the CPU, so that every device and every rank gets the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") / math.sqrt(fan_in)).to(device)


class Router:
    """Scores tokens against all experts. Every rank has the same one."""

    def __init__(self, shape: Shape, seed: int, device: torch.device) -> None:
        self._top_k = shape.top_k
        self._gate = weights((shape.hidden, shape.experts), shape.hidden, seed, device)

    def __call__(self, hidden: Tensor) -> Routing:
        """hidden: fp32 [T, H]. Equal scores go to the lower expert id."""
        scores = in_tiles(lambda tile: torch.softmax(tile @ self._gate, dim=1), hidden)
        score, expert = scores.sort(dim=1, descending=True, stable=True)
        score = score[:, : self._top_k].contiguous()
        return Routing(expert[:, : self._top_k], in_tiles(lambda tile: tile / tile.sum(1, keepdim=True), score))


class Experts:
    """Some of the layer's experts."""

    def __init__(self, shape: Shape, ids: range, seed: int, device: torch.device) -> None:
        h, i = shape.hidden, shape.intermediate
        self._shape, self._ids = shape, ids
        self._in = [weights((2, h, i), h, seed + 1 + e, device) for e in ids]
        self._down = [weights((i, h), i, seed + 1 + shape.experts + e, device) for e in ids]

    def rows(self, hidden: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """What these experts make of the tokens that chose them: rows fp32 [R, H], and slots int64 [R].

        A slot is token * top_k + k. Rows are in the order of expert id, then slot.
        """
        rows, slots = [hidden.new_empty(0, self._shape.hidden)], [routing.expert.new_empty(0)]
        for number, expert in enumerate(self._ids):
            chosen = (routing.expert.reshape(-1) == expert).nonzero()[:, 0]
            if chosen.numel():
                tokens = hidden[chosen // self._shape.top_k]
                rows.append(self._expert(number, tokens, routing.weight.reshape(-1)[chosen]))
                slots.append(chosen)
        return torch.cat(rows), torch.cat(slots)

    def _expert(self, number: int, tokens: Tensor, weight: Tensor) -> Tensor:
        gate, up = self._in[number].unbind(0)

        def activate(tile: Tensor) -> Tensor:
            g = tile @ gate
            return torch.mul(g / (torch.exp(-g) + 1.0), tile @ up)

        inner = in_tiles(activate, tokens) * weight.unsqueeze(1)
        return in_tiles(lambda tile: tile @ self._down[number], inner)


def addends(rows: Tensor, slots: Tensor, tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Rows in the place of their slots: fp32 [K, T, H], and bool [K, T], where there is one."""
    stacked = rows.new_zeros(top_k, tokens, rows.shape[1])
    present = torch.zeros(top_k, tokens, dtype=torch.bool, device=rows.device)
    stacked[slots % top_k, slots // top_k] = rows
    present[slots % top_k, slots // top_k] = True
    return stacked, present


def partial(rows: Tensor, slots: Tensor, tokens: int, top_k: int) -> Tensor:
    """A rank's partials, fp32 [T, H]: the rows of each token that its experts made, summed by the preset's tree."""
    stacked, present = addends(rows, slots, tokens, top_k)
    return partial_sum(stacked, TREE, present=present)


def row_maps(routing: Routing, shape: Shape, size: int) -> tuple[Tensor, Tensor]:
    """Where each slot's row lies: its number among the rows of a rank, and that rank; int64 [T, K] both."""
    flat = routing.expert.reshape(-1)
    position = torch.empty_like(flat)
    position[torch.argsort(flat, stable=True)] = torch.arange(flat.numel(), device=flat.device)
    rank = torch.empty_like(flat)
    for r in range(size):
        ids = shape.experts_of(r, size)
        here = (flat >= ids.start) & (flat < ids.stop)
        rank[here] = r
        position[here] -= (flat < ids.start).sum()
    return position.view_as(routing.expert), rank.view_as(routing.expert)
