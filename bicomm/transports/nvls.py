"""May the NVLink switch add for this communicator? All ranks decide it together, and all together take it back.

Two things lead to a yes, and a short self-check confirms either when the communicator is made: a certificate of this
machine and world, or a `Contract` that the caller passed as mode. The answer is a word on the device that the kernels
read: once it is 0 they add in software, those of captured graphs included.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bicomm.certify.candidates import TRUSTED
from bicomm.certify.trust import Periodic
from bicomm.contract import Contract

Check = Callable[[Contract], str]  # the self-check of one rank: "" or the first difference
Agree = Callable[[str], str]  # every rank's reason, in one text; "" where no rank has one


def decide(
    asked: Contract | None, certified: Contract | None, why_not: str, check: Check, agree: Agree
) -> tuple[Contract | None, str]:
    """The contract that the switch is confirmed to obey here, or None and the reason. Collective.

    asked: a Contract that the communicator was made with. certified, why_not: what the certificate says.
    """
    candidate = asked if asked is not None and asked.rule in TRUSTED else certified
    if candidate is None:
        return None, why_not
    reason = agree(check(candidate.cross_rank))
    return (None, f"the self-check failed: {reason}") if reason else (candidate.cross_rank, "")


class Nvls:
    """The switch of one communicator, as one rank sees it.

    contract  what it was confirmed to obey. every: calls between two self-checks, 0 for never.
    hardware  False leaves the instruction out of the kernels: the same path, added in software, for tests.
    """

    def __init__(
        self,
        contract: Contract,
        device: torch.device,
        check: Check,
        agree: Agree,
        every: int = 0,
        hardware: bool = True,
    ) -> None:
        self.contract, self.hardware = contract, hardware
        self.reason = ""  # why it is not trusted any more
        self.trusted: Tensor = torch.ones(1, dtype=torch.int32, device=device)
        self._check, self._agree = check, agree
        self._periodic = Periodic(every)

    def count_call(self) -> None:
        """Before a call that will use the switch: where a self-check is due, make it; collective.

        A self-check that fails on any rank turns the switch off on all of them, for good.
        """
        if self.reason or (self.trusted.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if not self._periodic.due():
            return
        self.reason = self._agree(self._check(self.contract))
        if self.reason:
            self.distrust(self.reason)

    def distrust(self, reason: str) -> None:
        """Turn the switch off on this rank: every later kernel, and every later replay, adds in software."""
        self.reason = reason
        self.trusted.zero_()
