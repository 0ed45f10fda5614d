"""What a fabric may turn out to be: every class, with a way to predict its bits, the preferred name first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from torch import Tensor

from bicomm.certify.rounding import chain_from, chain_toward_zero, exact_toward_zero, flush, pairwise_tree
from bicomm.contract import EXACT, FP64, GB200_WINDOW, ORDERED, Contract, canonical_nan_

VERDICTS = ("exact", "window", "fp64", "chain", "rotated", "tree", "truncating", "ftz", "flaky", "unknown")
TRUSTED = ("exact", "window")  # the classes that NVLS may run under


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way of adding: predict(addends [W, N], reading rank) -> fp32 [N].

    verdict   its class. variant: which member of the class, for people. contract: where a contract has these bits.
    by_rank   ranks may read different bits of the same addends.
    """

    verdict: str
    variant: str
    predict: Callable[[Tensor, int], Tensor]
    contract: Contract | None = None
    by_rank: bool = False


def finish(x: Tensor) -> Tensor:
    """What every executor does to a sum that it has read: +0 for -0, the canonical NaN."""
    return canonical_nan_(x + 0.0)


def of_contract(contract: Contract) -> Candidate:
    verdict = "chain" if contract.rule == "ordered" else contract.rule
    return Candidate(verdict, contract.id, lambda x, rank: contract.sum(x), contract)


def candidates(world: int, windows: Iterable[Contract] = ()) -> list[Candidate]:
    """All classes for W ranks, the preferred one first where two are the same function (two addends have one sum).

    windows: those that the parameter search found; the published one is always among the candidates.
    """
    found = [*dict.fromkeys([*windows, GB200_WINDOW])]
    bases = [EXACT, *found, FP64, ORDERED]
    ways = [of_contract(c) for c in bases]
    for step in (1, -1):
        for k in range(world):
            if (k, step) != (0, 1):
                ways.append(_fixed(k, step))
        for k in range(world):
            ways.append(_own(world, k, step))
    ways.append(Candidate("tree", "fp32, neighbours first", lambda x, rank: pairwise_tree(x)))
    ways.append(Candidate("truncating", "exact sum, truncated", lambda x, rank: exact_toward_zero(x)))
    ways.append(Candidate("truncating", "fp32 chain, truncated", lambda x, rank: chain_toward_zero(x)))
    for base in (EXACT, found[0], FP64, ORDERED):
        ways += _flushing(base)
    return ways


def _fixed(k: int, step: int) -> Candidate:
    order = "ascending" if step > 0 else "descending"
    return Candidate("rotated", f"fp32 chain, {order} from rank {k}", lambda x, rank: chain_from(x, k, step))


def _own(world: int, k: int, step: int) -> Candidate:
    order = "ascending" if step > 0 else "descending"
    start = "the reading rank" if k == 0 else f"the reading rank + {k}"
    return Candidate(
        "rotated",
        f"fp32 chain, {order} from {start}",
        lambda x, rank: chain_from(x, (rank + k) % world, step),
        by_rank=True,
    )


def _flushing(base: Contract) -> list[Candidate]:
    name = base.id
    return [
        Candidate("ftz", f"{name}, subnormals flushed in and out", lambda x, rank: flush(base.sum(flush(x)))),
        Candidate("ftz", f"{name}, subnormal addends flushed", lambda x, rank: base.sum(flush(x))),
        Candidate("ftz", f"{name}, subnormal sums flushed", lambda x, rank: flush(base.sum(x))),
    ]
