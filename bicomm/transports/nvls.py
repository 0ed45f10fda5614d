"""May the NVLink switch add for this communicator? All ranks decide it together, and all together take it back.

Two things lead to a yes, and a short self-check confirms either when the communicator is made: a certificate of this
machine and world, or a `Contract` that the caller passed as mode. The answer is a word on the device that the kernels
read: once it is 0 they add in software, those of captured graphs included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from bicomm.certify.candidates import TRUSTED
from bicomm.certify.measure import hexadecimal
from bicomm.certify.trust import Periodic
from bicomm.contract import Contract
from bicomm.kernels.call import Reduce

Check = Callable[[Contract], str]  # the self-check of one rank: "" or the first difference
Agree = Callable[[str], str]  # every rank's reason, in one text; "" where no rank has one
BLOCK_ELEMENTS = 1 << 16  # of a call's own operand, on each rank: some microseconds of a GPU


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


def block_of(call: Reduce) -> Reduce:
    """The first rows of this rank's part of a call, summed into zeros of their own; its barriers stay."""
    rows = min(call.out.shape[0], max(1, BLOCK_ELEMENTS // max(1, call.hidden)))
    out = torch.zeros(rows, call.hidden, dtype=torch.float32, device=call.out.device)
    return dataclasses.replace(call, out=out, count=min(call.count, rows * call.hidden))


def differing_block(by_switch: Tensor, software: Tensor, contract: Contract) -> str:
    """Compare two sums of one block, fp32 [rows, H] on the CPU, bit for bit: "" or the first difference."""
    wrong = by_switch.view(torch.int32) != software.view(torch.int32)
    if not bool(wrong.any()):
        return ""
    row, column = wrong.nonzero()[0].tolist()
    got, expected = (hexadecimal(x[row, column])[0] for x in (by_switch, software))
    return (
        f"of the operand of a call, in row {row} of this rank's tokens, column {column}, the switch gave {got} where "
        f"{contract.id} is {expected} ({int(wrong.sum()):,} of {wrong.numel():,} elements differ)"
    )


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

    def count_call(self, block: Check) -> None:
        """Before a call that will use the switch: where a self-check is due, make it; collective.

        It has two parts: the known columns of the first self-check, and `block`, which sums a block of this call's
        operand by the switch and in software. A difference in either on any rank turns the switch off on all of them,
        for good.
        """
        if self.reason or (self.trusted.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if not self._periodic.due():
            return
        found = block(self.contract), self._check(self.contract)  # both on every rank: they are collective
        self.reason = self._agree("; ".join(filter(None, found)))
        if self.reason:
            self.distrust(self.reason)

    def distrust(self, reason: str) -> None:
        """Turn the switch off on this rank: every later kernel, and every later replay, adds in software."""
        self.reason = reason
        self.trusted.zero_()
