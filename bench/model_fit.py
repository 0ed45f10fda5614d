"""Fits the cost model to sweeps: time = latency + bytes / rate, one latency and one rate for each series.

Bytes are those over one rank's links where ranks have a GPU each, and those of all ranks in their one memory where they
share it (CPU ranks, a local world). Where a series has six sizes or more, bytes beyond some size may have a rate of
their own: what fits the caches moves faster. Least squares on the relative error, no parameter below zero.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ep_bytes

ENOUGH_FOR_TWO_RATES = 6
ENOUGH_TO_LEAVE_ONE_OUT = 4


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement: a series at one size. bytes: what the model counts. us: microseconds."""

    series: str
    world: int
    tokens: int
    hidden: int
    bytes: float
    us: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """us = latency + min(bytes, knee) * slope + max(bytes - knee, 0) * slope_beyond. Slopes in us a byte."""

    latency: float
    slope: float
    knee: float = float("inf")
    slope_beyond: float = 0.0

    def at(self, nbytes: float) -> float:
        """Microseconds for so many bytes."""
        beyond = max(nbytes - self.knee, 0.0)
        return self.latency + (nbytes - beyond) * self.slope + beyond * self.slope_beyond

    @property
    def rate(self) -> float:
        """GB/s of large calls."""
        slope = self.slope if self.knee == float("inf") else self.slope_beyond
        return 1e-3 / slope if slope else float("inf")


def fit(points: Sequence[Point]) -> Fit:
    """The fit with the least squares of relative errors; a second rate only where it makes their sum less than half."""
    x, y = np.array([p.bytes for p in points]), np.array([p.us for p in points])
    candidates = [float("inf")]
    if len(points) >= ENOUGH_FOR_TWO_RATES:
        candidates += sorted(set(x.tolist()))[1:-2]
    best, least = Fit(0.0, 0.0), float("inf")
    for knee in candidates:
        columns = [np.ones_like(x), np.minimum(x, knee)]
        if knee != float("inf"):
            columns.append(np.maximum(x - knee, 0.0))
        found = _no_negatives(np.stack(columns, 1) / y[:, None])
        left = float(((np.stack(columns, 1) @ found / y - 1.0) ** 2).sum())
        if left < (least if best.knee != float("inf") else 0.5 * least):
            best, least = Fit(*found[:2].tolist(), knee, *found[2:].tolist()), left
    return best


def _no_negatives(a: np.ndarray) -> np.ndarray:
    """x >= 0 with the least |a x - 1|: the best of all choices of columns, of which there are three at most."""
    columns = a.shape[1]
    best, least = np.zeros(columns), float("inf")
    for count in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), count):
            part = a[:, chosen]
            scale = np.abs(part).max(0)
            solved = np.linalg.lstsq(part / scale, np.ones(len(a)), rcond=None)[0] / scale
            left = float(((part @ solved - 1.0) ** 2).sum())
            if (solved >= 0).all() and left < least:
                best, least = np.zeros(columns), left
                best[list(chosen)] = solved
    return best


def points_of(record: dict[str, Any], statistic: str = "us") -> list[Point]:
    """The measurements of a sweep's JSON."""
    points = []
    for row in record["results"]:
        if statistic not in row:
            continue
        counted = record["world"] * row["memory_bytes"] if record["shared"] else row["link_bytes"]
        points.append(Point(row["name"], record["world"], row["tokens"], row["hidden"], counted, row[statistic]))
    return points


def pair_points() -> list[Point]:
    """The table of two H200 in model_data.json, as points."""
    table = json.loads((Path(__file__).parent / "model_data.json").read_text())["two_h200"]
    points = []
    for row, name in itertools.product(table["rows"], table["series"]):
        link = ep_bytes.moved(ep_bytes.PULL, 2, row["tokens"], row["hidden"], 8).link
        points.append(Point(name, 2, row["tokens"], row["hidden"], link, row[name]))
    return points


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A set of measurements with its fits, by series; every point with the model's time and relative error.

    held_out: relative errors of points that the fit was made without, one at a time, where a series has four or more.
    """

    source: str
    fits: dict[str, Fit]
    points: list[tuple[Point, float, float]]
    held_out: list[float]

    @property
    def median_held_out(self) -> float:
        """The median of the same for points left out of the fit that predicts them; nan where there are none."""
        return statistics.median(map(abs, self.held_out)) if self.held_out else float("nan")

    @property
    def median_error(self) -> float:
        """The median of |model / measured - 1|."""
        return statistics.median(abs(error) for _, _, error in self.points)


def fit_all(source: str, points: Sequence[Point]) -> Fitted:
    """A fit for each series."""
    names = list(dict.fromkeys(p.series for p in points))
    fits = {name: fit([p for p in points if p.series == name]) for name in names}
    told = [(p, fits[p.series].at(p.bytes), fits[p.series].at(p.bytes) / p.us - 1.0) for p in points]
    left_out = []
    for name in names:
        own = [p for p in points if p.series == name]
        if len(own) >= ENOUGH_TO_LEAVE_ONE_OUT:
            left_out += [fit([q for q in own if q is not p]).at(p.bytes) / p.us - 1.0 for p in own]
    return Fitted(source, fits, told, left_out)
