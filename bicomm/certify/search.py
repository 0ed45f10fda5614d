"""Find the parameters of a fixed-point window from what a fabric returns, without assuming any of them.

Columns (2**e, -2**e, 2**(e - k)) leave 2**(e - k), or +0 where a window drops it. The smallest survivor for each e is
a staircase, g * ceil(e / g) - s: its steps give g and s. Columns (2**127, 2**103, 2**d) are a tie that the smallest of
the three decides, or does not where a window cuts it off: d tells t from its neighbours. Every t from s upwards is held
against all data read so far; those that remain predict every one of these bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from bicomm.certify.candidates import finish
from bicomm.certify.families import power
from bicomm.contract import WINDOW_LIMIT, Contract, window

EXPONENTS = range(-126, 128)
LOWEST = -149


def staircase(world: int, device: torch.device) -> Tensor:
    """The probing columns for every exponent e and survivor e - k >= -149, fp32 [W, N]; dealt to changing ranks."""
    if world < 3:
        raise ValueError("a window is searched with three addends: two cannot cancel and leave a third")
    e, low = _grid(device)
    x = torch.zeros(world, len(e), dtype=torch.float32, device=device)
    large = power(e)
    columns = torch.arange(len(e), device=device)
    start = columns % world
    x[start, columns] = large
    x[(start + 1) % world, columns] = -large
    x[(start + 2) % world, columns] = power(low)
    return x


def dust(world: int, device: torch.device) -> Tensor:
    """The columns that t shows in, fp32 [W, N]: dealt to changing ranks, both signs of each.

    At the largest exponent the window lies highest, so a t that cuts anything off anywhere cuts here.
    """
    d = torch.arange(LOWEST, 103, dtype=torch.int32, device=device).repeat(2)
    columns = torch.arange(len(d), device=device)
    sign = torch.where(columns < len(d) // 2, 1.0, -1.0)
    x = torch.zeros(world, len(d), dtype=torch.float32, device=device)
    x[columns % world, columns] = sign * 2.0**127
    x[(columns + 1) % world, columns] = sign * 2.0**103
    x[(columns + 2) % world, columns] = sign * power(d)
    return x


def _grid(device: torch.device) -> tuple[Tensor, Tensor]:
    pairs = [(e, low) for e in EXPONENTS for low in range(LOWEST, e + 1)]
    e, low = torch.tensor(pairs, dtype=torch.int32, device=device).T
    return e, low


def smallest_survivors(read: Tensor) -> list[int] | str:
    """For each exponent the smallest exponent that survived; a text where the reads are no staircase."""
    _, low = _grid(read.device)
    kept = finish(read) == power(low)
    dropped = read == 0
    if not bool((kept | dropped).all()):
        return "a cancellation left something other than the third addend or zero"
    survivors, start = [], 0
    keep = kept.cpu()
    for e in EXPONENTS:
        width = e + 1 - LOWEST
        column = keep[start : start + width]
        start += width
        first = int(column.to(torch.int8).argmax()) if bool(column.any()) else width
        if not bool(column[first:].all()):
            return f"at 2**{e} a smaller number survived where a larger one was dropped"
        survivors.append(LOWEST + first)
    return survivors


def fit_steps(survivors: Sequence[int]) -> list[tuple[int, int]]:
    """All (g, s) whose staircase is exactly this one, where subnormals or e itself cut it off."""
    steps = list(zip(EXPONENTS, survivors, strict=True))
    informed = [(e, f) for e, f in steps if LOWEST < f <= e]
    if not informed:
        return []  # nothing is dropped, as in an exact sum, or everything is
    e, f = informed[-1]
    fits = [(g, g * -(-e // g) - f) for g in range(1, 129)]
    return [(g, s) for g, s in fits if 1 <= s <= WINDOW_LIMIT and all(_step(e, g, s) == f for e, f in steps)]


def _step(e: int, g: int, s: int) -> int:
    return min(max(g * -(-e // g) - s, LOWEST), e + 1)


def fit_window(steps: Sequence[tuple[int, int]], batches: Sequence[tuple[Tensor, Tensor]]) -> list[Contract]:
    """The windows (g, t, s) that predict every batch (addends, finished reads): eight at most, smallest t first.

    Where t is so large that nothing is ever truncated, all larger ones are the same function.
    """
    # Most t go at the first few columns, and those of `dust`, which were read last, tell most.
    short = [(addends[:, :512], read[:512]) for addends, read in reversed(batches)]

    def fits(g: int, t: int, s: int) -> bool:
        return all(
            torch.equal(window(addends, g, t, s).view(torch.int32), read.view(torch.int32))
            for addends, read in itertools.chain(short, batches)
        )

    found: list[Contract] = []
    for g, s in steps:
        right = (Contract("window", (g, t, s)) for t in range(s, WINDOW_LIMIT + 1) if fits(g, t, s))
        found += itertools.islice(right, 4)
    return found[:8]
