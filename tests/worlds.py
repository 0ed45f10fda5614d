"""Several ranks in one process, each driven by its own thread: for tests that need no real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

import bicomm
from bicomm.communicator import Communicator

M = TypeVar("M")


class Ranks(Generic[M]):
    """One member a rank (a communicator, a FlagSync); calling this calls a function on each, at the same time."""

    def __init__(self, members: Sequence[M]) -> None:
        self.members = list(members)
        self.size = len(self.members)
        self._pool = ThreadPoolExecutor(self.size)

    def __call__(self, work: Callable[[M], Any]) -> list[Any]:
        """What each rank returned. If some raised, the first of their exceptions, after all have ended."""
        outcomes = self.outcomes(work)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def outcomes(self, work: Callable[[M], Any]) -> list[Any]:
        """What each rank returned or raised."""

        def one(member: M) -> Any:
            try:
                return work(member)
            except BaseException as error:  # an interrupt is an outcome too
                return error

        return list(self._pool.map(one, self.members))

    def close(self) -> None:
        self._pool.shutdown()


@contextmanager
def local_ranks(size: int, **arguments: Any) -> Iterator[Ranks[Communicator]]:
    """A local world of `size` communicators."""
    ranks = Ranks(bicomm.local_world(size, **arguments))
    try:
        yield ranks
    finally:
        ranks.close()


def bits(x: Tensor) -> Tensor:
    """The bit patterns of a floating-point tensor."""
    return x.contiguous().view({4: torch.int32, 2: torch.int16, 8: torch.int64}[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
