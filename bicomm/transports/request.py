"""What every rank must ask for alike when a communicator is made."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence

import torch

from bicomm.arguments import Mode, contract_of, name_of_mode, natural

TIMEOUT = 30.0  # seconds; BICOMM_TIMEOUT overrides it
FIRST_TIMEOUT = 300.0  # for the first GPU call of a kind, in which peers compile; BICOMM_FIRST_TIMEOUT overrides it


@dataclasses.dataclass(frozen=True)
class Request:
    """What every rank must ask for alike."""

    max_tokens: int
    hidden: int
    mode: str
    strict: bool
    device: str
    share_memory: bool
    timeout: float
    debug: bool = False
    check_every: int = 0
    first_timeout: float = FIRST_TIMEOUT

    @classmethod
    def checked(
        cls,
        max_tokens: int,
        hidden: int,
        mode: Mode | None,
        strict: bool,
        device: torch.device,
        share_memory: bool,
        timeout: float | None,
        debug: bool | None,
        check_every: int,
    ) -> Request:
        """The arguments of a communicator. Raises TypeError or ValueError."""
        given = (("max_tokens", max_tokens), ("hidden", hidden), ("check_every", check_every))
        most, columns, every = (natural(value, name) for name, value in given)
        seconds = _seconds("BICOMM_TIMEOUT", TIMEOUT, timeout)
        first = _seconds("BICOMM_FIRST_TIMEOUT", FIRST_TIMEOUT)
        if mode is not None and mode != "multimem":
            contract_of(mode)
        watch = os.environ.get("BICOMM_DEBUG", "") not in ("", "0") if debug is None else bool(debug)
        name = "" if mode is None else name_of_mode(mode)
        return cls(most, columns, name, bool(strict), device.type, bool(share_memory), seconds, watch, every, first)

    def encode(self) -> bytes:
        """JSON, one line."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def check(cls, requests: Sequence[Request]) -> None:
        """Raise ValueError, the same on every rank, where two ranks ask for different things."""
        for rank, other in enumerate(requests):
            for field in dataclasses.fields(cls):
                first, theirs = getattr(requests[0], field.name), getattr(other, field.name)
                if first != theirs:
                    raise ValueError(
                        f"ranks made this communicator with different arguments: {field.name} is {first!r} on rank 0 "
                        f"and {theirs!r} on rank {rank}. All ranks of a group make the same communicators in one order"
                    )


def _seconds(variable: str, default: float, given: float | None = None) -> float:
    """A time-out: what was given, else what the environment says, else the default. Raises ValueError."""
    told = os.environ.get(variable, str(default)) if given is None else given
    try:
        seconds = float(told)
    except ValueError as error:
        raise ValueError(f"{variable}={told!r} is not a number of seconds") from error
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"a time-out is a positive number of seconds, got {told}")
    return seconds
