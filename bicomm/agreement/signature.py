"""A call's header on the device: three int64 words, whose check sum every rank compares, and their text for people."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence

import torch

from bicomm.agreement.header import name_of
from bicomm.contract import RULES, Contract

OPERATIONS = ("refused", "combine", "combine_rows", "dispatch", "barrier")
_DTYPES = (  # their places are what ranks compare, so they are names: another torch may lack some
    "float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool", "float8_e4m3fn",
    "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "uint16", "uint32",
    "uint64", "complex32", "complex64", "complex128",
)  # fmt: skip
_GRADIENTS = ("x", "rows", "weights")  # what a rank may ask a gradient for
_PRODUCTS = ("no weights", "product float32", "product bfloat16")

# Where a part of `what` begins, and its bits.
_OPERATION, _DTYPE, _RULE, _PARAMETERS, _GRADIENT, _PRODUCT = (1, 4), (5, 5), (10, 4), (14, 30), (44, 3), (47, 2)


@dataclasses.dataclass(frozen=True)
class Signature:
    """what: operation, dtype, rule, parameters, gradients, product; shape: hidden and place; tokens: rows and a check
    sum of splits, or slots."""

    what: int
    shape: int
    tokens: int

    @property
    def mark(self) -> int:
        """A check sum of 24 bits that travels in the flags: 1 in 16 million other headers has the same."""
        return zlib.crc32(repr((self.what, self.shape, self.tokens)).encode()) & 0xFFFFFF


def sign(
    operation: str,
    dtype: torch.dtype,
    contract: Contract | None,
    hidden: int,
    place: tuple[int, int],
    rows: int | None,
    splits: Sequence[int] = (),
    *,
    gradient: str = "",
    slots: int = 0,
    product: torch.dtype | None = None,
) -> Signature:
    """The words of a call. rows None: a number that may differ between ranks, so that it is not compared.

    gradient: what this rank will ask a gradient for, "" or words with a +. slots, product: of combine_rows. Raises
    TypeError for a dtype that no call carries.
    """
    what = _what(operation, dtype, contract, gradient, product)
    arena, offset = place
    shape = hidden << 32 | (arena & 0xFF) << 24 | (offset >> 8 & 0xFFFFFF)
    if rows is None:
        return Signature(what, shape, slots)
    checksum = zlib.crc32(repr(tuple(splits)).encode()) & 0x7FFFFFFF if splits else 0
    return Signature(what | 1, shape, rows << 31 | checksum)


@functools.lru_cache(maxsize=256)
def _what(
    operation: str, dtype: torch.dtype, contract: Contract | None, gradient: str, product: torch.dtype | None
) -> int:
    """The first word, without its lowest bit, which says that rows are compared."""
    if name_of(dtype) not in _DTYPES:
        raise TypeError(f"{operation} does not carry {name_of(dtype)}: expected one of {', '.join(_DTYPES)}")
    what = OPERATIONS.index(operation) << _OPERATION[0] | _DTYPES.index(name_of(dtype)) << _DTYPE[0]
    if contract is not None:
        what |= (RULES.index(contract.rule) + 1) << _RULE[0]
        for at, value in enumerate(contract.parameters):
            what |= value << _PARAMETERS[0] + 10 * at
    for at, word in enumerate(_GRADIENTS):
        what |= (word in gradient.split("+")) << _GRADIENT[0] + at
    if product is not None:
        what |= _PRODUCTS.index(f"product {name_of(product)}") << _PRODUCT[0]
    return what


def describe(what: int, shape: int, tokens: int) -> str:
    """`combine(contract=exact/1, dtype=float32, hidden=2048, rows=64, ...)`."""
    operation = OPERATIONS[_part(what, _OPERATION)]
    if operation in ("refused", "barrier"):
        return f"{operation}()"
    parts = []
    rule = _part(what, _RULE)
    if rule:
        packed = _part(what, _PARAMETERS)
        parameters = tuple(packed >> shift & 1023 for shift in (0, 10, 20)) if RULES[rule - 1] == "window" else ()
        parts.append(f"contract={Contract(RULES[rule - 1], parameters).id}")
    parts += [f"dtype={_DTYPES[_part(what, _DTYPE)]}", f"hidden={shape >> 32}"]
    if what & 1:
        parts.append(f"rows={tokens >> 31}")
        parts.append(f"check sum of splits={tokens & 0x7FFFFFFF:#x}")
    elif operation == "combine_rows":
        parts += [f"slots={tokens}", _PRODUCTS[_part(what, _PRODUCT)]]
    asked = [word for at, word in enumerate(_GRADIENTS) if _part(what, _GRADIENT) >> at & 1]
    parts.append(f"gradient={'+'.join(asked) or 'none'}")
    parts.append(f"place=arena {shape >> 24 & 0xFF}, {(shape & 0xFFFFFF) << 8} bytes in")
    return f"{operation}({', '.join(parts)})"


def is_refusal(what: int) -> bool:
    """Whether the first word of a header is that of a rank which refused its arguments."""
    return _part(what, _OPERATION) == OPERATIONS.index("refused")


def hint(one: Sequence[int], other: Sequence[int]) -> str:
    """What to do where two calls differ in the gradients alone that their ranks ask for; else ""."""
    first, bits = _GRADIENT
    apart = one[0] ^ other[0]
    if tuple(one[1:]) != tuple(other[1:]) or not apart or apart & ~(((1 << bits) - 1) << first):
        return ""
    return (
        ". The backward pass is collective, and on GPUs no rank learns in time what another asks for: run all ranks "
        "with gradients or none, and call requires_grad_() on an operand that got no tokens"
    )


def _part(what: int, field: tuple[int, int]) -> int:
    first, bits = field
    return what >> first & (1 << bits) - 1
