"""reduction="exact": one rounding, and the same bits however the tokens are split over blocks and ranks."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from bicomm.model_hooks import exact_loss, losses, router
from bicomm.model_hooks.aux_loss import fused_moe_aux_loss
from oracle import FP32, round_to
from router_cases import bits, probabilities, same

T, E, K = 203, 24, 4


def step(values: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Loss and gradient of this rank's tokens in a step of the whole group."""
    leaf = values.clone().requires_grad_()
    counts = losses.count_tokens(ids, E, padding_mask=mask, group=group)
    total = losses.count_valid(ids, padding_mask=mask, group=group)
    loss = losses.load_balancing_loss(
        leaf, counts, total, K, 0.01, padding_mask=mask, reduction="exact", group=group
    )  # fmt: skip
    z = losses.z_loss(leaf, 1e-3, total, padding_mask=mask, reduction="exact", group=group)
    # two sequences whose tokens the ranks share, with and without padding; counts over microbatches
    pair, chosen, padding = (
        torch.stack([a, b], 1) for a, b in ((leaf, leaf.roll(1, -1)), (ids, (ids + 1) % E), (mask, mask))
    )
    balance = losses.GlobalBalance(E)
    for part in (slice(0, None, 2), slice(1, None, 2)):
        balance.add(ids[part], padding_mask=mask[part], group=group)
    more = [
        losses.sequence_loss(pair, chosen, K, 0.01, reduction="exact", group=group),
        losses.sequence_loss(pair, chosen, K, 0.01, padding_mask=padding, reduction="exact", group=group),
        balance.loss(leaf, total, K, 0.01, padding_mask=mask, reduction="exact", group=group),
    ]
    (loss + z + sum(more)).backward()
    assert leaf.grad is not None
    return [leaf.grad, loss.detach(), z.detach(), *(each.detach() for each in more), counts, total, balance.counts]


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = probabilities(T, E)
    return values, router.route(values, K).ids, torch.arange(T) % 6 == 5


def body() -> list[torch.Tensor]:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    values, ids, mask = data()
    # uneven parts; at eight ranks, one has none
    edges = [0, *sorted(torch.randint(0, T, (world - 1,), generator=torch.Generator().manual_seed(world)).tolist()), T]
    if world == 8:
        edges[3] = edges[4]
    part = slice(edges[rank], edges[rank + 1])
    got = step(values[part], ids[part], mask[part], dist.group.WORLD)
    # the naive way: fp32 sums per rank, added by an all-reduce
    naive = torch.where(mask[part, None], 0.0, values[part]).sum(0)
    dist.all_reduce(naive)
    dist.destroy_process_group()
    return [*got, naive]


def test_the_same_tokens_on_1_2_and_8_ranks_give_the_same_bits() -> None:
    values, ids, mask = data()
    want = step(values, ids, mask, None)
    naive = set()
    for world in (1, 2, 8):
        results = [r.value for r in run_ranks(world, body, launcher="fork", timeout=60)]
        for got in results:
            assert all(same(a, b) for a, b in zip(got[1:-1], want[1:], strict=True))
        assert same(torch.cat([got[0] for got in results]), want[0])
        naive.add(tuple(bits(results[0][-1]).tolist()))
    assert len(naive) > 1, "the twin: fp32 sums depend on the split"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_loss_is_the_exact_sum_rounded_once(data: st.DataObject) -> None:
    number = st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.sampled_from([1.0, 2.0**-24, 2.0**-60, 2.0**60, -(2.0**60), 2.0**-149, -128.0, 64.0, 2.0**-33, 3e38]),
    )
    rows, cols = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    x = torch.tensor([[data.draw(number) for _ in range(cols)] for _ in range(rows)])
    counts = torch.tensor([data.draw(st.integers(0, 2**62)) for _ in range(cols)])
    c = data.draw(st.floats(min_value=0.0, max_value=2.0**20, width=32))
    exact = sum(Fraction(v) * n for row in x.tolist() for v, n in zip(row, counts.tolist(), strict=True)) * Fraction(c)
    sums = exact_loss.definition(x)
    assert exact_loss.finish_definition(sums, counts, c) == round_to(Fraction(exact), FP32)
    order = torch.randperm(rows)
    cut = data.draw(st.integers(0, rows))
    parts = exact_loss.definition(x[order][:cut]) + exact_loss.definition(x[order][cut:])
    assert torch.equal(parts, sums)


def test_flushed_subnormals_are_in_the_sums_all_the_same() -> None:
    x = torch.tensor([[2.0**-149], [2.0**-130], [1.0]])
    want = exact_loss.definition(x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        got = exact_loss.definition(x)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got, want) and want[0].item() == 1 + 2**19


def test_ties_and_cancellations() -> None:
    for column, want in [
        ([1.0, 2.0**-24, 2.0**-60], 1.0 + 2.0**-23),
        ([2.0**60, 1.0, -(2.0**60)], 1.0),
        ([-128.0, 64.0, 64.0, 2.0**-33, 2.0**-60], 2.0**-33),
        ([3e38, 3e38, -3e38], float(torch.tensor(3e38))),
    ]:
        x = torch.tensor(column)[:, None]
        assert fused_moe_aux_loss(x, torch.ones(1, dtype=torch.int64), 1, 1, 1, 1.0, reduction="exact").item() == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_mask_and_no_rows_at_all(dtype: torch.dtype) -> None:
    x = probabilities(10, 6, dtype)
    mask = torch.arange(10) >= 4
    assert torch.equal(exact_loss.definition(x, mask), exact_loss.definition(x[:4]))
    assert not exact_loss.definition(x[:0]).any()
