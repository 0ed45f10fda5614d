"""The NVLS kernels in Triton's interpreter: everything but the two multimem instructions, which need a switch.

The software twin stands where the switch adds, so heads, tails, vectors, counts and capacities are those of the real
kernel. That the instructions are there, and how they look, is asked in test_kernels_compile.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bicomm.contract import EXACT, Contract
from bicomm.kernels import multimem
from bicomm.kernels.broadcast import Broadcast, broadcast
from bicomm.kernels.call import Tile
from kernel_cases import WINDOWS, Launch, Pushed, Ranks, check_reduce, every_family, family, quiet

pytestmark = quiet
SMALL = Tile(64, 4, 3)
BOTH = [EXACT, WINDOWS[0]]


def switchless(contract: Contract) -> Launch:
    trusted = torch.ones(1, dtype=torch.int32)
    return lambda call, tile: multimem.reduce(
        call, contract.parameters, multicast=0, trusted=trusted, hardware=False, tile=tile
    )


@pytest.mark.parametrize("contract", [EXACT, *WINDOWS], ids=str)
@pytest.mark.parametrize("world", [1, 3, 6])
def test_every_family_of_addends(contract: Contract, world: int) -> None:
    data = every_family(world, 64)
    splits = [*[0] * (world - 1), data.shape[1]]
    check_reduce(contract, Ranks(data), splits, world - 1, tile=SMALL, launch=switchless(contract))


@pytest.mark.parametrize("contract", BOTH, ids=str)
@pytest.mark.parametrize("hidden", [1, 7, 20])
def test_heads_and_tails_have_the_same_contract(contract: Contract, hidden: int) -> None:
    """Slices that begin and end anywhere between 16-byte borders, some without a whole vector."""
    splits = [2, 0, 3]
    for lead in range(4):
        ranks = Ranks(family("tie_dust", 3, [5, hidden]), lead)
        for rank in range(3):
            on_device = (rank + lead) % 2 == 0
            check_reduce(
                contract, ranks, splits, rank, on_device=on_device, tile=Tile(16, 4, 2), launch=switchless(contract)
            )


@pytest.mark.parametrize("hidden", [2050, 2880, 4097])
def test_hidden_sizes_of_real_models(hidden: int) -> None:
    ranks = Ranks(family("normal", 5, [3, hidden]))
    check_reduce(EXACT, ranks, [1, 2, 0, 0, 0], 1, on_device=True, launch=switchless(EXACT), out_dtype=torch.bfloat16)


def test_results_that_are_not_aligned() -> None:
    for shift in range(4):
        ranks = Ranks(family("tie_dust", 3, [2, 20]))
        check_reduce(EXACT, ranks, [1, 1, 0], 1, tile=Tile(16, 4, 2), launch=switchless(EXACT), shift=shift)


def test_many_ranks() -> None:
    ranks = Ranks(family("cancellation", 18, [1, 16]))
    check_reduce(EXACT, ranks, [1, *[0] * 17], 0, tile=Tile(16, 4, 1), launch=switchless(EXACT))


@pytest.mark.parametrize("splits", [[4, 0, 3, 5], [0, 0, 0], [3], [1, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize(("dtype", "hidden"), [(torch.bfloat16, 7), (torch.float32, 3), (torch.bfloat16, 64)], ids=str)
def test_rows_pushed_to_every_rank(splits: Sequence[int], dtype: torch.dtype, hidden: int) -> None:
    for lead in (0, 1, 2):
        Pushed(splits, hidden, dtype, lead).check()


@pytest.mark.parametrize("capacity", [0, 2, 5])
def test_pushed_rows_that_do_not_fit_are_left_out(capacity: int) -> None:
    Pushed([3, 1, 4], 6, torch.float32).check(capacity)


def test_rows_of_odd_bytes_are_refused() -> None:
    word = torch.ones(1, dtype=torch.int32)
    splits = torch.tensor([1])
    with pytest.raises(ValueError, match="3 bytes a row"):
        broadcast(Broadcast(splits, 0, 0, 0, torch.zeros(1, 3, dtype=torch.uint8), splits, 1, word), hardware=False)
