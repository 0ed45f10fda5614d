"""The hardware side of certify around a software load: what is placed and read back, for every way of reading."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bicomm.certify.fabric import ALIGNMENTS
from bicomm.certify.families import FAMILIES
from bicomm.certify.hardware import TILE, Switch
from bicomm.contract import EXACT, Contract
from bicomm.symmem.buffer import SymmetricBuffer

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, at NaN and infinities
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def switches(world: int, nbytes: int, parameters: tuple[int, ...] = ()) -> list[Switch]:
    """All ranks' sides in one process: nobody waits, so whoever reads must place all values first."""
    parts = [torch.full((nbytes,), 255, dtype=torch.uint8, device=DEVICE) for _ in range(world)]  # 255: NaN
    addresses = torch.tensor([part.data_ptr() for part in parts], device=DEVICE)
    made = []
    for rank, part in enumerate(parts):
        buffer = SymmetricBuffer(local=part, addresses=addresses)
        none: Any = lambda *_: None  # noqa: E731
        made.append(Switch(rank, world, rank, buffer, [], none, none, hardware=False, parameters=parameters))
    return made


def read_as(ranks: list[Switch], rank: int, x: torch.Tensor, blocks: int, alignment: int) -> torch.Tensor:
    for other in ranks:
        other.place(x[other.rank], alignment)
    return ranks[rank].reduce(x, rank=rank, call=0, blocks=blocks, alignment=alignment)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.int32), b.cpu().view(torch.int32))


@pytest.mark.parametrize("contract", [EXACT, Contract("window", (16, 95, 86))], ids=str)
def test_every_family_is_read_back(contract: Contract) -> None:
    ranks = switches(3, 4 * 3 * TILE, contract.parameters)
    for seed, (name, make) in enumerate(FAMILIES.items()):
        x = make(torch.Generator().manual_seed(seed), 3, 200).to(DEVICE)
        assert same(read_as(ranks, seed % 3, x, 8, 4 * (seed % 4)), contract.sum(x)), name


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 1021, 2051])
def test_blocks_and_alignment_cut_the_same_columns_out(n: int) -> None:
    ranks = switches(3, 4 * 3 * TILE)
    x = torch.randn(3, n, device=DEVICE)
    for alignment in ALIGNMENTS:
        for blocks in (1, 2, 108):
            assert same(read_as(ranks, 1, x, blocks, alignment), EXACT.sum(x)), (alignment, blocks)


def test_what_lies_around_the_data_is_never_part_of_it() -> None:
    ranks = switches(3, 4 * TILE)
    wide = torch.full((3, 100), float("nan"), device=DEVICE)
    narrow = torch.randn(3, 5, device=DEVICE)
    read_as(ranks, 0, wide, 1, 0)
    assert same(read_as(ranks, 0, narrow, 1, 8), EXACT.sum(narrow))


def test_too_many_columns_are_refused() -> None:
    (one, *_) = switches(3, 64)
    one.place(torch.ones(16, device=DEVICE), 0)
    with pytest.raises(ValueError, match="16 columns do not fit a buffer of 64 bytes"):
        one.place(torch.ones(16, device=DEVICE), 4)


def test_software_never_passes_for_the_switch() -> None:
    assert switches(3, 64)[0].name == "emulated:software"


def test_reads_beside_traffic_are_the_same() -> None:
    ranks = switches(3, 4 * TILE)
    x = torch.randn(3, 50, device=DEVICE)
    with ranks[1].traffic():
        assert same(read_as(ranks, 1, x, 1, 0), EXACT.sum(x))
