"""How operands reach the ranks that sum them: what every transport offers, and the course of one host-side call."""

from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from bicomm.arguments import splits_of
from bicomm.contract import Contract
from bicomm.errors import NoSharedMemory, PeerTimeout
from bicomm.header import Header, check_headers, check_status, first_line
from bicomm.symmem.arenas import Place

P = TypeVar("P")
R = TypeVar("R")
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

    def shares(self, splits: Any, rows: int | None) -> Shares:
        """Tokens per rank: checked against the rows of the operand, where these are all ranks' tokens."""
        return splits_of(splits, rows, self.size)

    def rows_of(self, shares: Shares, capacity: int) -> int:
        """Rows of this rank's result: its share, or the capacity where only the device knows the share."""
        return capacity if isinstance(shares, Tensor) else shares[self.rank]

    @abc.abstractmethod
    def combine(self, x: Tensor, splits: Shares, contract: Contract, out: Tensor, place: Place | None) -> None:
        """Sum every rank's slice of x [sum(splits), H] for this rank's tokens into out [splits[rank], H]."""

    @abc.abstractmethod
    def combine_rows(self, operands: Rows, contract: Contract, out: Tensor, place: Place | None) -> None:
        """Sum the top-k rows of this rank's tokens into out [t, H], wherever the rows are."""

    @abc.abstractmethod
    def dispatch(self, x: Tensor, splits: Shares | None, out: Tensor | None, capacity: int | None) -> Tensor:
        """Every rank's x [splits[rank], H], one below the other: [sum(splits), H], in `out` where one is given."""

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

    def close(self) -> None:
        """Let go of everything. Not collective."""
        self.suspend()


class HostCalls:
    """The course of a call that the host drives. One call at a time on a rank."""

    def __init__(self, sync: Sync) -> None:
        self.sync = sync
        self._sequence = 0
        self._lock = threading.Lock()

    def run(
        self,
        header: Header,
        publish: Callable[[list[Header]], P],
        consume: Callable[[list[Header], P], R],
        refusal: Exception | None = None,
    ) -> R:
        """Exchange headers; every rank publishes its operand; every rank consumes the others'.

        All ranks agree after each of the three steps, so they leave a call that fails anywhere together and can make
        the next one. Raises `refusal` itself where one is given; else PeerRefused, CallMismatch, PeerTimeout, or what
        `publish` or `consume` raised.
        """
        with self._lock:
            self._sequence += 1
            header = dataclasses.replace(header, sequence=self._sequence)
            if refusal is not None:
                header = dataclasses.replace(header, refusal=first_line(refusal))
            try:
                headers = [Header.decode(data) for data in self.sync.exchange(header.encode())]
            except Exception as error:
                if refusal is not None:  # what this rank's caller can mend comes first
                    raise refusal from error
                raise
            if refusal is not None:
                raise refusal
            check_headers(headers)
            published = self._step(lambda: publish(headers))
            return self._step(lambda: consume(headers, published))

    def _step(self, work: Callable[[], R]) -> R:
        failure: Exception | None = None
        try:
            result = work()
        except PeerTimeout:
            raise  # the group has given up already
        except Exception as error:
            failure = error
        except BaseException as error:  # an interrupt: nobody knows how far this rank came
            self.sync.abort(first_line(error))
            raise
        agreed = failure is None or isinstance(failure, NoSharedMemory)  # that one, all ranks raise by themselves
        statuses = self.sync.exchange(b"" if agreed else first_line(failure).encode())  # type: ignore[arg-type]
        if failure is not None:
            raise failure
        check_status(statuses, self.sync.rank)
        return result

    def recover(self) -> None:
        """Go on, all ranks together, from call 1."""
        self.sync.recover()
        self._sequence = 0
