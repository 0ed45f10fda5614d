"""An independent oracle for every contract: rational arithmetic on `fractions.Fraction`, one column at a time.

Nothing here uses the package's arithmetic, torch, or floating-point addition. A Python float is only a box that holds
an fp32, bf16 or fp64 value without loss; each operation turns it into a rational number, computes exactly, and rounds
with `round_to`, which is IEEE 754 rounding to nearest, ties to even, written out.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from fractions import Fraction

FP32 = (24, -126, 127)  # bits of precision, exponents of the smallest and of the largest normal number
BF16 = (8, -126, 127)
FP64 = (53, -1022, 1023)
FORMATS = {"fp32": FP32, "bf16": BF16, "fp64": FP64}
NAN32, NAN16 = 0x7FC00000, 0x7FC0


def power(exponent: int) -> Fraction:
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)


def exponent_of(q: Fraction) -> int:
    """floor(log2 |q|) of a nonzero rational."""
    n, d = abs(q.numerator), q.denominator
    e = n.bit_length() - d.bit_length()
    return e if (n << -e if e < 0 else n) >= (d << e if e > 0 else d) else e - 1


def round_to(q: Fraction, fmt: tuple[int, int, int]) -> float:
    """Round to nearest, ties to even: subnormals kept, infinity beyond the largest number's upper half unit."""
    if q == 0:
        return 0.0
    precision, smallest, largest = fmt
    ulp = power(max(exponent_of(q), smallest) - precision + 1)
    n, rest = divmod(abs(q) / ulp, 1)
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and n % 2 == 1):
        n += 1
    value = n * ulp
    sign = -1 if q < 0 else 1
    if value >= power(largest + 1):
        return sign * math.inf
    return math.copysign(float(value), sign)  # float() of a value that fp64 holds is exact


def float_of(bits: int) -> float:
    """The value of an fp32 bit pattern."""
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]


def bits_of(value: float) -> int:
    """The fp32 bit pattern of a value that fp32 holds; NaN is the canonical one."""
    return NAN32 if math.isnan(value) else struct.unpack("<I", struct.pack("<f", value))[0]


def bf16_bits_of(value: float) -> int:
    """The bf16 bit pattern of an fp32 value rounded to bf16; NaN is the canonical one, a zero keeps its sign."""
    return NAN16 if math.isnan(value) else bits_of(convert(value, "bf16")) >> 16


# ------------------------------------------------------------------------------------------------- single operations


def convert(value: float, name: str) -> float:
    """A value rounded to "fp32", "bf16" or "fp64"."""
    if not math.isfinite(value) or value == 0:
        return value
    return round_to(Fraction(value), FORMATS[name])


def add(a: float, b: float, name: str = "fp32") -> float:
    """One IEEE addition with its rounding."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a + b  # the IEEE rules for NaN and infinities
    total = Fraction(a) + Fraction(b)
    if total == 0:
        return -0.0 if math.copysign(1, a) < 0 and math.copysign(1, b) < 0 else 0.0
    return round_to(total, FORMATS[name])


def multiply(a: float, b: float, name: str = "fp32") -> float:
    """One IEEE multiplication with its rounding."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b
    product = Fraction(a) * Fraction(b)
    sign = math.copysign(1, a) * math.copysign(1, b)
    return math.copysign(round_to(product, FORMATS[name]), sign)


def fused_multiply_add(a: float, b: float, c: float, name: str = "fp32") -> float:
    """a * b + c with one rounding."""
    if not all(map(math.isfinite, (a, b, c))):
        return (a * b if not (math.isfinite(a) and math.isfinite(b)) else 0.0) + c
    total = Fraction(a) * Fraction(b) + Fraction(c)
    if total == 0:
        sign = math.copysign(1, a) * math.copysign(1, b)
        return -0.0 if sign < 0 and math.copysign(1, c) < 0 else 0.0
    return round_to(total, FORMATS[name])


# ------------------------------------------------------------------------------------------------------ whole rules


def _special(xs: Sequence[float]) -> float | None:
    """What NaN and infinities make of a sum that has no order; None where all addends are finite."""
    infinities = {x for x in xs if math.isinf(x)}
    if any(map(math.isnan, xs)) or len(infinities) == 2:
        return math.nan
    return infinities.pop() if infinities else None


def _final(value: float, fmt: str = "fp32") -> float:
    result = convert(value, fmt)
    return 0.0 if result == 0 else result


def ordered(xs: Sequence[float]) -> float:
    acc = 0.0
    for x in xs:
        acc = add(acc, x)
    return _final(acc)


def exact(xs: Sequence[float]) -> float:
    special = _special(xs)
    if special is not None:
        return special
    return round_to(sum(map(Fraction, xs), Fraction(0)), FP32)


def window(xs: Sequence[float], g: int, t: int, s: int) -> float:
    special = _special(xs)
    if special is not None:
        return special
    rationals = [Fraction(x) for x in xs]
    e = max(max(exponent_of(q), -126) if q else -126 for q in rationals)
    anchor = g * -((-e) // g)
    unit = power(anchor - t)
    total = sum((math.trunc(q / unit) * unit for q in rationals), Fraction(0))
    return 0.0 if abs(total) < power(anchor - s) else round_to(total, FP32)


def fp64(xs: Sequence[float]) -> float:
    acc = 0.0
    for x in xs:
        acc = add(acc, x, "fp64")
    return _final(acc)


RULES = {"ordered": ordered, "exact": exact, "owner": exact, "fp64": fp64, "window": window}


def owner(rows: Sequence[float], weights: Sequence[float] | None = None, product: str = "fp32") -> float:
    """The exact sum of one token's expert rows; with weights each addend is the product rounded to fp32 [then bf16]."""
    if weights is None:
        return exact(rows)
    return exact([rounded_product(w, x, product) for w, x in zip(weights, rows, strict=True)])


def rounded_product(weight: float, row: float, product: str) -> float:
    value = multiply(weight, row, "fp32")
    return convert(value, "bf16") if product == "bf16" else value


def partial(
    rows: Sequence[float],
    *,
    order: str = "slot",
    accumulator: str = "exact",
    probability: str = "activation",
    product: str = "fp32",
    weight: str = "fp32",
    weights: Sequence[float] | None = None,
    experts: Sequence[int] | None = None,
) -> float:
    """The tree within a rank for one element: rows in slot order, expert -1 skipped, a weight of 0 not."""
    slots = [i for i in range(len(rows)) if experts is None or experts[i] >= 0]
    if order == "expert":
        assert experts is not None
        slots.sort(key=lambda i: experts[i])
    acc, addends = 0.0, []
    for i in slots:
        if probability == "combine":
            assert weights is not None
            w = convert(weights[i], weight)
            if product == "fma":
                acc = fused_multiply_add(w, rows[i], acc)
                continue
            x = rounded_product(w, rows[i], product)
        else:
            x = rows[i]
        if accumulator == "exact":
            addends.append(x)
        elif accumulator == "bf16":
            acc = convert(add(acc, x, "fp32"), "bf16")
        else:
            acc = add(acc, x, accumulator)
    return exact(addends) if accumulator == "exact" else _final(acc)


def column_bits(rule: str, columns: Iterable[Sequence[float]], parameters: Sequence[int] = ()) -> list[int]:
    """The fp32 bits of `rule` for each column of addends."""
    return [bits_of(RULES[rule](xs, *parameters)) for xs in columns]
