"""The same tokens in several batches: what a batch-invariant layer must not notice."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """ids: int64 [T], which tokens of the text, in the order of the batch. splits: how many of them each rank owns."""

    name: str
    ids: Tensor
    splits: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.ids.numel()

    def owned(self, rank: int) -> slice:
        """The rows of the batch that a rank owns."""
        first = sum(self.splits[:rank])
        return slice(first, first + self.splits[rank])


def even(tokens: int, size: int) -> tuple[int, ...]:
    """Equal shares as far as possible: no padding, so any number of tokens goes."""
    return tuple((rank + 1) * tokens // size - rank * tokens // size for rank in range(size))


def uneven(tokens: int, size: int) -> tuple[int, ...]:
    """Shares that grow with the rank from none on rank 0; one rank alone has all."""
    whole = max(1, size * (size - 1) // 2)
    edges = [rank * (rank - 1) // 2 * tokens // whole for rank in range(size)] + [tokens]
    return tuple(after - before for before, after in itertools.pairwise(edges))


def first(tokens: int, size: int) -> Batch:
    """The batch that the others are compared with: tokens in the order of the text."""
    return Batch("in order", torch.arange(tokens, device="cpu"), even(tokens, size))


def others(tokens: int, strangers: int, size: int, seed: int) -> list[Batch]:
    """The first batch's tokens in another order, among others, and a few of them alone; on other owners each time."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(tokens, generator=generator, device="cpu")
    mixed = torch.randperm(tokens + strangers, generator=generator, device="cpu")
    few = torch.randperm(tokens, generator=generator, device="cpu")[: max(1, min(24, tokens // 2))]
    alone = (0,) * (size - 1) + (few.numel(),)
    return [
        Batch(
            "other order, uneven owners, none on rank 0" if size > 1 else "other order", shuffled, uneven(tokens, size)
        ),
        Batch(f"among {strangers} others", mixed, even(mixed.numel(), size)),
        Batch(f"{few.numel()} of them alone, owned by rank {size - 1}", few, alone),
    ]
