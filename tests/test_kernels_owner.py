"""The pull kernel of `owner` in Triton's interpreter, against the contract, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from bicomm.contract import ORDERED, OWNER
from bicomm.kernels.call import Pull, Tile
from bicomm.kernels.owner import dense_rows, pull
from kernel_cases import Ranks, Routing, assert_bits, check_owner, family, quiet, routing

pytestmark = quiet
SMALL = Tile(64, 4, 3)
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(("weighted", "product"), [(False, FP32), (True, FP32), (True, BF16)], ids=str)
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_any_slots_weights_and_products(dtype: torch.dtype, weighted: bool, product: torch.dtype, slots: int) -> None:
    case = routing(3, 5, 40, 3, slots, dtype=dtype, weighted=weighted, product_dtype=product)
    check_owner(case, tile=SMALL, out_dtype=BF16 if slots == 3 else FP32)


def test_more_slots_than_are_unrolled() -> None:
    check_owner(routing(3, 5, 16, 2, 18, weighted=True), tile=Tile(16, 4, 3))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("hidden", [1, 7, 10, 100])
def test_hidden_sizes_and_offsets(hidden: int, dtype: torch.dtype) -> None:
    for lead in (0, 1, 4):
        check_owner(routing(5, 3, hidden, 3, 2, dtype=dtype), lead=lead, tile=Tile(32, 4, 2))


@pytest.mark.parametrize("hidden", [2050, 2880, 4097])
def test_hidden_sizes_of_real_models(hidden: int) -> None:
    case = routing(4, 3, hidden, 2, 4, integers=torch.int32)
    case.rows = torch.randn(case.rows.shape, generator=torch.Generator().manual_seed(1)).to(BF16)
    check_owner(case, out_dtype=BF16)


@pytest.mark.parametrize(
    "name", ["tie_dust", "cancellation", "bin_edges", "subnormal", "overflow", "specials", "zeros"]
)
def test_families_as_expert_rows(name: str) -> None:
    rows = family(name, 4, [1, 32])
    every = torch.arange(4).view(1, 4)
    check_owner(Routing(rows, torch.zeros_like(every), every), tile=Tile(32, 4, 1))


@pytest.mark.parametrize("there", [0, 2, 5])
def test_tokens_counted_on_the_device(there: int) -> None:
    check_owner(routing(3, 4, 24, 5, 4), there=there, tile=SMALL)


def test_dense_rows_stand_at_token_and_slot() -> None:
    """Experts that leave row (token, slot) on their own rank need no map of rows."""
    tokens, slots, hidden, first = 3, 4, 16, 2
    case = routing(3, (first + tokens) * slots, hidden, tokens, slots)
    case.rows = torch.randn(case.rows.shape, generator=torch.Generator().manual_seed(2)).to(BF16)
    case.row_of_slot = dense_rows(tokens, slots, first, torch.device("cpu"))
    assert case.row_of_slot[1, 2] == (first + 1) * slots + 2
    check_owner(case, tile=SMALL)
    assert torch.equal(dense_rows(tokens, slots, torch.tensor(first), torch.device("cpu")), case.row_of_slot)


def place_experts(home: list[int], ranks: int, hidden: int = 32) -> Routing:
    """Six experts' rows for four tokens of top-k 3, where expert e lives on rank home[e]."""
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(6, 4, hidden, generator=generator) * torch.exp2(
        torch.randint(-20, 20, (6, 4, hidden), generator=generator).float()
    )
    experts = torch.tensor([[0, 3, 5], [2, 1, 4], [5, 4, 0], [3, 2, 1]])
    rows = torch.full((ranks, 24, hidden), torch.nan)
    for expert, rank in enumerate(home):
        rows[rank, 4 * expert : 4 * expert + 4] = made[expert]
    token = torch.arange(4).view(4, 1)
    return Routing(rows, 4 * experts + token, torch.tensor(home)[experts])


def test_placement_replicas_and_group_size_change_no_bit() -> None:
    """Any home of any expert, 1, 2, 3 or 6 ranks; the twin, partials added rank by rank, has other bits."""
    first = check_owner(place_experts([0] * 6, 1), tile=SMALL)
    chains = []
    for home, ranks in (
        ([0, 0, 0, 1, 1, 1], 2),
        ([1, 0, 1, 0, 1, 0], 2),
        ([2, 1, 0, 0, 1, 2], 3),
        ([5, 4, 3, 2, 1, 0], 6),
    ):
        case = place_experts(home, ranks)
        assert_bits(check_owner(case, tile=SMALL), first)
        addends = case.addends()
        partials = [
            ORDERED.sum(torch.where((rank == case.rank_of_slot.T).unsqueeze(-1), addends, 0.0)) for rank in range(ranks)
        ]
        chains.append(ORDERED.sum(partials))
    assert any(not torch.equal(chain, first) for chain in chains)
    assert any(not torch.equal(a, b) for a, b in itertools.combinations(chains, 2))


def test_slot_order_changes_no_bit() -> None:
    case = place_experts([0, 1, 2, 0, 1, 2], 3, hidden=16)
    first = check_owner(case, tile=SMALL)
    for order in itertools.permutations(range(3)):
        turned = Routing(case.rows, case.row_of_slot[:, order], case.rank_of_slot[:, order])
        assert_bits(check_owner(turned, tile=SMALL), first)


def test_a_token_at_any_place_and_in_any_company() -> None:
    """The same token alone, first, last, and among others."""
    case = routing(3, 6, 20, 6, 3)
    all_rows = check_owner(case, tile=SMALL)
    for token in range(6):
        alone = Routing(case.rows, case.row_of_slot[token : token + 1], case.rank_of_slot[token : token + 1])
        assert_bits(check_owner(alone, tile=SMALL)[0], all_rows[token])


@pytest.mark.parametrize(("rank", "row"), [(3, 0), (0, 4), (1, 99)])
def test_a_slot_that_names_nothing_gives_nan_to_its_token_alone(rank: int, row: int) -> None:
    case = routing(3, 4, 16, 4, 2)
    want = OWNER.sum(case.addends())
    case.rank_of_slot[1, 1], case.row_of_slot[1, 1] = rank, row
    ranks = Ranks(case.rows)
    out = torch.empty(4, 16)
    maps = {"row_of_slot": case.row_of_slot, "rank_of_slot": case.rank_of_slot}
    pull(Pull(ranks.peers, 0, 0, BF16, out, **maps, rows=4), tile=SMALL)
    assert out[1].isnan().all()
    others = [0, 2, 3]
    assert_bits(out[others], want[others])


def test_no_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        empty = torch.empty(2, 0, dtype=torch.int64)
        pull(Pull(torch.zeros(1, dtype=torch.int64), 0, 0, BF16, torch.empty(2, 8), empty, empty))
