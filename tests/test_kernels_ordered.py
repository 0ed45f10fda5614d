"""The kernel of `ordered` and `fp64` in Triton's interpreter, against the contract, bit for bit."""

from __future__ import annotations

import pytest
import torch

from bicomm.contract import FP64, ORDERED, Contract
from bicomm.kernels.call import Reduce, Tile
from kernel_cases import Ranks, check_reduce, every_family, family, launch_of, quiet

pytestmark = quiet
SMALL = Tile(128, 4, 3)
BOTH = [ORDERED, FP64]


@pytest.mark.parametrize("contract", BOTH, ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 12, 16, 17, 33])
def test_every_family_of_addends(contract: Contract, world: int) -> None:
    data = every_family(world, 64)
    check_reduce(contract, Ranks(data), [*[0] * (world - 1), data.shape[1]], world - 1, tile=SMALL)
    check_reduce(contract, Ranks(data), [*[0] * (world - 1), data.shape[1]], world - 1, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("hidden", [1, 7, 2050, 2880, 4097])
@pytest.mark.parametrize("world", [1, 3, 5, 6, 12])
def test_any_world_size_and_hidden_size(world: int, hidden: int, on_device: bool) -> None:
    splits = [(3 * r + 1) % 4 for r in range(world)]
    ranks = Ranks(family("spread", world, [sum(splits), hidden]))
    for rank in {0, world // 2, world - 1}:
        check_reduce(ORDERED, ranks, splits, rank, on_device=on_device, rotate=rank)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("splits", [[0, 3, 4], [3, 0, 4], [3, 4, 0], [0, 0, 0], [64, 1, 1], [1, 1, 64]], ids=str)
def test_uneven_tokens_and_ranks_without_any(splits: list[int], on_device: bool) -> None:
    ranks = Ranks(family("spread", 3, [sum(splits), 24]))
    for rank in range(3):
        check_reduce(ORDERED, ranks, splits, rank, on_device=on_device, tile=SMALL)


@pytest.mark.parametrize("contract", BOTH, ids=str)
def test_operands_and_results_that_are_not_aligned(contract: Contract) -> None:
    for lead in range(5):
        for shift in (0, 1, 2, 3):
            ranks = Ranks(family("tie_dust", 3, [4, 20]), lead)
            check_reduce(contract, ranks, [1, 2, 1], 1, tile=SMALL, shift=shift)


def test_bits_depend_on_no_tile_and_no_grid() -> None:
    ranks = Ranks(family("spread", 5, [9, 36]))
    for block in (64, 128, 1024):
        for blocks in (1, 2, 7):
            check_reduce(ORDERED, ranks, [2, 7, 0, 0, 0], 1, tile=Tile(block, 4, blocks), rotate=blocks % 5)


def test_rows_beyond_a_capacity_are_not_written() -> None:
    """Counts on the device may promise more than the result holds; negative ones count as none."""
    data = family("normal", 3, [8, 16])
    ranks = Ranks(data)
    out = torch.full((3, 16), 7.0)
    call = Reduce(ranks.peers, 0, 1, 16, out[:2], splits=torch.tensor([2, 6, 0]))
    launch_of(ORDERED)(call, SMALL)
    assert torch.equal(out[:2], ORDERED.sum(data[:, 2:4])) and out[2].eq(7).all()
    out.fill_(7.0)
    launch_of(ORDERED)(Reduce(ranks.peers, 0, 1, 16, out, splits=torch.tensor([-5, -1, 8])), SMALL)
    assert out.eq(7).all()


def test_twin_another_order_has_other_bits() -> None:
    data = family("normal", 3, [16, 16])
    want = ORDERED.sum(data)
    assert not torch.equal(ORDERED.sum(data[[1, 2, 0]]), want)
    got = check_reduce(ORDERED, Ranks(data[[1, 2, 0]]), [0, 0, 16], 2, rotate=1)
    assert not torch.equal(got, want)
