"""Trust: only a certificate of these GPUs and this world, and a short check that tells every other class apart."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bicomm.certify import trust
from bicomm.certify.certificate import Certificate, path_for, write
from bicomm.certify.emulate import EMULATIONS, Emulated, emulated
from bicomm.certify.families import FAMILIES
from bicomm.certify.measure import CHANNELS, measure
from bicomm.certify.report import certify
from bicomm.contract import EXACT, FP64, GB200_WINDOW, ORDERED, Contract, window

WINDOW2 = Contract("window", (24, 72, 65))
KEYS = ("name", "capability", "driver", "release", "fabric", "cluster", "clique")
MACHINE = [{"uuid": f"GPU-{i}", **dict.fromkeys(KEYS, "same")} for i in (2, 0, 1)]


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """A certificate as a switch would get one; measured on an emulation, with fewer channels than it says."""
    measured = certify(measure(emulated("window", 3), channels=100), "emulated:window", [], 3, 0).record
    families = [{**family, "channels": CHANNELS} for family in measured["families"]]
    return {**measured, "fabric": "nvls", "machine": trust.sorted_machine(MACHINE), "families": families}


def keep(record: dict[str, Any], folder: Path, **changes: Any) -> None:
    path = path_for(trust.sorted_machine(MACHINE), 3, folder)
    write(Certificate({**copy.deepcopy(record), **changes}), path)


def test_a_certificate_of_this_machine_is_trusted(record: dict[str, Any], tmp_path: Path) -> None:
    keep(record, tmp_path)
    for machine in (MACHINE, MACHINE[::-1]):  # whichever rank has which GPU
        found = trust.find(machine, 3, tmp_path)
        assert (found.contract, found.reason) == (GB200_WINDOW, "")


def test_without_a_certificate_the_reason_says_what_to_do(tmp_path: Path) -> None:
    found = trust.find(MACHINE, 3, tmp_path)
    assert found.contract is None
    assert found.reason == (
        f"no certificate of these GPUs for 3 ranks in {tmp_path}: "
        "run `bicomm certify fabric` under torchrun, one process a GPU"
    )


def test_another_world_or_machine_is_not_trusted(record: dict[str, Any], tmp_path: Path) -> None:
    keep(record, tmp_path)
    assert "for 2 ranks" in trust.find(MACHINE, 2, tmp_path).reason
    other = [{**gpu, "driver": "newer"} for gpu in MACHINE]
    assert trust.find(other, 3, tmp_path).contract is None
    here = path_for(trust.sorted_machine(MACHINE), 3, tmp_path)
    there = path_for(trust.sorted_machine(other), 3, tmp_path)
    there.write_text(here.read_text())  # a file that was copied to another machine's name
    assert "measured on other GPUs, or under another driver or fabric" in trust.find(other, 3, tmp_path).reason
    path_for(trust.sorted_machine(MACHINE[:2]), 2, tmp_path).write_text(here.read_text())
    assert "for 3 ranks, this world has 2" in trust.find(MACHINE[:2], 2, tmp_path).reason


@pytest.mark.parametrize("verdict", ["fp64", "chain", "rotated", "tree", "truncating", "ftz", "flaky", "unknown"])
def test_other_verdicts_are_not_trusted(record: dict[str, Any], tmp_path: Path, verdict: str) -> None:
    contract = {"fp64": "fp64/1", "chain": "ordered/1"}.get(verdict)
    keep(record, tmp_path, verdict=verdict, contract=contract)
    found = trust.find(MACHINE, 3, tmp_path)
    assert found.contract is None
    assert f"the switch was measured as {verdict!r}" in found.reason


def test_a_short_or_blemished_measurement_is_not_trusted(record: dict[str, Any], tmp_path: Path) -> None:
    keep(record, tmp_path, families=[{**f, "channels": 1000} for f in record["families"]])
    assert "saw 1,000 channels of family 'normal', 16,777,216 are needed" in trust.find(MACHINE, 3, tmp_path).reason
    keep(record, tmp_path, families=record["families"][:-1])
    assert "saw 0 channels of family 'specials'" in trust.find(MACHINE, 3, tmp_path).reason
    keep(record, tmp_path, families=[{**f, "mismatches": 2} for f in record["families"]])
    assert "counts 2 mismatches in family 'normal'" in trust.find(MACHINE, 3, tmp_path).reason
    keep(record, tmp_path, varies=["call"])
    assert "says that one sum changed by call" in trust.find(MACHINE, 3, tmp_path).reason
    keep(record, tmp_path, fabric="emulated:window", machine=[])
    assert "is of an emulation (emulated:window)" in trust.find(MACHINE, 3, tmp_path).reason
    path = path_for(trust.sorted_machine(MACHINE), 3, tmp_path)
    path.write_text(path.read_text()[:-20])
    assert "the certificate cannot be used: " in trust.find(MACHINE, 3, tmp_path).reason


# -------------------------------------------------------------------------------------------------- the self-check


@pytest.mark.parametrize("world", [3, 8, 72])
@pytest.mark.parametrize("name", EMULATIONS)
def test_the_check_accepts_its_own_contract_alone(name: str, world: int) -> None:
    own = {"exact": EXACT, "window": GB200_WINDOW, "window2": WINDOW2, "fp64": FP64, "chain": ORDERED}.get(name)
    if name == "flaky":
        own = ORDERED  # its first call is a chain in order
    if (name, world) == ("tree", 3):
        own = ORDERED
    for contract in (EXACT, GB200_WINDOW, WINDOW2, FP64, ORDERED):
        said = trust.self_check(emulated(name, world), contract, rank=1)
        if contract == own or (name == "rotated" and contract == ORDERED and world == 1):
            assert said == ""
        else:
            assert f"where {contract.id} is 0x" in said
            assert "for the addends 0x" in said


def test_the_check_sees_later_calls_too() -> None:
    assert trust.self_check(emulated("flaky"), ORDERED, rank=0, call=0) == ""
    assert trust.self_check(emulated("flaky"), ORDERED, rank=0, call=1) != ""


def test_the_check_tells_close_windows_apart() -> None:
    for parameters in ((16, 95, 85), (16, 95, 87), (16, 94, 86), (16, 96, 86), (15, 95, 86), (17, 95, 86)):
        near = Emulated("near", 8, lambda x, rank, call, blocks, alignment, p=parameters: window(x, *p))  # type: ignore[misc]
        assert trust.self_check(near, GB200_WINDOW, rank=0), parameters


def test_the_check_is_quick() -> None:
    fabric = emulated("window", 8)
    trust.self_check(fabric, GB200_WINDOW, rank=0)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        assert trust.self_check(fabric, GB200_WINDOW, rank=0) == ""
        seconds.append(time.process_time() - start)
    print(f"self-check: {min(seconds) * 1e3:.1f} ms, the emulated read included")
    assert min(seconds) < 0.1
    x = trust.check_inputs(8)
    assert x.shape == (8, trust.CHECK_COLUMNS * len(FAMILIES))
    assert torch.equal(x.view(torch.int32), trust.check_inputs(8).view(torch.int32))


def test_one_wrong_bit_of_a_block_is_named() -> None:
    x = torch.randn(8, 4096)
    read = EXACT.sum(x)
    assert trust.difference(x, read, EXACT) == ""
    read[1234] = torch.nextafter(read[1234], torch.tensor(float("inf")))
    said = trust.difference(x, read, EXACT)
    assert "(1 of 4,096 columns differ)" in said
    assert f"0x{int(x[0, 1234].view(torch.int32)) & 0xFFFFFFFF:08x}" in said


def test_periodic() -> None:
    assert not any(trust.Periodic().due() for _ in range(100))
    every = trust.Periodic(3)
    assert [every.due() for _ in range(7)] == [False, False, True, False, False, True, False]
    with pytest.raises(ValueError, match="or never with 0; got -1"):
        trust.Periodic(-1)
