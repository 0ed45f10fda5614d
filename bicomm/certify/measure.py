"""Measure a fabric: read families of inputs, drop every class that mispredicts a bit, name the one that is left.

Each batch is read twice, once on quiet links and once beside other traffic, with changing block counts, alignments
and (where one process can) reading ranks. A class is dropped at its first wrong bit, and that column is kept as its
counter-example. Control flow depends on arguments only, never on what was read, so that all ranks stay in step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from bicomm.certify.candidates import Candidate, candidates, finish
from bicomm.certify.fabric import ALIGNMENTS, BLOCKS, Fabric
from bicomm.certify.families import FAMILIES
from bicomm.certify.search import dust, fit_steps, fit_window, smallest_survivors, staircase
from bicomm.certify.verdict import Result, merge
from bicomm.contract import Contract

CHANNELS, FULL_CHANNELS = 1 << 24, 50_000_000
PROBE = {"ties": 1 << 15, "depths": 1 << 15}  # columns of the first look, 4,096 of the others
BATCH = {"cpu": 1 << 16, "cuda": 1 << 22}  # columns a read
NOTHING_DROPPED = "no window: nothing is dropped"
Reads = list[tuple[str, Tensor, list[tuple[int, Tensor]]]]  # family, addends, (rank, what it read)
Gather = Callable[[Any], Sequence[Any]]
Progress = Callable[[str, int], None]  # called with a family and the columns just done


@dataclasses.dataclass
class Track:
    """A candidate that is still compared: how many columns it got wrong, and the first of them."""

    candidate: Candidate
    wrong: int = 0
    example: dict[str, Any] | None = None


def measure(
    fabric: Fabric,
    *,
    channels: int = CHANNELS,
    families: Sequence[str] | None = None,
    seed: int = 0,
    progress: Progress = lambda family, n: None,
    gather: Gather = lambda mine: [mine],
) -> Result:
    """Name the class of a fabric. Collective on hardware: all ranks call it with the same arguments.

    channels: columns per family. gather: an object of each rank to all ranks, in rank order.
    Raises ValueError for no channels or an unknown family.
    """
    names = list(FAMILIES) if families is None else list(families)
    unknown = [name for name in names if name not in FAMILIES]
    if unknown or channels < 1:
        raise ValueError(f"expected families of {', '.join(FAMILIES)} and channels >= 1, got {unknown}, {channels}")
    run = _Run(fabric, seed)
    run.probe(list(FAMILIES))
    for name in names:
        for n in _batches(channels, BATCH[fabric.device.type]):
            run.batch(name, n)
            progress(name, n)
    return merge(list(gather(run.report())))


def _batches(total: int, most: int) -> Iterator[int]:
    while total > 0:
        yield min(total, most)
        total -= most


def hexadecimal(x: Tensor) -> list[str]:
    return [f"0x{v & 0xFFFFFFFF:08x}" for v in x.reshape(-1).view(torch.int32).tolist()]


def differing(a: Tensor, b: Tensor) -> Tensor:
    return a.view(torch.int32) != b.view(torch.int32)


class _Run:
    def __init__(self, fabric: Fabric, seed: int) -> None:
        self.fabric, self.calls = fabric, 0
        self.generator = Generator(fabric.device).manual_seed(seed)
        self.tracks: list[Track] = []
        self.varies: set[str] = set()
        self.flaky: dict[str, Any] | None = None
        self.families: dict[str, list[int]] = {}
        self.observed: dict[str, str] = {}
        self.search = ""
        self.inputs = 0  # a check sum: ranks that made different addends would measure nothing
        self.closest: Track | None = None

    # ------------------------------------------------------------------------------------------------------ reading

    def addends(self, family: str, n: int) -> Tensor:
        x = FAMILIES[family](self.generator, self.fabric.world_size, n)
        self.inputs = (31 * self.inputs + int(x.view(torch.int32).sum(dtype=torch.int64))) % (1 << 61)
        return x

    def read(self, x: Tensor, rank: int, blocks: int = BLOCKS[0], alignment: int = 0) -> Tensor:
        self.calls += 1
        return self.fabric.reduce(x, rank=rank, call=self.calls - 1, blocks=blocks, alignment=alignment)

    def same(self, what: str, family: str, x: Tensor, rank: int, first: Tensor, second: Tensor) -> None:
        wrong = differing(finish(first), finish(second))
        if bool(wrong.any()):
            self.varies.add(what)
            if self.flaky is None and what != "rank":
                self.flaky = self.example(f"differs by {what}", family, x, rank, wrong, second, first)

    def example(
        self, variant: str, family: str, x: Tensor, rank: int, wrong: Tensor, got: Tensor, expected: Tensor
    ) -> dict[str, Any]:
        i = int(wrong.to(torch.int8).argmax())
        return {
            "variant": variant,
            "family": family,
            "rank": rank,
            "addends": hexadecimal(x[:, i]),
            "got": hexadecimal(got[i])[0],
            "expected": hexadecimal(expected[i])[0],
        }

    # ------------------------------------------------------------------------------------------------- a first look

    def probe(self, names: Sequence[str]) -> None:
        """Read a little of every family in every way, search for a window, and drop most classes."""
        reads: Reads = []
        for name in names:
            x = self.addends(name, PROBE.get(name, 4096))
            reads.append((name, x, self.in_every_way(name, x)))
        self.look(reads)
        windows = self.find_windows(reads)
        self.tracks = [Track(c) for c in candidates(self.fabric.world_size, windows)]
        for name, x, by_rank in reads:
            for rank, read in by_rank:
                self.compare(name, x, rank, read)
        if all(track.wrong for track in self.tracks):
            self.closest = self.nearest_contract(reads)

    def in_every_way(self, name: str, x: Tensor) -> list[tuple[int, Tensor]]:
        """Read one batch as every rank, and by the first of them in all other ways too: (rank, read) of each rank."""
        first, *others = self.fabric.readers
        base = self.read(x, first)
        for _ in range(4):
            self.same("call", name, x, first, base, self.read(x, first))
        for blocks in BLOCKS[1:]:
            self.same("blocks", name, x, first, base, self.read(x, first, blocks=blocks))
        for alignment in ALIGNMENTS[1:]:
            self.same("alignment", name, x, first, base, self.read(x, first, alignment=alignment))
        by_rank = [(first, base)]
        for rank in others:
            by_rank.append((rank, self.read(x, rank)))
            self.same("rank", name, x, rank, base, by_rank[-1][1])
        return by_rank

    def look(self, reads: Reads) -> None:
        """Note what the fabric makes of -0 and NaN before `finish`: no contract depends on it, but people ask."""
        by_name = {name: (x, by_rank[0][1]) for name, x, by_rank in reads}
        x, read = by_name["zeros"]
        negative = (x.view(torch.int32) < 0).all(0)
        self.observed["all addends -0"] = ", ".join(sorted(set(hexadecimal(read[negative]))))
        self.observed["zeros of both signs"] = ", ".join(sorted(set(hexadecimal(read[~negative]))))
        x, read = by_name["specials"]
        self.observed["nan"] = ", ".join(sorted(set(hexadecimal(read[torch.isnan(read)])))[:8])

    def find_windows(self, reads: Reads) -> list[Contract]:
        """The windows that predict all reads so far; the columns that they are searched with join these reads."""
        world, first = self.fabric.world_size, self.fabric.readers[0]
        if world < 3:
            self.search = "two addends: no window can be told from an exact sum"
            return []
        x = staircase(world, self.fabric.device)
        read = self.read(x, first)
        deep = dust(world, self.fabric.device)
        reads += [("staircase", x, [(first, read)]), ("dust", deep, [(first, self.read(deep, first))])]
        survivors = smallest_survivors(read)
        if isinstance(survivors, str):
            self.search = f"no window: {survivors}"
            return []
        steps = fit_steps(survivors)
        if not steps:
            lost = sum(f > -149 for f in survivors)
            self.search = f"no window: {lost} exponents lose small sums, in no even steps" if lost else NOTHING_DROPPED
            return []
        windows = fit_window(steps, [(x, finish(by_rank[0][1])) for _, x, by_rank in reads])
        fitted = ", ".join(f"g = {g}, s = {s}" for g, s in steps)
        self.search = f"steps of {fitted}; " + (", ".join(w.id for w in windows) or "no t from s to 512 fits the rest")
        return windows

    def nearest_contract(self, reads: Reads) -> Track:
        """Of the classes that have a contract, the one that gets the fewest of the first columns wrong."""
        tracks = [Track(t.candidate) for t in self.tracks if t.candidate.contract]
        for track in tracks:
            for _, x, by_rank in reads:
                expected = finish(track.candidate.predict(x, by_rank[0][0]))
                track.wrong += int(differing(finish(by_rank[0][1]), expected).sum())
        return min(tracks, key=lambda t: t.wrong)

    # ------------------------------------------------------------------------------------------------- in earnest

    def batch(self, name: str, n: int) -> None:
        """Read n columns twice, quiet and beside traffic, and hold both against the classes that are left."""
        x = self.addends(name, n)
        turn = self.calls // 2
        rank = self.fabric.readers[turn % len(self.fabric.readers)]
        quiet = self.read(x, rank, BLOCKS[turn % 4], ALIGNMENTS[turn // 4 % 4])
        with self.fabric.traffic():
            busy = self.read(x, rank, BLOCKS[(turn + 1) % 4], ALIGNMENTS[(turn // 4 + 1) % 4])
        self.same("repeat", name, x, rank, quiet, busy)
        seen = self.families.setdefault(name, [0, 0])
        seen[0] += n
        seen[1] += self.compare(name, x, rank, quiet, busy)

    def compare(self, name: str, x: Tensor, rank: int, *reads: Tensor) -> int:
        """Hold reads of x against every class that is left; the columns that the best one gets wrong."""
        alive = [t for t in self.tracks if t.wrong == 0]
        finished = [finish(read) for read in reads]
        counts = []
        for track in alive or ([self.closest] if self.closest else []):
            expected = finish(track.candidate.predict(x, rank))
            wrong = differing(finished[0], expected)
            for read in finished[1:]:
                wrong |= differing(read, expected)
            count = int(wrong.sum())
            if count and track.example is None:
                got = next(read for read in finished if bool(differing(read, expected).any()))
                first = differing(got, expected)
                track.example = self.example(track.candidate.variant, name, x, rank, first, got, expected)
            track.wrong += count
            counts.append(count)
        if alive:
            self.closest = min(alive, key=lambda t: t.wrong)
        return min(counts, default=0)

    def report(self) -> dict[str, Any]:
        """What this rank found, as plain data."""
        return {
            "tracks": [
                {
                    "verdict": t.candidate.verdict,
                    "variant": t.candidate.variant,
                    "contract": t.candidate.contract.id if t.candidate.contract else None,
                    "wrong": t.wrong,
                    "example": t.example,
                }
                for t in self.tracks
            ],
            "varies": sorted(self.varies),
            "flaky": self.flaky,
            "families": {name: list(counts) for name, counts in self.families.items()},
            "observed": self.observed,
            "search": self.search,
            "inputs": self.inputs,
            "closest": self.closest.candidate.variant if self.closest else None,
        }
