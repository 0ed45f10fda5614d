"""How operands reach the ranks that sum them: what every transport offers."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from bicomm.arguments import splits_of
from bicomm.contract import Contract
from bicomm.errors import BicommError
from bicomm.symmem.arenas import Place

Shares = tuple[int, ...] | Tensor  # tokens per rank: on the host, or an int64 tensor [W] on the GPU


class Sync(Protocol):
    """Agreement between the ranks: `flags.FlagSync` in shared memory, `agree.StoreSync` over a store."""

    rank: int
    size: int
    timeout: float

    def exchange(self, message: bytes) -> list[bytes]:
        """Give every rank this rank's message and get all of them; a full barrier."""

    def check(self) -> None:
        """Raise if the group has given up."""

    def abort(self, reason: str) -> None:
        """Make the group give up."""

    def recover(self) -> None:
        """Go on, all ranks together."""

    def close(self) -> None:
        """Tell the others that this rank will not come again."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a rank will ask a gradient for in the backward pass of its next call.

    words: "" or "x", "rows", "weights", "rows+weights". fixed: compiled code, which can compute nothing beyond.
    """

    words: str = ""
    fixed: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The operands of the `owner` combine on one rank.

    rows          [R, H], this rank's expert rows, fp32 or bf16.
    row_of_slot   [t, K], for each of this rank's tokens and slots, a row of the rank that has it.
    rank_of_slot  [t, K], that rank; -1 where the slot is not routed.
    weights       [t, K] fp32 or None; the product weight * row is rounded to product_dtype (fp32 or bf16).
    """

    rows: Tensor
    row_of_slot: Tensor
    rank_of_slot: Tensor
    weights: Tensor | None
    product_dtype: torch.dtype


class Transport(abc.ABC):
    """One rank's side of a group's data path.

    Calls are collective. Arguments are checked before, except for what only the group can know. `refusal` is the reason
    why this rank's own arguments are bad: it is published, so that the others learn it, and raised here.
    """

    name: str
    rank: int
    size: int
    asked: Asked = Asked()  # set before a call

    @property
    def agreed(self) -> str | None:
        """What any rank asked a gradient for in the last call; None where the hosts did not tell each other."""
        return None

    def shares(self, splits: Any, rows: int | None) -> Shares:
        """Tokens per rank: checked against the rows of the operand, where these are all ranks' tokens."""
        return splits_of(splits, rows, self.size)

    def rows_of(self, shares: Shares, capacity: int) -> int:
        """Rows of this rank's result: its share, or the capacity where only the device knows the share."""
        return capacity if isinstance(shares, Tensor) else shares[self.rank]

    @abc.abstractmethod
    def combine(
        self, x: Tensor, splits: Shares, contract: Contract, out: Tensor, place: Place | None, switch: bool = False
    ) -> None:
        """Sum every rank's slice of x [sum(splits), H] for this rank's tokens into out [splits[rank], H].

        switch: by the NVLink switch, where the plan says so.
        """

    @abc.abstractmethod
    def combine_rows(self, operands: Rows, contract: Contract, out: Tensor, place: Place | None) -> None:
        """Sum the top-k rows of this rank's tokens into out [t, H], wherever the rows are."""

    @abc.abstractmethod
    def dispatch(self, x: Tensor, splits: Shares | None, out: Tensor | None, capacity: int | None) -> Tensor:
        """Every rank's x [splits[rank], H], one below the other: [sum(splits), H], in `out` where one is given."""

    def switch_refusal(self) -> str:
        """Why the NVLink switch, once confirmed, is not trusted any more; "" where nothing happened."""
        return ""

    def exchange_counts(self, own: int | Tensor) -> Tensor:
        """Every rank's count: int64 [W]."""
        mine = torch.tensor([[int(own)]], dtype=torch.int64, device="cpu")
        return self.dispatch(mine, (1,) * self.size, None, None).view(self.size)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.exchange_counts(0)

    @abc.abstractmethod
    def refuse(self, operation: str, refusal: Exception) -> None:
        """Publish why this rank does not run the call, then raise that."""

    @abc.abstractmethod
    def take(self, nbytes: int) -> Place:
        """A place in symmetric memory; collective where it must grow."""

    @abc.abstractmethod
    def release(self, place: Place) -> None:
        """Give a place back."""

    @abc.abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes of symmetric memory on this rank: `held` and `in_use`."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise if the group has given up."""

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Make the group give up."""

    @abc.abstractmethod
    def recover(self) -> None:
        """Go on, all ranks together."""

    @abc.abstractmethod
    def suspend(self) -> None:
        """Give the symmetric memory back; the next call takes it again, all ranks together."""

    def find(self, x: Tensor) -> bool:
        """Whether a tensor's memory is symmetric memory of this transport."""
        return False

    def close(self) -> None:
        """Let go of everything. Not collective."""
        self.suspend()


class Closed:
    """What stands in a closed communicator's place."""

    name = "closed"

    def __getattr__(self, name: str) -> NoReturn:
        raise BicommError("this communicator was closed: make a new one")
