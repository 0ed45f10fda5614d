"""The course of a call that the host drives: the base of the transports that need no device barrier."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from torch import Tensor

from bicomm.agreement.header import NOWHERE, Header, check_headers, check_status, first_line, gradients_of, name_of
from bicomm.errors import BicommError, NoSharedMemory, PeerTimeout
from bicomm.symmem.arenas import Place
from bicomm.transports.base import Rows, Shares, Sync, Transport

P = TypeVar("P")
R = TypeVar("R")


class HostCalls:
    """Calls of one rank, one at a time."""

    def __init__(self, sync: Sync) -> None:
        self.sync = sync
        self.agreed: str | None = None  # what any rank asks a gradient for, of the last call
        self._sequence = 0
        self._lock = threading.Lock()
        self._process = os.getpid()

    def check_process(self) -> None:
        """Raise BicommError in a fork: what it writes would be taken for its parent's word."""
        if self._process != os.getpid():
            raise BicommError(
                f"this process was forked from process {self._process}, which is rank {self.sync.rank} of this "
                f"communicator, and is no rank itself: call it in that process only, or start ranks with a launcher"
            )

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
        with self._alone():
            self.agreed = None
            header = dataclasses.replace(header, sequence=self._sequence + 1)
            if refusal is not None:
                header = dataclasses.replace(header, refusal=first_line(refusal))
            try:
                headers = [Header.decode(data) for data in self.sync.exchange(header.encode())]
            except Exception as error:
                if refusal is not None:  # what this rank's caller can mend comes first
                    raise refusal from error
                raise
            self._sequence += 1
            if refusal is not None:
                raise refusal
            check_headers(headers)
            self.agreed = gradients_of(headers)
            published = self._step(lambda: publish(headers))
            return self._step(lambda: consume(headers, published))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.check_process()
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"two threads of rank {self.sync.rank} use one communicator at the same time, and ranks cannot agree "
                f"on the order of such calls: make a communicator for each thread"
            )
        try:
            yield
        except Exception:
            raise
        except BaseException as error:  # an interrupt: nobody knows how far this rank came
            with suppress(BicommError):
                self.sync.abort(first_line(error))
            raise
        finally:
            self._lock.release()

    def _step(self, work: Callable[[], R]) -> R:
        reason = ""
        failure: Exception | None = None
        try:
            result = work()
        except PeerTimeout:
            raise  # the group has given up already
        except NoSharedMemory as error:  # raised on all ranks, by agreement
            failure = error
        except Exception as error:
            reason, failure = first_line(error), error
        statuses = self.sync.exchange(reason.encode())
        if failure is not None:
            raise failure
        check_status(statuses, self.sync.rank)
        return result

    def recover(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Go on, all ranks together, from call 1. prepare: what to do first in the new epoch."""
        with self._alone():
            self.sync.recover()
            self._sequence = 0
            prepare()


class HostTransport(Transport):
    """What the transports have in common whose calls the host drives: headers, refusals, faults."""

    def __init__(self, sync: Sync) -> None:
        self.rank, self.size = sync.rank, sync.size
        self._sync = sync
        self._calls = HostCalls(sync)

    def held(self) -> tuple[int, int]:
        """Bytes of symmetric memory handed out, and a check sum of where: equal on ranks that made the same calls."""
        return (0, 0)

    def header(self, operation: str, x: Tensor, splits: Shares | None = None, place: Place | None = None) -> Header:
        """What this rank says of a call with operand x. splits: on the host; None where it knows its own count only."""
        return Header(
            0,
            operation,
            dtype=name_of(x.dtype),
            hidden=x.shape[1],
            splits=() if splits is None else tuple(int(n) for n in splits),
            place=NOWHERE if place is None else place.mark,
            held=self.held(),
            rows=x.shape[0],
            gradient=self.asked.words,
            fixed=self.asked.fixed,
        )

    def header_of_rows(self, operands: Rows, contract: str, place: Place | None = None) -> Header:
        """The same for combine_rows."""
        rows, product = operands.rows, operands.product_dtype if operands.weights is not None else None
        dtype = f"{name_of(rows.dtype)}, {'no weights' if product is None else f'product {name_of(product)}'}"
        slots = operands.row_of_slot.shape[1]
        header = self.header("combine_rows", rows, place=place)
        return dataclasses.replace(header, contract=contract, dtype=dtype, slots=slots)

    def refuse(self, operation: str, refusal: Exception) -> None:
        self._calls.run(Header(0, operation), lambda _: None, lambda _, __: None, refusal)

    @property
    def agreed(self) -> str | None:
        return self._calls.agreed

    def check(self) -> None:
        self._calls.check_process()
        self._sync.check()

    def abort(self, reason: str) -> None:
        self._calls.check_process()
        self._sync.abort(reason)

    def recover(self) -> None:
        self._calls.recover()

    def close(self) -> None:
        super().close()
        self._sync.close()
