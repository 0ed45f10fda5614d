"""May NVLS run here, and under which contract? A certificate says so, and a short check confirms it each time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Generator, Tensor

from bicomm.certify import certificate
from bicomm.certify.candidates import TRUSTED, finish
from bicomm.certify.fabric import BLOCKS, Fabric
from bicomm.certify.families import FAMILIES
from bicomm.certify.measure import CHANNELS, differing, hexadecimal
from bicomm.contract import Contract

CHECK_COLUMNS = 512  # of each family: the whole check takes some 20 ms on one core, and one read of the fabric


@dataclasses.dataclass(frozen=True)
class Trust:
    """The contract that a machine is certified for, or None and the reason why there is none; `path` is the file."""

    contract: Contract | None
    reason: str
    path: Path


def find(machine: Sequence[dict[str, str]], world_size: int, folder: Path | None = None) -> Trust:
    """The certified contract of these GPUs (`capability.identity` of every rank, in any order) for W ranks.

    Reads one file; never raises for what is in it. All ranks must act on one answer: gather `machine` from all of
    them, let one rank ask, and tell the others.
    """
    ordered = sorted_machine(machine)
    path = certificate.path_for(ordered, world_size, folder)
    try:
        found = certificate.read(path)
    except FileNotFoundError:
        return Trust(None, f"no certificate of these GPUs for {world_size} ranks in {path.parent}: {HOW}", path)
    except ValueError as error:
        return Trust(None, f"the certificate cannot be used: {error}", path)
    reason = objection(found, ordered, world_size)
    return Trust(None if reason else found.contract, reason, path)


HOW = "run `bicomm certify fabric` under torchrun, one process a GPU"


def sorted_machine(machine: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The GPUs in an order that does not depend on which rank has which."""
    return sorted((dict(gpu) for gpu in machine), key=lambda gpu: gpu["uuid"])


def objection(found: certificate.Certificate, machine: Sequence[dict[str, str]], world_size: int) -> str:
    """Why the switch of this machine and world may not add under this certificate; "" where it may."""
    record = found.record
    if record["fabric"] != "nvls":
        return f"the certificate is of an emulation ({record['fabric']})"
    if record["world_size"] != world_size:
        return f"the certificate is for {record['world_size']} ranks, this world has {world_size}"
    if record["machine"] != list(machine):
        return f"the certificate was measured on other GPUs, or under another driver or fabric: {HOW} again"
    if record["verdict"] not in TRUSTED:
        return (
            f"the switch was measured as {record['verdict']!r} ({record['variant']}), which no contract of NVLS allows"
        )
    if record["varies"]:
        return f"the certificate says that one sum changed by {', '.join(record['varies'])}"
    seen = {family["name"]: family for family in record["families"]}
    for name in FAMILIES:
        if name not in seen or seen[name]["channels"] < CHANNELS:
            least = seen[name]["channels"] if name in seen else 0
            return f"the certificate saw {least:,} channels of family {name!r}, {CHANNELS:,} are needed: {HOW} again"
        if seen[name]["mismatches"]:
            return f"the certificate counts {seen[name]['mismatches']:,} mismatches in family {name!r}"
    return ""


def check_inputs(world_size: int, columns: int = CHECK_COLUMNS) -> Tensor:
    """The columns of the self-check, fp32 [W, families * columns]: made on the CPU, so equal on every rank."""
    generator = Generator().manual_seed(20_260_401)
    return torch.cat([make(generator, world_size, columns) for make in FAMILIES.values()], dim=1)


def self_check(fabric: Fabric, contract: Contract, *, rank: int, call: int = 0) -> str:
    """Does the fabric still add by this contract? "" if it does on every family, else the first column where not.

    Takes under 100 ms, one read of the fabric. Collective on hardware; the ranks then agree on the answers.
    """
    addends = check_inputs(fabric.world_size)
    read = fabric.reduce(addends.to(fabric.device), rank=rank, call=call, blocks=BLOCKS[0], alignment=0)
    return difference(addends, read.cpu(), contract)


def difference(addends: Tensor, read: Tensor, contract: Contract) -> str:
    """Compare what was read, fp32 [N], with the contract's sum of fp32 [W, N], bit for bit: "" or the first column."""
    got, expected = finish(read), contract.sum(addends)
    wrong = differing(got, expected)
    if not bool(wrong.any()):
        return ""
    i = int(wrong.to(torch.int8).argmax())
    return (
        f"the switch gave {hexadecimal(got[i])[0]} where {contract.id} is {hexadecimal(expected[i])[0]}, for the "
        f"addends {' '.join(hexadecimal(addends[:, i]))} ({int(wrong.sum()):,} of {wrong.numel():,} columns differ)"
    )


class Periodic:
    """Says when the next self-check of a running communicator is due: every N calls, or never (0, the default).

    It counts calls and nothing else, so that ranks that make the same calls check at the same ones.
    """

    def __init__(self, every: int = 0) -> None:
        if every < 0:
            raise ValueError(f"a self-check comes every N calls, N >= 1, or never with 0; got {every}")
        self.every, self._calls = every, 0

    def due(self) -> bool:
        """Count one call; True where it is one to check."""
        self._calls += 1
        return self.every > 0 and self._calls % self.every == 0
