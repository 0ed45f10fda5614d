"""Recorded ids replayed, compared with live ones, and kept under activation checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bicomm.model_hooks import replay, router
from router_cases import same

E, K = 16, 3


def tokens(seed: int, rows: int = 20) -> torch.Tensor:
    return torch.randn(rows, E, generator=torch.Generator().manual_seed(seed))


def test_replayed_ids_with_live_weights_and_where_they_differ() -> None:
    rollout, live = tokens(0), tokens(0).clone()
    live[3, 5], live[11, 2] = 9.0, 9.0
    with replay.record() as tape:
        first = router.route(rollout, K, name="layer 0")
        router.route(rollout * 2, K, name="layer 1")
    assert len(tape) == 2 and tape.names == ["layer 0", "layer 1"]
    with replay.replay(tape, check=True) as running:
        again = router.route(live.requires_grad_(), K, name="layer 0")
        router.route(rollout * 2, K, name="layer 1")
    assert torch.equal(again.ids, first.ids)
    assert same(again.weights, live.detach().softmax(-1).gather(1, first.ids)) or torch.allclose(
        again.weights, live.softmax(-1).gather(1, first.ids), atol=1e-6
    )
    (grad,) = torch.autograd.grad(again.weights.sum(), live)
    assert grad.any()
    here, there = running.differences
    assert here.tokens.tolist() == [3, 11] and there.tokens.tolist() == []
    assert 5 in here.live[0].tolist() and 5 not in here.replayed[0].tolist()
    assert "call 0 (layer 0): 2 tokens differ: token 3: live [5" in str(here)
    assert "call 1 (layer 1): the same experts" in str(there)


def test_ids_of_an_engine_in_another_dtype_and_slot_order() -> None:
    x = tokens(1)
    ids = router.route(x, K).ids
    with replay.replay([ids.flip(-1).to(torch.int32)], check=True) as running:
        got = router.route(x, K)
    assert torch.equal(got.ids, ids.flip(-1)) and running.differences[0].tokens.numel() == 0
    assert running.differences[0].reordered == 20
    padding = torch.zeros(20, dtype=torch.bool)
    padding[7] = True
    other = ids.clone()
    other[7] = torch.tensor([0, 1, 2])
    assert replay.compare_ids(ids, other, padding_mask=padding).tokens.numel() == 0
    with pytest.raises(ValueError, match="shapes"):
        replay.compare_ids(ids, ids[:3])


def test_a_tape_that_does_not_fit_is_an_error() -> None:
    with replay.record() as tape:
        router.route(tokens(0), K, name="a")
    with pytest.raises(RuntimeError, match="has no ids: the tape holds 1"), replay.replay(tape):
        router.route(tokens(0), K)
        router.route(tokens(0), K)
    with pytest.raises(RuntimeError, match="is 'b', but 'a' was recorded"), replay.replay(tape):
        router.route(tokens(0), K, name="b")
    with pytest.raises(RuntimeError, match=r"\(19, 3\)"), replay.replay(tape):
        router.route(tokens(0, 19), K)
    with pytest.raises(RuntimeError, match="but 0 were made"), replay.replay(tape):
        pass
    assert router.route(tokens(5), K).ids.shape == (20, K)  # nothing stays switched on


def test_ids_of_the_wrong_shape_or_kind_are_an_error() -> None:
    x = tokens(0, 4)
    for ids in (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(12, dtype=torch.int64), torch.tensor(0)):
        with pytest.raises(ValueError, match=r"integers \[tokens, k\] = \(4, 3\)"):
            router.route(x, K, ids=ids)
        with pytest.raises(RuntimeError, match=r"\(tokens, k\) = \(4, 3\)"), replay.replay([ids]):
            router.route(x, K)
    with pytest.raises(ValueError, match="got torch.bool"):
        router.route(x, K, ids=torch.ones(4, K, dtype=torch.bool))


@pytest.mark.parametrize("index_dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_an_id_out_of_range_is_not_routed_in_any_dtype(index_dtype: torch.dtype) -> None:
    """65,536 + 3 is 3 in int16, and 2**32 + 3 is 3 in a kernel's int32."""
    x = tokens(0, 2)
    ids = torch.tensor([[1 << 16 | 3, 5, -1], [1 << 32 | 3, E, -(1 << 40)]])
    got = router.route(x, K, ids=ids, index_dtype=index_dtype, score_function="sigmoid", renormalize=False)
    assert got.ids.dtype == index_dtype and got.ids.tolist() == [[E, 5, -1], [E, E, -1]]
    assert got.weights.ne(0).tolist() == [[False, True, False], [False] * 3]
    with replay.replay([ids]):
        again = router.route(x, K, index_dtype=index_dtype, score_function="sigmoid", renormalize=False)
    assert same(again.weights, got.weights) and same(again.ids, got.ids)


def test_a_rollout_in_inference_mode_is_replayed_in_training() -> None:
    with torch.inference_mode(), replay.record() as tape:
        first = router.route(tokens(0), K)
    x = tokens(1).requires_grad_()
    with replay.replay(tape):
        got = router.route(x, K)
    assert torch.equal(got.ids, first.ids)
    (grad,) = torch.autograd.grad(got.weights.square().sum(), x)
    assert grad.any()


class Drifting(torch.nn.Module):
    """A layer whose logits are others each time it runs, as they are where upstream does not reproduce."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(tokens(3, E))
        self.seen: list[torch.Tensor] = []
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drift = torch.zeros(E)
        drift[len(self.seen) % E] = 50.0
        got = router.route(x @ self.weight + drift, K, name=self.name)
        self.seen.append(got.ids)
        return got.weights @ torch.ones(K, E)


def test_checkpointing_gets_the_ids_of_the_first_forward() -> None:
    x = tokens(4).requires_grad_()
    layers = [Drifting("0"), Drifting("1")]
    with replay.record() as outer:
        h = x
        for layer in layers:
            h = checkpoint(layer, h, use_reentrant=False, context_fn=replay.checkpoint_contexts)
    h.sum().backward()
    for layer in layers:
        assert len(layer.seen) == 2 and torch.equal(layer.seen[0], layer.seen[1])
    assert outer.names == ["0", "1"]  # recomputation was not written down
    plain = Drifting()
    checkpoint(plain, x, use_reentrant=False).sum().backward()
    assert not torch.equal(plain.seen[0], plain.seen[1]), "the twin: without it the drift moves tokens"


def test_checkpointing_inside_a_replay() -> None:
    x = tokens(4).requires_grad_()
    ids = router.route(tokens(9), K).ids
    layer = Drifting()
    with replay.replay([ids]):
        h = checkpoint(layer, x, use_reentrant=False, context_fn=replay.checkpoint_contexts)
        h.sum().backward()
    assert all(torch.equal(seen, ids) for seen in layer.seen) and len(layer.seen) == 2
    with replay.replay([ids]):
        h = checkpoint(Drifting(), x, use_reentrant=False)
        with pytest.raises(RuntimeError, match="checkpoint_contexts"):
            h.sum().backward()


def test_live_ids_repeat_under_checkpointing_where_upstream_does() -> None:
    x = tokens(6).requires_grad_()
    seen = []

    def layer(y: torch.Tensor) -> torch.Tensor:
        got = router.route(y * 1.5, K, score_function="sigmoid")
        seen.append(got)
        return got.weights.exp().exp()  # recomputation stops at the last tensor that was saved

    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert same(seen[0].ids, seen[1].ids) and same(seen[0].weights, seen[1].weights)
