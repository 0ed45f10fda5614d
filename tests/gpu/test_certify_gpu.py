"""Certify on a GPU: emulations there, a software load in the switch's place, and the time of the self-check."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from bicomm.certify import trust
from bicomm.certify.emulate import EMULATIONS, emulated
from bicomm.certify.families import FAMILIES
from bicomm.certify.hardware import TILE, Switch
from bicomm.certify.measure import measure
from bicomm.contract import EXACT, GB200_WINDOW, Contract
from bicomm.symmem.cuda import make_local_buffers

DEVICE = torch.device("cuda")
WINDOW2 = Contract("window", (24, 72, 65))


class SoftwareSwitch:
    """All ranks' sides in one process, with the kernel around a software load: a `Fabric` that reads as any rank."""

    def __init__(self, world: int, contract: Contract, columns: int) -> None:
        none: Any = lambda *_: None  # noqa: E731
        self.name, self.world_size = "emulated:software", world
        self.device, self.readers = torch.device("cuda", torch.cuda.current_device()), tuple(range(world))
        buffers = make_local_buffers(world, self.device, 4 * columns + 4 * TILE)
        self.ranks = [
            Switch(r, world, r, b, [], none, none, hardware=False, parameters=contract.parameters)
            for r, b in enumerate(buffers)
        ]

    def reduce(self, addends: torch.Tensor, *, rank: int, call: int, blocks: int, alignment: int) -> torch.Tensor:
        for one in self.ranks:
            one.place(addends[one.rank], alignment)
        return self.ranks[rank].reduce(addends, rank=rank, call=call, blocks=blocks, alignment=alignment)

    def traffic(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.parametrize("name", EMULATIONS)
def test_emulations_on_the_gpu(name: str) -> None:
    on_gpu = measure(emulated(name, 8, "cuda"), channels=100_000)
    on_cpu = measure(emulated(name, 8), channels=1000)
    assert (on_gpu.verdict, on_gpu.contract) == (on_cpu.verdict, on_cpu.contract)


@pytest.mark.parametrize("contract", [EXACT, GB200_WINDOW, WINDOW2], ids=str)
def test_the_kernel_around_a_software_load(contract: Contract) -> None:
    result = measure(SoftwareSwitch(8, contract, 1 << 20), channels=1 << 20)
    assert result.contract == contract.id
    assert all(family["mismatches"] == 0 for family in result.families)


@pytest.mark.parametrize("contract", [Contract("ordered"), EXACT, Contract("fp64"), GB200_WINDOW, WINDOW2], ids=str)
def test_contracts_are_the_same_on_both_devices(contract: Contract) -> None:
    for seed, (name, make) in enumerate(FAMILIES.items()):
        x = make(torch.Generator().manual_seed(seed), 8, 20_000)
        on_gpu = contract.sum(x.to(DEVICE)).cpu()
        assert torch.equal(on_gpu.view(torch.int32), contract.sum(x).view(torch.int32)), name


def test_the_self_check_takes_less_than_100_ms() -> None:
    switch = SoftwareSwitch(8, GB200_WINDOW, trust.CHECK_COLUMNS * len(FAMILIES))
    assert trust.self_check(switch, GB200_WINDOW, rank=3) == ""  # compiles the kernel
    start = time.perf_counter()
    assert trust.self_check(switch, GB200_WINDOW, rank=3) == ""
    seconds = time.perf_counter() - start
    print(f"self-check on a GPU: {seconds * 1e3:.1f} ms")
    assert seconds < 0.1
    assert "where exact/1 is 0x" in trust.self_check(switch, EXACT, rank=3)


def test_identity() -> None:
    from bicomm import capability

    told = capability.identity(0)
    assert told["name"] == torch.cuda.get_device_name(0)
    assert told["uuid"]
    assert capability.facts(0) == capability.facts(0)
