"""A fabric that lies in one channel of ten million: how often each run catches it, and that the full run does."""

from __future__ import annotations

import math

import numpy as np
import torch

from bicomm.certify.emulate import Emulated
from bicomm.certify.measure import CHANNELS, FULL_CHANNELS, measure
from bicomm.contract import exact

ONE_IN = 10_000_000


def test_how_often_a_rare_lie_is_caught() -> None:
    """By the binomial law, and by planting lies in 20,000 runs without summing anything."""
    rng = np.random.default_rng(1)
    for channels, least in ((CHANNELS, 0.81), (FULL_CHANNELS, 0.993)):
        caught = 1 - (1 - 1 / ONE_IN) ** channels
        planted = rng.binomial(channels, 1 / ONE_IN, size=20_000)
        print(
            f"{channels:,} channels: {planted.mean():.2f} lies on average, caught in {(planted > 0).mean():.4f} of runs"
        )
        assert caught > least
        assert abs((planted > 0).mean() - caught) < 0.01
    assert math.ceil(5 * ONE_IN) == FULL_CHANNELS  # five lies are expected


class Liar:
    """Exact, but one ulp off where a hash of the addends says so: in about one channel of ten million."""

    def __init__(self) -> None:
        self.lies, self.channels = 0, 0

    def __call__(self, x: torch.Tensor, rank: int, call: int, blocks: int, alignment: int) -> torch.Tensor:
        total = exact(x)
        words = x.view(torch.int32)
        mixed = (words[0].long() << 32 ^ words[1]).add_(0x1E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> 30)).mul_(-0x40A7B892E31B1A47)
        mixed = (mixed ^ (mixed >> 27)).mul_(-0x6B2FB644ECCEEE15)  # every bit of the input moves the upper half
        lie = (mixed >> 20 & (1 << 40) - 1) < (1 << 40) // ONE_IN
        self.lies += int(lie.sum())
        self.channels += x.shape[1]
        return torch.where(lie, (total.view(torch.int32) + 1).view(torch.float32), total)


def test_the_full_run_catches_one_lie_in_ten_million() -> None:
    """One family of the full run: 50 million channels, read twice."""
    liar = Liar()
    result = measure(Emulated("liar", 3, liar), channels=FULL_CHANNELS, families=["normal"])
    (family,) = result.families
    caught = family["mismatches"]
    print(f"{family['channels']:,} channels: {caught} lies caught, {liar.lies} told in {liar.channels:,} sums")
    assert family["channels"] == FULL_CHANNELS
    assert 1 <= family["mismatches"] <= 16  # five are expected; each was told in both reads and is one channel
    assert liar.lies >= 2 * family["mismatches"]
    assert (result.verdict, result.contract, result.closest) == ("unknown", None, "exact/1")
    example = result.examples["exact"]
    assert example is not None
    assert example["family"] == "normal"
    assert int(example["got"], 16) - int(example["expected"], 16) == 1
