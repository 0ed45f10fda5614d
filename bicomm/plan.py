"""Which contract and which executor a mode gets, and why not a faster one: a function of what all ranks reported."""

from __future__ import annotations

import dataclasses

from bicomm.arguments import Mode, contract_of
from bicomm.contract import EXACT, Contract

SWITCH, SYMMETRIC, SHARED, TRAVEL = "multimem", "symmetric", "shared", "all-to-all"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the ranks of a group found out together when the communicator was made; equal on all of them.

    device      "cpu" or "cuda".
    memory      "" where the ranks can read each other's memory, else the reason why not.
    multicast   "" where the NVLink switch can add for this group, else the reason why not.
    certified   the contract that the switch is certified for, None where it was not measured.
    confirmed   the contract that the self-check of this communicator found it to obey.
    unconfirmed "" or the reason why it is None.
    """

    device: str
    size: int
    memory: str
    multicast: str
    certified: Contract | None = None
    confirmed: Contract | None = None
    unconfirmed: str = ""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a contract: its name, and "" or the reason why it cannot run here."""

    executor: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will run for a mode: `contract`, `executor`, and every faster candidate with the reason against it."""

    mode: str
    contract: Contract
    executor: str
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        lines = [f"mode {self.mode}: contract {self.contract.id}, by {self.executor}"]
        lines += [f"  not {c.executor}: {c.reason}" for c in self.candidates if c.reason]
        return "\n".join(lines)


def resolve(mode: Mode, facts: Facts) -> Contract:
    """The contract of a mode in this group. `multimem` means the certified one, or `exact` without a certificate."""
    if mode == "multimem":
        return facts.certified or EXACT
    return contract_of(mode)


def plan(mode: Mode, facts: Facts) -> Plan:
    """The fastest executor that has the contract's bits, and why not the faster ones."""
    contract = resolve(mode, facts)
    switch = _switch(mode, contract, facts)
    if facts.device == "cuda":
        kernel = {"ordered": "ordered.py", "fp64": "ordered.py", "owner": "owner.py"}.get(contract.rule, "exact.py")
        ways = [
            Candidate(f"{SWITCH} (multimem.py, NVLink switch)", switch),
            Candidate(f"{SYMMETRIC} memory ({kernel}, Triton kernel)", facts.memory),
            Candidate(f"{TRAVEL} (torch.distributed) and local sum", ""),
        ]
    else:
        ways = [
            Candidate(f"{SWITCH} (multimem.py, NVLink switch)", switch),
            Candidate(f"{SHARED} memory on the CPU (contract.py, torch ops)", facts.memory),
            Candidate(f"{TRAVEL} (torch.distributed) and local sum", ""),
        ]
    chosen = next(i for i, way in enumerate(ways) if not way.reason)
    name = mode if isinstance(mode, str) else mode.id
    return Plan(name, contract, ways[chosen].executor, tuple(ways[: chosen + 1]))


def _switch(mode: Mode, contract: Contract, facts: Facts) -> str:
    """Why the NVLink switch does not add for this mode; "" where it does."""
    if facts.device == "cpu":
        return facts.multicast
    if contract.rule not in ("exact", "window"):
        return f"the NVLink switch has no contract of the kind {contract.rule}"
    if facts.multicast:
        return facts.multicast
    if facts.confirmed is None:
        return facts.unconfirmed or "the switch of this machine is not certified: run `bicomm certify fabric`"
    if facts.confirmed != contract.cross_rank:
        return f"the switch of this machine was found to obey {facts.confirmed.id}"
    if mode != "multimem" and isinstance(mode, str) and "/" not in mode:
        return (
            f"mode={mode!r} names the software kernel: pass mode='multimem' or Contract.parse({mode!r}) for the switch"
        )
    return ""
