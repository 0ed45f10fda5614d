"""Columns of addends that break summation: numpy fp32 [N, C] from a seed, one family a function."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Columns = NDArray[np.float32]


def _place(rng: Generator, patterns: list[list[float]], n: int, c: int) -> Columns:
    """Each column holds one pattern (cut to n) in random rows, zeros elsewhere."""
    out = np.zeros((n, c))
    for j in range(c):
        pattern = patterns[rng.integers(len(patterns))][:n]
        out[rng.permutation(n)[: len(pattern)], j] = pattern
    return out.astype(np.float32)


def normal(rng: Generator, n: int, c: int) -> Columns:
    return rng.standard_normal((n, c)).astype(np.float32)


def spread(rng: Generator, n: int, c: int) -> Columns:
    """Exponents over +-60 binades."""
    return np.ldexp(rng.standard_normal((n, c)), rng.integers(-60, 61, (n, c))).astype(np.float32)


def any_bits(rng: Generator, n: int, c: int) -> Columns:
    """Uniform bit patterns of finite fp32 numbers."""
    x = rng.integers(0, 2**32, (n, c), dtype=np.uint32).view(np.float32)
    return np.where(np.isfinite(x), x, np.float32(1.5))


def tie_dust(rng: Generator, n: int, c: int) -> Columns:
    """A tie of fp32, and dust of either sign that breaks it, from one ulp of fp64 down to 2**-80."""
    patterns = []
    for _ in range(64):
        m, k = float(rng.integers(2**23, 2**24)), int(rng.integers(-40, 40))
        dust = float(rng.choice([-1.0, 1.0])) * 2.0 ** -int(rng.integers(20, 80))
        patterns.append([m * 2.0**k, 2.0 ** (k - 1), dust * 2.0**k, -dust * 2.0 ** (k - 3)][: int(rng.integers(3, 5))])
    patterns += [[1.0, 2.0**-24, 2.0**-60], [1.0, 2.0**-24, -(2.0**-60)], [1 + 2.0**-23, 2.0**-24, -(2.0**-60)]]
    return _place(rng, patterns, n, c)


def cancellation(rng: Generator, n: int, c: int) -> Columns:
    """Large addends that cancel and leave small ones, on random ranks."""
    patterns = [[2.0**60, 1, -(2.0**60)], [2.0**24, 1, -(2.0**24)], [1e8, 1, -1e8, 1]]
    for _ in range(64):
        big = float(np.float32(rng.standard_normal() * 2.0 ** int(rng.integers(20, 100))))
        rest = [float(np.float32(rng.standard_normal() * 2.0 ** int(rng.integers(-60, 20)))) for _ in range(4)]
        patterns.append([big, -big, *rest])
        patterns.append([big, big / 2, -big, -big / 2, *rest])
    return _place(rng, patterns, n, c)


def split_cancellation(rng: Generator, n: int, c: int) -> Columns:
    """[-128, 64, 64, 2**-33, 2**-60] and its scalings: one half cancels in pieces, and two dusts stay."""
    patterns = []
    for k in range(-80, 100, 3):
        sign = float(rng.choice([-1.0, 1.0]))
        patterns.append([sign * v * 2.0**k for v in (-128, 64, 64, 2.0**-33, 2.0**-60)])
        patterns.append([sign * v * 2.0**k for v in (-128, 64, 32, 32, 2.0**-33, -(2.0**-57), 2.0**-66)])
    return _place(rng, patterns, n, c)


def bin_edges(rng: Generator, n: int, c: int) -> Columns:
    """Powers of two, and neighbours, that straddle the edges 2**(47 k + 7) of the slices, where carries are born."""
    edges = np.array([7 + 47 * k for k in range(-3, 3)])
    e = edges[rng.integers(len(edges), size=(1, c))] + rng.integers(-2, 48, (n, c))
    x = np.ldexp(rng.choice([-1.0, 1.0], (n, c)), np.clip(e, -149, 127)).astype(np.float32)
    nudge = rng.integers(-1, 2, (n, c)) * (rng.random((n, c)) < 0.3)
    x = (x.view(np.int32) + nudge.astype(np.int32)).view(np.float32)
    half = n // 2
    keep = rng.random((half, c)) < 0.6  # most of one half cancels against the other
    x[half : 2 * half] = np.where(keep, -x[:half], x[half : 2 * half])
    return rng.permuted(x, axis=0)


def straddle(rng: Generator, n: int, c: int) -> Columns:
    """Many addends of one size just under a slice's edge, then half an fp32 ulp of their sum, then dust.

    With more than 128 of them their sum leaves the 53 bits of a slice that has no other above it.
    """
    out = np.zeros((n, c), np.float32)
    count = 1 << (max(n - 2, 1).bit_length() - 1)  # a power of two, with room for two more
    for j in range(c):
        e = int(rng.choice([6 + 47 * k for k in range(-1, 3)]))
        half_ulp = 2.0 ** (e + count.bit_length() - 25)
        dust = float(rng.choice([-1, 1])) * 2.0 ** max(e - 46, -149)
        column = ([2.0**e] * count + [half_ulp, dust, *[0.0] * n])[:n]
        out[:, j] = rng.permutation(column)
    return out


def permutations(rng: Generator, n: int, c: int) -> Columns:
    """(1e8, 1, -1e8, 1) and (2**24, 1, -2**24) in random orders on random ranks: exactly 2 and 1."""
    return _place(rng, [[1e8, 1, -1e8, 1], [2.0**24, 1, -(2.0**24)], [2.0**24, 1, -(2.0**24), 2.0**-20]], n, c)


def subnormal(rng: Generator, n: int, c: int) -> Columns:
    """Multiples of 2**-149 around the smallest normal number, some cancelling into the subnormals."""
    x = rng.integers(-(2**25), 2**25, (n, c)) * (rng.random((n, c)) < 0.8)
    small = rng.integers(-4, 5, (n, c))
    return np.ldexp(np.where(rng.random((1, c)) < 0.5, x, small).astype(np.float64), -149).astype(np.float32)


def overflow(rng: Generator, n: int, c: int) -> Columns:
    """Sums that pass the largest fp32 number on the way, or end beside it: 3e38 + 3e38 - 3e38."""
    top = float(np.finfo(np.float32).max)
    half_ulp = 2.0**103
    patterns = [
        [3e38, 3e38, -3e38], [-3e38, -3e38, 3e38], [3e38, 3e38], [top, half_ulp], [top, half_ulp / 2, half_ulp / 4],
        [top, half_ulp, -1.0], [-top, -half_ulp, 2.0**-149], [top, top, -top, -half_ulp, 1.0],
    ]  # fmt: skip
    return _place(rng, patterns, n, c)


def specials(rng: Generator, n: int, c: int) -> Columns:
    """NaN of any payload and infinities among numbers of every kind, in a few places of a column."""
    table = np.array(
        [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345, 0x80000000, 0, 1, 0x80000001, 0x7F7FFFFF,
         0xFF7FFFFF, 0x3F800000, 0x00800000, 0x007FFFFF], np.uint32
    )  # fmt: skip
    weights = np.array([2.0, 1, 0.3, 0.3, 0.3] + [1.5] * 9)
    choice = rng.choice(len(table), (n, c), p=weights / weights.sum())
    sparse = rng.random((n, c)) < min(1.0, 3 / n)
    return np.where(sparse, table[choice], np.uint32(0x40490FDB)).astype(np.uint32).view(np.float32)


def zeros(rng: Generator, n: int, c: int) -> Columns:
    """Zeros of both signs; a column of -0 only now and then."""
    signs = rng.random((n, c)) < rng.choice([0.5, 1.0], (1, c))
    return np.where(signs, np.float32(-0.0), np.float32(0.0))


FAMILIES: dict[str, Callable[[Generator, int, int], Columns]] = {
    f.__name__: f
    for f in (
        normal, spread, any_bits, tie_dust, cancellation, split_cancellation, bin_edges, straddle, permutations,
        subnormal, overflow, specials, zeros,
    )
}  # fmt: skip
