"""A call's header on the device: three int64 words, whose check sum every rank compares, and their text for people."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

import torch

from bicomm.contract import RULES, Contract

OPERATIONS = ("refused", "combine", "combine_rows", "dispatch", "barrier")
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Signature:
    """what: operation, dtype, rule, parameters; shape: hidden and place; tokens: rows and a check sum of splits."""

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
) -> Signature:
    """The words of a call. rows None: a number that may differ between ranks, so that it is not compared."""
    what = 0 if rows is None else 1
    what |= OPERATIONS.index(operation) << 1 | _DTYPES.index(dtype) << 5
    if contract is not None:
        what |= (RULES.index(contract.rule) + 1) << 9
        for shift, value in zip((13, 23, 33), contract.parameters, strict=False):
            what |= value << shift
    arena, offset = place
    shape = hidden << 32 | (arena & 0xFF) << 24 | (offset >> 8 & 0xFFFFFF)
    checksum = zlib.crc32(repr(tuple(splits)).encode()) & 0x7FFFFFFF if splits else 0
    return Signature(what, shape, 0 if rows is None else rows << 31 | checksum)


def describe(what: int, shape: int, tokens: int) -> str:
    """`combine(contract=exact/1, dtype=float32, hidden=2048, rows=64, ...)`."""
    operation = OPERATIONS[what >> 1 & 15]
    if operation in ("refused", "barrier"):
        return f"{operation}()"
    parts = []
    rule = what >> 9 & 15
    if rule:
        parameters = tuple(what >> shift & 1023 for shift in (13, 23, 33)) if RULES[rule - 1] == "window" else ()
        parts.append(f"contract={Contract(RULES[rule - 1], parameters).id}")
    parts += [f"dtype={str(_DTYPES[what >> 5 & 15]).removeprefix('torch.')}", f"hidden={shape >> 32}"]
    if what & 1:
        parts.append(f"rows={tokens >> 31}")
        parts.append(f"check sum of splits={tokens & 0x7FFFFFFF:#x}")
    parts.append(f"place=arena {shape >> 24 & 0xFF}, {(shape & 0xFFFFFF) << 8} bytes in")
    return f"{operation}({', '.join(parts)})"
