"""What a rank says about the call it enters, so that ranks which entered different calls learn it at once."""

from __future__ import annotations

import dataclasses
import json

from bicomm.errors import CallMismatch, PeerRefused

_PER_RANK = ("rows", "refusal")  # these may differ between the ranks of one call


@dataclasses.dataclass(frozen=True)
class Header:
    """One rank's side of one collective call.

    sequence   how many calls this communicator has made since it was created or recovered.
    operation  combine, dispatch, combine_rows, grow.
    contract   the id of the contract, or "" where no sum is made.
    dtype      of the operand, as torch prints it, without "torch.".
    hidden     columns of the operand.
    splits     tokens per rank, or () where each rank knows its own count only.
    place      where the operand lies: (arena, byte offset), the same on every rank.
    rows       rows of this rank's operand.
    refusal    why this rank refuses its own arguments; "" where it does not.
    """

    sequence: int
    operation: str
    contract: str = ""
    dtype: str = ""
    hidden: int = 0
    splits: tuple[int, ...] = ()
    place: tuple[int, int] = (0, 0)
    rows: int = 0
    refusal: str = ""

    def encode(self) -> bytes:
        """JSON, one line."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Header:
        """What `encode` wrote."""
        fields = json.loads(data)
        fields["splits"], fields["place"] = tuple(fields["splits"]), tuple(fields["place"])
        return cls(**fields)

    def differences(self, other: Header) -> list[str]:
        """The fields that must be equal on all ranks and are not."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in _PER_RANK]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    def describe(self, fields: list[str]) -> str:
        """`combine(dtype=float32, hidden=2048)`: the call, with the fields that are asked for."""
        shown = ", ".join(f"{name}={getattr(self, name)}" for name in fields if name != "operation")
        return f"{self.operation}({shown})"


def check_headers(headers: list[Header]) -> None:
    """Raise PeerRefused or CallMismatch unless all ranks entered the same call. The same outcome on every rank."""
    refusals = [(rank, header.refusal) for rank, header in enumerate(headers) if header.refusal]
    if refusals:
        told = "; ".join(f"rank {rank}: {reason}" for rank, reason in refusals)
        raise PeerRefused(f"no rank ran this {headers[refusals[0][0]].operation}, because its arguments were refused: {told}")
    for rank, header in enumerate(headers):
        fields = headers[0].differences(header)
        if fields:
            raise CallMismatch(
                f"ranks entered different calls: rank 0 {headers[0].describe(fields)}, rank {rank} "
                f"{header.describe(fields)}. Every rank of the group must make the same calls in the same order"
                + (_ORDER_HINT if fields == ["place"] else "")
                + ". Nothing was computed; the communicator can be used again"
            )


_ORDER_HINT = "; here the operands lie at different places, so buffers were acquired or released in another order"


def check_status(statuses: list[bytes], rank: int) -> None:
    """After the work of a call: raise PeerRefused where another rank could not do its part."""
    failed = [(r, s.decode(errors="replace")) for r, s in enumerate(statuses) if s and r != rank]
    if failed:
        raise PeerRefused("; ".join(f"rank {r} could not do its part of this call: {reason}" for r, reason in failed))


def first_line(error: BaseException) -> str:
    """A reason short enough to publish: the error's type and message, at most 900 bytes."""
    text = f"{type(error).__name__}: {error}"
    return text.encode()[:900].decode(errors="ignore")


