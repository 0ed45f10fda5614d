"""Families of inputs that tell ways of adding apart. Each makes fp32 [W, N] from a seeded generator, on its device.

Each is cheap (a few passes over the data), because a measurement reads tens of millions of columns of each. Columns
are dealt to the ranks in changing orders, so that a sum that depends on the order shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor

Family = Callable[[Generator, int, int], Tensor]


def _integers(generator: Generator, low: int, high: int, *shape: int) -> Tensor:
    """int32 in low..high, both included."""
    return torch.randint(low, high + 1, shape, generator=generator, device=generator.device, dtype=torch.int32)


def power(exponent: Tensor) -> Tensor:
    """2**exponent as fp32, subnormals included; 0 below 2**-149."""
    e = exponent.clamp(-150, 127)
    subnormal = torch.where(e < -149, 0, 1 << (e + 149).clamp(0, 22))
    return torch.where(e >= -126, (e + 127) << 23, subnormal.to(torch.int32)).view(torch.float32)


def number(generator: Generator, exponent: Tensor) -> Tensor:
    """Random sign and 23 random bits at a given exponent (clamped to the normal numbers)."""
    bits = _integers(generator, -(2**31), 2**31 - 1, *exponent.shape)
    field = (exponent.clamp(-126, 127) + 127) << 23
    return ((bits & -0x7F800001) | field).view(torch.float32)


def _signs(generator: Generator, n: int) -> Tensor:
    return (_integers(generator, 0, 1, n) * 2 - 1).to(torch.float32)


def _deal(generator: Generator, rows: Sequence[Tensor], world: int) -> Tensor:
    """Give row i of the addends to another rank in each column; zeros where there are fewer rows than ranks."""
    n = rows[0].shape[0]
    x = torch.zeros(world, n, dtype=torch.float32, device=generator.device)
    for i, row in enumerate(rows[:world]):
        x[i] = row
    order = torch.randperm(world, generator=generator, device=generator.device)
    shift = torch.randint(0, world, (n,), generator=generator, device=generator.device)
    return x.gather(0, (order[:, None] + shift) % world)


def _patterns(generator: Generator, world: int, n: int, table: Sequence[Sequence[float]]) -> Tensor:
    """Columns picked from a table of short ones."""
    width = max(map(len, table))
    full = [[*row, *[0.0] * (width - len(row))] for row in table]
    padded = torch.tensor(full, dtype=torch.float32, device=generator.device)
    picked = padded[torch.randint(0, len(table), (n,), generator=generator, device=generator.device)]
    return _deal(generator, list(picked.T), world)


def normal(generator: Generator, world: int, n: int) -> Tensor:
    """The data of a real layer, roughly."""
    return torch.randn(world, n, generator=generator, dtype=torch.float32, device=generator.device)


def spread(generator: Generator, world: int, n: int) -> Tensor:
    """Exponents over +-20 binades: where fp64 chains and exact sums mostly agree, and fp32 orders do not."""
    return number(generator, _integers(generator, -20, 20, world, n))


def wide(generator: Generator, world: int, n: int) -> Tensor:
    """Exponents over the whole range, subnormals included."""
    bits = _integers(generator, -(2**31), 2**31 - 1, world, n)
    finite = torch.where((bits & 0x7F800000) == 0x7F800000, bits ^ 0x40000000, bits)
    return finite.view(torch.float32)


def ties(generator: Generator, world: int, n: int) -> Tensor:
    """A tie of fp32, and dust below it on either side: what double rounding, or a window's depth, gets wrong."""
    e = _integers(generator, -30, 110, n)
    x = number(generator, e)
    deep = 200 * _integers(generator, 0, 1, n)  # half of the dust within the reach of fp64, half far below
    rows = [x, power(e - 24) * x.sign()]
    for _ in range(2):
        depth = 25 + (_integers(generator, 0, 1 << 16, n) * (30 + deep) >> 16)
        rows.append(power(e - depth) * _signs(generator, n))
    return _deal(generator, rows, world)


def cancel(generator: Generator, world: int, n: int) -> Tensor:
    """a - a, and numbers down to the smallest: where a chain, fp64 or a window loses what an exact sum keeps."""
    e = _integers(generator, -20, 110, n)
    a = number(generator, e)
    rest = [number(generator, e - _integers(generator, 0, 110, n)) for _ in range(min(world - 2, 3))]
    rest.append(power(e - _integers(generator, 0, 260, n)) * _signs(generator, n))
    return _deal(generator, [a, -a, *rest], world)


def depths(generator: Generator, world: int, n: int) -> Tensor:
    """a - a, far below it a tie, and dust below the tie: shows how deep addends are kept, or where they are cut."""
    e = _integers(generator, -30, 127, n)
    a = power(e)
    p = e - _integers(generator, 0, 130, n)
    x = number(generator, p)
    dust = power(p - _integers(generator, 20, 200, n)) * _signs(generator, n)
    return _deal(generator, [a, -a, x, power(p - 24) * x.sign(), dust], world)


def split(generator: Generator, world: int, n: int) -> Tensor:
    """[-128, 64, 64, 2**-33, 2**-60] and its kind: one number cancels in pieces, dust stays."""
    e = _integers(generator, -60, 120, n)
    sign = _signs(generator, n)
    first = e - _integers(generator, 1, 60, n)
    dust = power(first - _integers(generator, 1, 60, n)) * _signs(generator, n)
    return _deal(generator, [-sign * power(e), *[sign * power(e - 1)] * 2, power(first), dust], world)


def edges(generator: Generator, world: int, n: int) -> Tensor:
    """Powers of two around the edges of a window's anchors and of fixed-point limbs, the largest cancelling."""
    steps = [-96, -80, -40, -32, -16, 0, 7, 16, 32, 48, 54, 64, 96, 101, 112]
    edge = torch.tensor(steps, dtype=torch.int64, device=generator.device)
    pick = torch.randint(0, len(edge), (n,), generator=generator, device=generator.device)
    e = edge[pick].to(torch.int32) + _integers(generator, -1, 1, n)
    rest = [power(e - _integers(generator, 0, 130, n)) * _signs(generator, n) for _ in range(2)]
    return _deal(generator, [power(e), -power(e), *rest], world)


def order(generator: Generator, world: int, n: int) -> Tensor:
    """(1e8, 1, -1e8, 1) and others of which every order of addition keeps something else."""
    table = [
        [1e8, 1, -1e8, 1], [2.0**24, 1, -(2.0**24), 1], [2.0**60, 1, -(2.0**60), 2.0**-60],
        [2.0**24, 1, 1, -1, 3, -(2.0**24)], [1.5e8, 1, 1, -1e8, -0.5e8, 1], [2.0**100, 2.0**53, 1, -(2.0**100)],
    ]  # fmt: skip
    return _patterns(generator, world, n, table)


def subnormal(generator: Generator, world: int, n: int) -> Tensor:
    """Whole multiples of 2**-149 around the smallest normal number; some columns are subnormal throughout."""
    bits = _integers(generator, 0, 2**25 - 1, world, n) >> _integers(generator, 0, 24, n)
    sign = _integers(generator, 0, 1, world, n) << 31
    return (bits | sign).view(torch.float32)


def overflow(generator: Generator, world: int, n: int) -> Tensor:
    """Sums beyond the largest number on the way, or just beside it at the end."""
    top, half = torch.finfo(torch.float32).max, 2.0**103
    table = [
        [3e38, 3e38, -3e38], [-3e38, -3e38, 3e38, 1.0], [3e38, 3e38], [top, half], [-top, -half], [top, half / 2],
        [top, half, -1.0], [-top, -half, 2.0**-149], [top, top, -top, -half, 1.0], [top, half / 2, half / 4, half / 8],
    ]  # fmt: skip
    return _patterns(generator, world, n, table)


def zeros(generator: Generator, world: int, n: int) -> Tensor:
    """Zeros of both signs; in half of the columns all are -0."""
    negative = _integers(generator, 0, 1, world, n) | _integers(generator, 0, 1, n)
    return (negative << 31).view(torch.float32)


def specials(generator: Generator, world: int, n: int) -> Tensor:
    """NaN and infinities, alone or against each other, among numbers."""
    inf, nan = float("inf"), float("nan")
    table = [
        [inf], [-inf], [nan], [inf, -inf], [inf, inf], [nan, inf], [nan, nan], [3e38, 3e38, -inf], [inf, -3e38],
        [-3e38, -3e38, inf], [1.0, nan, -1.0], [-inf, 2.0**-149, 1.0], [-inf, 3e38, inf],
    ]  # fmt: skip
    return _patterns(generator, world, n, table)


FAMILIES: dict[str, Family] = {
    f.__name__: f
    for f in (
        normal, spread, wide, ties, cancel, depths, split, edges, order, subnormal, overflow, zeros, specials,
    )
}  # fmt: skip
