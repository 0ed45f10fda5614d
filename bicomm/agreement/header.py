"""What a rank says about the call it enters, so that ranks which entered different calls learn it at once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import torch

from bicomm.agreement.flags import short
from bicomm.errors import CallMismatch, PeerRefused

NOWHERE = (-1, -1)  # the place of an operand that is an ordinary tensor: it is copied during the call
ACQUIRE = "acquire"  # the operation of a rank whose memory must grow for a buffer
_PER_RANK = ("rows", "refusal", "gradient", "fixed")  # these may differ between the ranks of one call


@dataclasses.dataclass(frozen=True)
class Header:
    """One rank's side of one collective call.

    sequence   how many calls this communicator has made since it was created or recovered.
    operation  combine, dispatch, combine_rows, acquire.
    contract   the id of the contract, or "" where no sum is made.
    dtype      of the operand (and of the product that is summed), without "torch.".
    hidden     columns of the operand; bytes of a buffer to acquire.
    slots      slots a token in combine_rows.
    splits     tokens per rank, or () where each rank knows its own count only.
    place      where the operand lies: (arena, byte offset), the same on every rank; (-1, -1) for an ordinary tensor.
    held       bytes of buffers handed out on this rank, and a check sum of where they lie.
    rows       rows of this rank's operand.
    gradient   what this rank will ask a gradient for: "" or words with a +. The backward pass is collective too, so it
               computes what any rank asks for.
    fixed      this rank can compute nothing beyond that: its program is compiled, or runs without gradients.
    refusal    why this rank refuses its own arguments; "" where it does not.
    """

    sequence: int
    operation: str
    contract: str = ""
    dtype: str = ""
    hidden: int = 0
    slots: int = 0
    splits: tuple[int, ...] = ()
    place: tuple[int, int] = NOWHERE
    held: tuple[int, int] = (0, 0)
    rows: int = 0
    gradient: str = ""
    fixed: bool = False
    refusal: str = ""

    def encode(self) -> bytes:
        """JSON, one line."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def decode(cls, data: bytes) -> Header:
        """What `encode` wrote."""
        fields = json.loads(data)
        for name in ("splits", "place", "held"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    def differences(self, other: Header) -> list[str]:
        """The fields that must be equal on all ranks and are not."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in _PER_RANK]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    def describe(self, fields: list[str]) -> str:
        """`combine(dtype=float32, hidden=2048)`: the call, with the fields that are asked for; of another operation,
        those that it has."""
        if "operation" in fields:
            if self.operation == ACQUIRE:
                return f"{self.operation}({self.hidden:,} bytes)"
            fields = [name for name in ("contract", "dtype", "hidden", "slots", "splits") if getattr(self, name)]
        return f"{self.operation}({', '.join(f'{name}={getattr(self, name)}' for name in fields)})"


def name_of(dtype: torch.dtype) -> str:
    """`float32`: a dtype as headers and messages say it."""
    return str(dtype).removeprefix("torch.")


def check_headers(headers: Sequence[Header]) -> None:
    """Raise PeerRefused or CallMismatch unless all ranks entered the same call. The same outcome on every rank."""
    refusals = [(rank, header.refusal) for rank, header in enumerate(headers) if header.refusal]
    if refusals:
        told = "; ".join(f"rank {rank}: {reason}" for rank, reason in refusals)
        raise PeerRefused(
            f"no rank ran this {headers[refusals[0][0]].operation}, because its arguments were refused: {told}"
        )
    for rank, header in enumerate(headers):
        fields = headers[0].differences(header)
        if fields:
            raise CallMismatch(
                f"ranks entered different calls: rank 0 {headers[0].describe(fields)}, rank {rank} "
                f"{header.describe(fields)}{_hint(fields, headers[0], header)}. Every rank of the group must make the "
                f"same calls in the same order. Nothing was computed; the communicator can be used again"
            )


def _hint(fields: list[str], one: Header, other: Header) -> str:
    acquiring = "operation" in fields and ACQUIRE in (one.operation, other.operation)
    if not acquiring and ("operation" in fields or not {"place", "held"} & set(fields)):
        return ""
    if not acquiring and (one.place == NOWHERE) != (other.place == NOWHERE):
        return ": one operand lies in an acquired buffer and the other, at place (-1, -1), does not"
    return ": buffers were acquired or released in another order, with other sizes, or on some ranks only"


def gradients_of(headers: Sequence[Header]) -> str:
    """What any rank asks a gradient for. Raises CallMismatch where a compiled rank would not compute it."""
    words = [set(header.gradient.split("+")) - {""} for header in headers]
    union = set().union(*words)
    for rank, header in enumerate(headers):
        if header.fixed and words[rank] != union:
            asking = next(r for r, theirs in enumerate(words) if theirs - words[rank])
            raise CallMismatch(
                f"rank {asking} asks for the gradient to {headers[asking].gradient} of this {header.operation}, rank "
                f"{rank} for {header.gradient or 'none'}, and cannot join, being compiled or under no_grad. The "
                f"backward pass is collective: run all ranks with gradients or none, and in compiled code call "
                f"requires_grad_() on an operand that got no tokens. Nothing was computed; the communicator can be "
                f"used again"
            )
    return "+".join(sorted(union))


def check_status(statuses: list[bytes], rank: int) -> None:
    """After the work of a call: raise PeerRefused where another rank could not do its part."""
    failed = [(r, s.decode(errors="replace")) for r, s in enumerate(statuses) if s and r != rank]
    if failed:
        raise PeerRefused("; ".join(f"rank {r} could not do its part of this call: {reason}" for r, reason in failed))


def first_line(error: BaseException) -> str:
    """A reason short enough to publish: the error's type and message, in one line of at most 900 bytes."""
    return short(f"{type(error).__name__}: {error}")
