"""Emulated fabrics: ways in which hardware may add, run through the same measuring code as the hardware itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from bicomm.certify.rounding import chain_from, exact_toward_zero, flush, pairwise_tree
from bicomm.contract import exact, fp64, ordered, window

Reduction = Callable[[Tensor, int, int, int, int], Tensor]  # addends [W, N], rank, call, blocks, alignment -> [N]


class Emulated:
    """A `Fabric` in one process: any function of the addends, the reading rank, and how the read was made."""

    def __init__(self, name: str, world_size: int, reduction: Reduction, device: str = "cpu") -> None:
        if world_size < 2:
            raise ValueError(f"a fabric joins at least two ranks, got a world size of {world_size}")
        self.name = f"emulated:{name}"
        self.world_size = world_size
        self.device = torch.device(device)
        some = range(world_size) if world_size <= 16 else (0, 1, world_size // 2, world_size - 1)
        self.readers = tuple(some)
        self._reduction = reduction

    def reduce(self, addends: Tensor, *, rank: int, call: int, blocks: int, alignment: int) -> Tensor:
        return self._reduction(addends, rank, call, blocks, alignment)

    def traffic(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


def _flaky(x: Tensor, rank: int, call: int, blocks: int, alignment: int) -> Tensor:
    return ordered(x if call % 2 == 0 else x.flip(0))


EMULATIONS: dict[str, Reduction] = {
    "exact": lambda x, rank, call, blocks, alignment: exact(x),
    "window": lambda x, rank, call, blocks, alignment: window(x, 16, 95, 86),
    "window2": lambda x, rank, call, blocks, alignment: window(x, 24, 72, 65),
    "fp64": lambda x, rank, call, blocks, alignment: fp64(x),
    "chain": lambda x, rank, call, blocks, alignment: ordered(x),
    "rotated": lambda x, rank, call, blocks, alignment: chain_from(x, rank, 1),
    "tree": lambda x, rank, call, blocks, alignment: pairwise_tree(x),
    "truncating": lambda x, rank, call, blocks, alignment: exact_toward_zero(x),
    "ftz": lambda x, rank, call, blocks, alignment: flush(exact(flush(x))),
    "flaky": _flaky,
}


def emulated(name: str, world_size: int = 8, device: str = "cpu") -> Emulated:
    """The emulated fabric of that name. Raises ValueError that lists the names."""
    if name not in EMULATIONS:
        raise ValueError(f"unknown emulation {name!r}: expected one of {', '.join(EMULATIONS)}")
    return Emulated(name, world_size, EMULATIONS[name], device)
