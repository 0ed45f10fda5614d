"""The kernel of `exact` and `window` in Triton's interpreter, against the contract, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from bicomm.contract import EXACT, FP64, ORDERED, Contract
from bicomm.kernels.call import Tile
from bicomm.kernels.exact import spread_limit
from kernel_cases import WINDOWS, Ranks, assert_bits, check_reduce, every_family, family, quiet

pytestmark = quiet
SMALL = Tile(64, 4, 5)
BOTH = [EXACT, WINDOWS[0]]


def check_columns(contract: Contract, data: torch.Tensor, **options: object) -> torch.Tensor:
    """All of data [N, rows, columns] on the last rank."""
    return check_reduce(contract, Ranks(data), [*[0] * (len(data) - 1), data.shape[1]], len(data) - 1, **options)


@pytest.mark.parametrize("contract", [EXACT, *WINDOWS], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_every_family_of_addends(contract: Contract, world: int) -> None:
    check_columns(contract, every_family(world, 64), tile=SMALL)


@pytest.mark.parametrize("contract", BOTH, ids=str)
@pytest.mark.parametrize("world", [8, 12, 17])
@pytest.mark.parametrize("name", ["normal", "tie_dust", "split_cancellation", "bin_edges", "specials", "overflow"])
def test_families_of_more_addends(contract: Contract, world: int, name: str) -> None:
    check_columns(contract, family(name, world, [2, 32]), out_dtype=torch.bfloat16, tile=SMALL, rotate=1)


def test_more_than_120_addends_take_narrower_slices() -> None:
    check_columns(EXACT, family("straddle", 130, [1, 16]), tile=Tile(16, 4, 1))


def test_named_sums() -> None:
    """Ties with dust, cancellations and edges of slices, in every order that matters."""
    columns = [
        *itertools.permutations([1e8, 1.0, -1e8, 1.0, 0.0]),
        *([x * 2.0**k for x in (-128, 64, 64, 2.0**-33, 2.0**-60)] for k in range(-60, 60, 7)),
        *itertools.permutations([2.0**60, 1.0, -(2.0**60), 0.0, 0.0], 5),
        [1.0, 2.0**-24, 2.0**-60, 0.0, 0.0],
        [-0.0] * 5,
        [3e38, 3e38, float("-inf"), 0.0, 0.0],
        [3e38, 3e38, -3e38, 0.0, 0.0],
        [float("inf"), float("-inf"), 1.0, 1.0, 1.0],
        [float("nan"), 1.0, 1.0, 1.0, 1.0],
        [2.0**-149] * 5,
    ]
    data = torch.tensor(columns).T.contiguous().view(5, 1, -1)
    got = check_columns(EXACT, data, tile=SMALL)
    assert_bits(got[0, :120], torch.full((120,), 2.0))
    assert_bits(got[0, 138:258], torch.ones(120))  # 2**60 and 1 in every order
    check_columns(WINDOWS[0], data, out_dtype=torch.bfloat16, tile=SMALL)


@pytest.mark.parametrize("contract", BOTH, ids=str)
def test_shapes_offsets_and_uneven_tokens(contract: Contract) -> None:
    for hidden, lead, splits in ((1, 1, [3, 0, 9]), (7, 2, [0, 5, 1]), (20, 3, [2, 2, 2]), (36, 4, [0, 0, 0])):
        ranks = Ranks(family("tie_dust", 3, [sum(splits), hidden]), lead)
        for rank in range(3):
            check_reduce(
                contract, ranks, splits, rank, on_device=(rank + lead) % 2 == 0, rotate=rank, tile=Tile(32, 4, 2)
            )


@pytest.mark.parametrize("hidden", [2050, 2880, 4097])
def test_hidden_sizes_of_real_models(hidden: int) -> None:
    """Normal data: the chain that is watched, in every block."""
    ranks = Ranks(family("normal", 6, [3, hidden]))
    check_reduce(EXACT, ranks, [1, 0, 0, 2, 0, 0], 3, on_device=True)


def test_bits_depend_on_no_tile() -> None:
    """One hard element sends its whole block through the slices; its neighbours' bits stay."""
    data = family("normal", 5, [4, 32])
    data[:, 1, 3] = torch.tensor([2.0**60, 1.0, -(2.0**60), 2.0**-70, 0.0])
    for block in (16, 64, 128):
        check_columns(EXACT, data, tile=Tile(block, 4, 2))


def test_the_spread_that_a_chain_survives() -> None:
    """At the limit every chain of fp64 additions is exact, in any order; the watch is not too bold."""
    for world in (2, 3, 8, 16, 72):
        limit = spread_limit(world)
        assert limit == 29 - (world - 1).bit_length()
        top = torch.full((world, 64), 2.0 - 2.0**-23)
        top[-1] = (1 + 2.0**-23) * 2.0**-limit
        assert_bits(FP64.sum(top), EXACT.sum(top))
        assert float(top[:, 0].double().sum() - (world - 1) * (2.0 - 2.0**-23)) == float(top[-1, 0])
    assert spread_limit(8, 8) == 42  # bf16 rows


def test_every_spread_around_the_limit() -> None:
    """Two addends that cancel but for dust, the dust at every distance: both paths and the border between them."""
    distances = torch.arange(20, 83)
    data = torch.zeros(3, 1, 63)
    data[0], data[1], data[2] = 1.0, -1.0 - 2.0**-23, torch.exp2(-distances.float())
    check_columns(EXACT, data, tile=Tile(1, 4, 2))
    check_columns(WINDOWS[1], data, tile=Tile(1, 4, 2))


@pytest.mark.parametrize("name", ["tie_dust", "cancellation"])
def test_twin_chains_have_other_bits(name: str) -> None:
    data = family(name, 5, [2, 64])
    want = check_columns(EXACT, data, tile=SMALL)
    for naive in (ORDERED, FP64):
        assert not torch.equal(naive.sum(data), want), naive


def test_order_does_not_matter_here_and_does_in_a_chain() -> None:
    data = family("cancellation", 4, [1, 32])
    first = check_columns(EXACT, data, tile=SMALL)
    changed = False
    for order in itertools.permutations(range(4)):
        assert_bits(check_columns(EXACT, data[list(order)], tile=SMALL), first)
        changed |= not torch.equal(ORDERED.sum(data[list(order)]), ORDERED.sum(data))
    assert changed
