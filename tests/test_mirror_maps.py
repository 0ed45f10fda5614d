"""The maps: stable, right at every edge, and loud about what does not exist."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bicomm import mirror
from bicomm.mirror import definition


def test_inverse_map_sorts_by_expert_then_token_then_slot() -> None:
    ids = torch.tensor([[2, 0], [0, 2], [-1, 2], [3, 0]])
    for align in (1, 4):
        slots = mirror.inverse_map(ids, 4, align=align)
        assert slots.tokens_per_expert.tolist() == [3, 0, 3, 1]
        assert slots.num_rows == 8 + 4 * (align - 1)
        if align == 1:
            assert slots.row_of_slot.tolist() == [[3, 0], [1, 4], [-1, 5], [6, 2]]
        else:  # experts 0, 2 and 3 begin at rows 0, 4 and 8; expert 1 takes no room
            assert slots.row_of_slot.tolist() == [[4, 0], [1, 5], [-1, 6], [8, 2]]


@pytest.mark.parametrize("experts", [1, 5, 128])
def test_inverse_map_of_random_routings(experts: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    for tokens, topk in ((0, 2), (1, 1), (50, 3)):
        ids = torch.randint(-1, experts + 1, (tokens, topk), generator=generator)  # -1 and num_experts: not routed
        slots = mirror.inverse_map(ids, experts, align=8)
        routed = (ids >= 0) & (ids < experts)
        rows = slots.row_of_slot[routed]
        assert (slots.row_of_slot[~routed] == -1).all()
        assert rows.unique().numel() == rows.numel() and (rows < slots.num_rows).all()
        order = rows.argsort()
        assert torch.equal(ids[routed][order], ids[routed].sort(stable=True).values)
        counts = slots.tokens_per_expert
        starts = ((counts + 7) // 8 * 8).cumsum(0) - (counts + 7) // 8 * 8
        for e in range(experts):
            mine = slots.row_of_slot[ids == e]
            assert torch.equal(mine, torch.arange(len(mine)) + starts[e])


def test_placements() -> None:
    assert mirror.Placement.even(6, 3).experts_of_rank == ((0, 1), (2, 3), (4, 5))
    assert mirror.Placement.counts([3, 0, 2]).experts_of_rank == ((0, 1, 2), (), (3, 4))
    with pytest.raises(ValueError, match="do not divide"):
        mirror.Placement.even(7, 2)
    with pytest.raises(ValueError, match="no rank holds expert 1"):
        mirror.Placement(((0,), (2,)), 3)
    with pytest.raises(ValueError, match="rank 0 holds"):
        mirror.Placement(((0, 0), (1,)), 2)
    ids = torch.tensor([[0, 4, -1, 5]], dtype=torch.int32)
    uneven = mirror.Placement(((4, 2), (), (0, 1, 3)), 5)
    assert mirror.rank_of_slot(ids, uneven).tolist() == [[2, 0, -1, -1]]
    assert mirror.order_of_slot(ids, uneven).tolist() == [[0, 0, -1, -1]]
    assert uneven == mirror.Placement(((4, 2), (), (0, 1, 3)), 5)  # cached tables are no part of it


def test_slots_of_a_routing_map() -> None:
    routing_map = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]])
    assert mirror.slots_of_routing_map(routing_map, 2).tolist() == [[1, 2], [-1, -1], [0, 3]]
    assert mirror.slots_of_routing_map(routing_map, 3).tolist() == [[1, 2, -1], [-1, -1, -1], [0, 3, -1]]
    with pytest.raises(ValueError, match="2 experts in the routing map, topk is 1"):
        mirror.slots_of_routing_map(routing_map, 1)


def test_sorting_puts_ranks_then_places_then_slots() -> None:
    rows = torch.tensor([[10, 11, -1, 13, 14]])
    ranks = torch.tensor([[1, 0, 0, 1, -1]])
    places, tags = definition.sort_slots(rows, ranks, None)
    assert places.tolist() == [[11, 10, 13, -1, -1]]
    assert [(t & definition.SLOT, t >= definition.LAST) for t in tags[0, :3].tolist()] == [
        (1, True), (0, False), (3, True),
    ]  # fmt: skip
    places, _ = definition.sort_slots(rows, ranks, torch.tensor([[7, 0, 0, 3, 0]]))
    assert places.tolist() == [[11, 13, 10, -1, -1]]


def test_maps_that_lie_are_refused() -> None:
    rows = torch.ones(4, 2)
    good = {"rank_of_slot": torch.tensor([[0, 1]]), "ep_size": 2, "contract": "megatron-vllm-swiglu"}
    with pytest.raises(ValueError, match="token 0, slot 1 names row 4, but there are 4 rows"):
        mirror.unpermute(rows, torch.tensor([[0, 4]]), **good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="engine rank 1, but ep_size is 1"):
        mirror.unpermute(rows, torch.tensor([[0, 1]]), **{**good, "ep_size": 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="row 2, which another slot names too"):
        mirror.unpermute(rows, torch.tensor([[2, 2]]), **good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="row 9, but there are 4 rows"):
        mirror.unpermute(rows, torch.tensor([[0, 9]]), contract="owner")


def test_arguments_that_do_not_fit_the_contract_are_refused() -> None:
    rows, maps = torch.ones(4, 2), torch.tensor([[0, 1]])
    ranks, probs = torch.tensor([[0, 1]]), torch.ones(1, 2)
    for options, message in (
        ({"contract": "exact"}, "nothing about the tree within a rank"),
        ({"contract": "megatron-vllm-swiglu", "ep_size": 2}, "needs rank_of_slot"),
        ({"contract": "megatron-deepgemm", "ep_size": 2, "rank_of_slot": ranks}, "needs order_of_slot"),
        ({"contract": "slot-fp32"}, "needs probs"),
        ({"contract": "megatron-vllm-swiglu", "probs": probs}, "no probs"),
        ({"contract": "owner/1+slot-fp32/1", "probs": probs}, "one exact sum"),
        ({"contract": "megatron-vllm-swiglu", "rank_of_slot": ranks.t()}, r"rank_of_slot is \[T, K\]"),
        ({"contract": "megatron-vllm-swiglu", "ep_size": 0}, "at least 1"),
        ({"contract": "nonsense"}, "unknown contract"),
    ):
        with pytest.raises(ValueError, match=message):
            mirror.unpermute(rows, maps, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bf16 or fp32"):
        mirror.unpermute(rows.double(), maps, contract="owner")
    with pytest.raises(TypeError, match="rank_of_slot holds integers"):
        mirror.unpermute(rows, maps, rank_of_slot=ranks.float(), contract="megatron-vllm-swiglu")
    with pytest.raises(ValueError, match="combine_rows|unpermute"):
        mirror.combine(torch.ones(2, 3, 4), "owner")
    with pytest.raises(ValueError, match="W >= 1"):
        mirror.combine(torch.ones(0, 3, 4), "exact")


def test_maps_of_every_integer_type_say_the_same() -> None:
    rows = torch.randn(6, 3)
    ids, row_of_slot = torch.tensor([[2, 0], [1, 9]]), torch.tensor([[4, 0], [2, 3]])
    placement = mirror.Placement.even(4, 2)
    ranks, order = mirror.rank_of_slot(ids, placement), mirror.order_of_slot(ids, placement)
    want = mirror.unpermute(
        rows, row_of_slot, rank_of_slot=ranks, order_of_slot=order, ep_size=2, contract="megatron-deepgemm"
    )
    assert torch.equal(want[1], rows[2])
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
        assert torch.equal(mirror.rank_of_slot(ids.to(dtype), placement), ranks)
        assert torch.equal(mirror.inverse_map(ids.to(dtype), 4).row_of_slot, mirror.inverse_map(ids, 4).row_of_slot)
        # uint8 has no -1: the other map says which slot is not routed
        others = torch.int8 if dtype == torch.uint8 else dtype
        got = mirror.unpermute(
            rows, row_of_slot.to(dtype), rank_of_slot=ranks.to(others), order_of_slot=order.to(others), ep_size=2,
            contract="megatron-deepgemm",
        )  # fmt: skip
        assert torch.equal(got, want), dtype
        assert torch.equal(mirror.permute(want, row_of_slot.to(dtype), 6), mirror.permute(want, row_of_slot, 6))
    one = mirror.unpermute(
        rows, torch.tensor([[2, -1]]), rank_of_slot=torch.tensor([[0, 255]], dtype=torch.uint8), ep_size=2,
        contract="megatron-vllm-swiglu",
    )  # fmt: skip
    assert torch.equal(one[0], rows[2])


def test_a_slot_without_a_rank_is_not_routed_for_owner_either() -> None:
    rows = torch.tensor([[1.0], [2.0], [float("nan")]], requires_grad=True)
    ranks = torch.tensor([[0, 7, -1]])
    out = mirror.unpermute(rows, torch.tensor([[0, 1, 2]]), rank_of_slot=ranks, contract="owner")
    out.backward(torch.ones(1, 1))
    assert out.tolist() == [[3.0]] and rows.grad is not None and rows.grad.flatten().tolist() == [1.0, 1.0, 0.0]


def test_what_is_no_map_is_refused_before_it_is_read() -> None:
    rows, maps, placement = torch.ones(6, 2), torch.tensor([[0, 1]]), mirror.Placement.even(4, 2)
    swiglu = "megatron-vllm-swiglu"
    for wrong in (maps.float(), maps.bool(), maps.to(torch.complex64)):
        with pytest.raises(TypeError, match="row_of_slot holds integers"):
            mirror.unpermute(rows, wrong, contract=swiglu)
        with pytest.raises(TypeError, match="row_of_slot holds integers"):
            mirror.permute(rows[:1], wrong, 2)
        with pytest.raises(TypeError, match="rank_of_slot holds integers"):
            mirror.order_of_slot(maps, placement, wrong)
    for call in (mirror.inverse_map, lambda ids, _: mirror.rank_of_slot(ids, placement)):
        with pytest.raises(TypeError, match=r"expert_ids holds integers, got torch\.float32"):
            call(torch.rand(3, 2), 4)  # the weights in place of the ids
        with pytest.raises(TypeError, match="slots_of_routing_map makes ids of one"):
            call(torch.ones(3, 4, dtype=torch.bool), 4)
        with pytest.raises(ValueError, match=r"expert_ids is \[T, K\], got \(2,\)"):
            call(maps[0], 4)
    with pytest.raises(ValueError, match=r"rank_of_slot is \[T, K\] = \(1, 2\), got \(2, 1\)"):
        mirror.order_of_slot(maps, placement, maps.t())
    for experts, align in ((0, 1), (4, 0), (4, -1)):
        with pytest.raises(ValueError, match="at least 1"):
            mirror.inverse_map(maps, experts, align=align)
    with pytest.raises(ValueError, match=r"a routing map is \[T, E\]"):
        mirror.slots_of_routing_map(torch.ones(4), 1)
    far = maps.to("meta")
    for given in ({"row_of_slot": far}, {"row_of_slot": maps, "rank_of_slot": far}):
        with pytest.raises(ValueError, match=r"_of_slot is on meta, rows on cpu"):
            mirror.unpermute(rows, **given, contract=swiglu)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="probs is on meta"):
        mirror.unpermute(rows, maps, contract="slot-fp32", probs=torch.ones(1, 2, device="meta"))
    with pytest.raises(ValueError, match="row_of_slot is on meta, x on cpu"):
        mirror.permute(rows[:1], far, 2)
    big = torch.tensor([[2**33, 0]])  # would move the slot to another rank's places
    with pytest.raises(ValueError, match="place 8589934592, which does not fit into int32"):
        mirror.unpermute(rows, maps, rank_of_slot=maps, order_of_slot=big, ep_size=2, contract=swiglu)


def test_a_placement_keeps_its_tables_to_itself() -> None:
    ids, placement = torch.tensor([[0, 3]]), mirror.Placement.even(4, 2)
    fresh = pickle.dumps(placement)
    with FakeTensorMode():  # as torch.export traces: a fake table that stayed would make every later result one
        mirror.rank_of_slot(torch.zeros(1, 2, dtype=torch.int64), placement)
    with torch.device("meta"):
        assert mirror.rank_of_slot(ids, placement).tolist() == [[0, 1]]
    assert pickle.dumps(placement) == fresh  # tables may lie on a GPU that another process has not
    for again in (pickle.loads(fresh), copy.deepcopy(placement)):
        assert again == placement and hash(again) == hash(placement)
        assert mirror.order_of_slot(ids, again).tolist() == [[0, 1]]
    for wrong in ((("0",),), ((0.7,),)):
        with pytest.raises(TypeError):
            mirror.Placement(wrong, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one expert"):
        mirror.Placement.counts([])
