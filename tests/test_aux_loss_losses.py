"""Counts, sequence and global losses, z-loss, expert bias: integers, padding, and any number of ranks."""

from __future__ import annotations

import pytest
import torch

from bicomm.model_hooks import losses, router
from bicomm.model_hooks.aux_loss import fused_moe_aux_loss
from router_cases import probabilities, same

E, K = 16, 3


def some(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, E, generator=torch.Generator().manual_seed(seed)) * 2
    return router.scores_for_aux_loss(x), router.route(x, K).ids


def test_counts_are_integers_without_padding_or_unrouted_slots() -> None:
    ids = torch.randint(-1, E + 1, (500, K), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(500) % 3 == 0
    counts = losses.count_tokens(ids, E, padding_mask=mask)
    want = [int((ids[~mask] == e).sum()) for e in range(E)]
    assert counts.dtype == torch.int64 and counts.tolist() == want
    assert losses.count_tokens(ids.to(torch.int16).view(5, 100, K), E, padding_mask=mask.view(5, 100)).tolist() == want
    assert losses.count_valid(ids, padding_mask=mask).item() == int((~mask).sum())
    assert losses.count_tokens(ids[:0], E).tolist() == [0] * E
    with pytest.raises(TypeError, match="ids are integers"):
        losses.count_tokens(ids.float(), E)


def test_a_mask_of_another_dtype_or_shape_is_an_error_and_not_another_count() -> None:
    """`~` of an integer mask is another number: three of ten tokens padded gave a total of -13, or 2,547 in uint8."""
    ids, values = torch.zeros(10, 2, dtype=torch.int64), torch.ones(10, E)
    mask = torch.arange(10) < 3
    assert losses.count_valid(ids, padding_mask=mask) == 7
    counts = losses.count_tokens(ids, E, padding_mask=mask)
    for wrong in (mask.long(), mask.to(torch.uint8), mask.float(), mask[:5], mask.view(2, 5), mask.to("meta")):
        for call in (
            lambda m: losses.count_valid(ids, padding_mask=m),
            lambda m: losses.count_tokens(ids, E, padding_mask=m),
            lambda m: losses.load_balancing_loss(values, counts, 7, 2, 0.01, padding_mask=m),
            lambda m: losses.z_loss(values, 1e-3, 7, padding_mask=m),
            lambda m: losses.GlobalBalance(E).loss(values, 7, 2, 0.01, padding_mask=m),
        ):
            with pytest.raises(ValueError, match="padding_mask is bool"):
                call(wrong)
    with pytest.raises(ValueError, match=r"bool \(5, 2\), got \(2, 5\)"):  # batch first: other tokens
        losses.sequence_loss(values.view(5, 2, E), ids.view(5, 2, 2), 2, 0.01, padding_mask=mask.view(2, 5))
    with pytest.raises(TypeError, match="ids are integers, got torch.bool"):
        losses.count_tokens(ids.bool(), E)


def test_counts_in_bf16_turn_the_bias_the_wrong_way() -> None:
    """The exact sum is 40,840, bf16 makes 41,216 of it."""
    per_rank = torch.tensor([[5088, 5267, 4947, 5073, 5299, 5217, 4918, 5031], [5120] * 8]).t()
    total = per_rank.sum(0)
    assert total.tolist() == [40_840, 40_960]  # expert 0 has fewer: its bias goes up
    naive = torch.zeros(2, dtype=torch.bfloat16)
    for row in per_rank:
        naive = naive + row.to(torch.bfloat16)
    assert naive.tolist() == [41_216, 40_960], "the twin: in bf16 it has more"
    bias = losses.updated_expert_bias(torch.zeros(2), total, 0.001)
    assert bias.tolist() == [float(torch.tensor(0.001)), -float(torch.tensor(0.001))]
    with pytest.raises(TypeError, match="41,216"):
        losses.updated_expert_bias(torch.zeros(2), naive, 0.001)


def test_the_bias_follows_an_integer_sign() -> None:
    big = 2**53
    counts = torch.tensor([big, big + 1, big + 2, big + 1])
    assert losses.updated_expert_bias(torch.ones(4), counts, 0.5).tolist() == [1.5, 1.0, 0.5, 1.0]
    average = counts.double().sum() / 4
    assert torch.sign(average - counts.double()).tolist() != [1.0, 0.0, -1.0, 0.0], "the twin: fp64 loses it"
    both = losses.updated_expert_bias(torch.zeros(2), torch.tensor([[3, 1], [2, 2]]), 1.0)
    assert both.tolist() == [[-1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("reduction", ["blocked", "exact"])
def test_the_sequence_loss_is_the_mean_over_sequences(reduction: str) -> None:
    length, batch = 40, 3
    values, ids = some(length * batch)
    values, ids = values.view(length, batch, E).requires_grad_(), ids.view(length, batch, K)
    got = losses.sequence_loss(values, ids, K, 0.01, reduction=reduction)  # type: ignore[arg-type]
    each = [
        losses.load_balancing_loss(
            values[:, b], losses.count_tokens(ids[:, b], E), length, K, 0.01, reduction=reduction
        )  # type: ignore[arg-type]
        for b in range(batch)
    ]
    torch.testing.assert_close(got, sum(each) / batch, rtol=1e-6, atol=0)
    (a,) = torch.autograd.grad(got, values)
    (b,) = torch.autograd.grad(sum(each) / batch, values)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    mask = torch.zeros(length, batch, dtype=torch.bool)
    mask[30:, 1], mask[:, 2] = True, True
    poisoned = values.detach().clone()
    poisoned[mask] = torch.nan
    padded = losses.sequence_loss(poisoned, ids, K, 0.01, padding_mask=mask, reduction=reduction)  # type: ignore[arg-type]
    short = losses.load_balancing_loss(values[:30, 1], losses.count_tokens(ids[:30, 1], E), 30, K, 0.01)
    torch.testing.assert_close(padded, (each[0] + short) / batch, rtol=1e-6, atol=0)


def test_the_sequence_loss_of_megatron_core() -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    length, batch = 40, 3
    values, ids = some(length * batch)
    chosen = torch.zeros(length * batch, E, dtype=torch.int64).scatter(1, ids, 1)
    want = moe_utils.switch_load_balancing_loss_func(
        values.reshape(length, -1), chosen.reshape(length, -1).sum(0), length, K, E, 0.01
    )
    got = losses.sequence_loss(values.view(length, batch, E), ids.view(length, batch, K), K, 0.01)
    torch.testing.assert_close(got, want / batch, rtol=1e-5, atol=0)


def test_the_global_loss_uses_all_counts_so_far() -> None:
    balance = losses.GlobalBalance(E)
    micro = [some(50, seed) for seed in range(4)]
    for values, ids in micro:
        balance.add(ids)
        loss = balance.loss(values.requires_grad_(), 50, K, 0.01)
        loss.backward()
    average = balance.counts.double() / 4  # as Megatron-LM averages them
    c = E * 0.01 / (K * 50 * 50)
    torch.testing.assert_close(loss.double(), (values.double().sum(0) * average).sum() * c, rtol=1e-5, atol=0)
    torch.testing.assert_close(values.grad.double(), (average * c).expand(50, E), rtol=1e-5, atol=0)  # type: ignore[union-attr]
    exact = balance.loss(values, 50, K, 0.01, reduction="exact")
    torch.testing.assert_close(exact, loss, rtol=1e-6, atol=0)
    balance.reset()
    assert not balance.counts.any() and balance.total == 0


@pytest.mark.parametrize("reduction", ["blocked", "exact"])
def test_the_z_loss_of_megatron_core(reduction: str) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    x = torch.randn(90, E, generator=torch.Generator().manual_seed(0)) * 3
    mask = torch.arange(90) % 4 == 0
    for padding in (None, mask):
        a, b = x.clone().requires_grad_(), x.clone()
        if padding is not None:
            b[padding] = torch.nan
        b.requires_grad_()
        want = moe_utils.z_loss_func(a, 1e-3, padding_mask=padding)
        got = losses.z_loss(b, 1e-3, padding_mask=padding, reduction=reduction)  # type: ignore[arg-type]
        want.backward()
        got.backward()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("kind", ["aux", "z"])
def test_a_step_does_not_depend_on_how_many_ranks_share_it(kind: str) -> None:
    """Uneven valid tokens a rank; the ranks' gradients, added, are the one-rank gradient, bit for bit."""
    tokens = 96
    x = torch.randn(tokens, E, generator=torch.Generator().manual_seed(0))
    ids = router.route(x, K).ids
    mask = torch.arange(tokens) % 5 == 0
    counts, total = losses.count_tokens(ids, E, padding_mask=mask), losses.count_valid(ids, padding_mask=mask)

    def gradient(part: slice, ranks: int) -> torch.Tensor:
        leaf = x[part].clone().requires_grad_()
        if kind == "z":
            loss = losses.z_loss(leaf, 1e-3, total, padding_mask=mask[part])
        else:
            values = router.scores_for_aux_loss(leaf, padding_mask=mask[part])
            loss = losses.load_balancing_loss(values, counts, total, K, 0.01, padding_mask=mask[part])
        out = losses.attach_loss(leaf * 0.0, loss, averaged_over=ranks)
        out.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    want = gradient(slice(0, tokens), 1)
    assert want[mask].eq(0).all() and want[~mask].ne(0).any()
    for ranks in (2, 4, 8):
        edges = [0, *(tokens * r // ranks - r for r in range(1, ranks)), tokens]
        parts = [gradient(slice(edges[r], edges[r + 1]), ranks) / ranks for r in range(ranks)]  # the trainer's average
        assert same(torch.cat(parts), want)


def test_microbatches_are_not_one_batch_and_the_docs_say_so() -> None:
    """A product of two sums does not add up over microbatches ([4, 4, 4] or [6, 2, 4] valid tokens)."""
    values, ids = some(12)
    whole = fused_moe_aux_loss(values, losses.count_tokens(ids, E), 12, E, K, 0.01)

    def split(sizes: list[int]) -> float:
        parts = zip(values.split(sizes), ids.split(sizes), strict=True)
        return sum(
            fused_moe_aux_loss(v, losses.count_tokens(i, E), len(v), E, K, 0.01).item() * len(v) / 12 for v, i in parts
        )

    assert abs(split([4, 4, 4]) - whole.item()) > 1e-4 and abs(split([6, 2, 4]) - split([4, 4, 4])) > 1e-4
    # counts of the whole step make it linear in the scores, and so independent of the cut, up to rounding
    counts = losses.count_tokens(ids, E)
    for sizes in ([4, 4, 4], [6, 2, 4]):
        total = sum(fused_moe_aux_loss(v, counts, 12, E, K, 0.01).item() for v in values.split(sizes))
        assert abs(total / whole.item() - 1) < 1e-6


def test_attach_loss_leaves_the_activation_and_scales_the_gradient() -> None:
    values = probabilities(8, E).requires_grad_()
    x = torch.randn(8, 4, requires_grad=True)
    loss = fused_moe_aux_loss(values, torch.ones(E, dtype=torch.int64), 8, E, K, 0.01)
    (direct,) = torch.autograd.grad(loss, values, torch.tensor(12.0), retain_graph=True)
    out = losses.attach_loss(x, loss, averaged_over=4, loss_scale=3.0)
    assert same(out, x)
    a, b = torch.autograd.grad(out, (x, values), torch.ones(8, 4))
    assert a.eq(1).all() and same(b, direct)
