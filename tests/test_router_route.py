"""Weights and gradients by value, against megatron-core and fp64, and what must not change a bit."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch

from bicomm.model_hooks import losses, replay, router
from bicomm.model_hooks.gate import gate
from router_cases import RULES, logits, same

CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def keyword(experts: int, more: dict[str, Any]) -> dict[str, Any]:
    out = {k: v for k, v in more.items() if k != "bias"}
    if more.get("bias"):
        out["expert_bias"] = torch.randn(experts, generator=torch.Generator().manual_seed(5)) * 0.1
    return out


def scores64(x: torch.Tensor, function: str) -> torch.Tensor:
    if function == "softmax":
        return x.softmax(-1)
    return x.sigmoid() if function == "sigmoid" else torch.nn.functional.softplus(x, threshold=1e9).sqrt()


def reference(x: torch.Tensor, ids: torch.Tensor, k: int, more: dict[str, Any]) -> torch.Tensor:
    """The weights at ids in fp64, by the formulas."""
    function = more.get("score_function", "softmax")
    if not more.get("pre_softmax", True):
        w = x.gather(-1, ids).softmax(-1)
    else:
        w = scores64(x, function).gather(-1, ids)
        if more.get("renormalize", function != "softmax") and k > 1:
            w = w / w.sum(-1, keepdim=True)
    return w * more.get("scaling_factor", 1.0)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_weights_and_gradients_by_value(rule: tuple[int, int, dict[str, Any]]) -> None:
    experts, k, more = rule
    for dtype in DTYPES:
        x = logits(40, experts, dtype=dtype)[9:].requires_grad_()
        got = router.route(x, k, **keyword(experts, more))
        grad = torch.randn(got.weights.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        (dx,) = torch.autograd.grad(got.weights, x, grad)
        assert got.weights.dtype == dx.dtype == dtype
        wide = x.detach().double().requires_grad_()
        want = reference(wide, got.ids, k, more)
        (dwide,) = torch.autograd.grad(want, wide, grad.double())
        tolerance = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(dtype, 2e-6)
        torch.testing.assert_close(got.weights.double(), want, rtol=tolerance, atol=1e-6)
        torch.testing.assert_close(dx.double(), dwide, rtol=tolerance, atol=1e-5 if tolerance < 1e-5 else 2e-3)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [(None, None), (8, 4)])
def test_megatron_core_agrees(function: str, groups: tuple[int | None, int | None]) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 0.1 if function == "sigmoid" else None
    for k, pre in ((8, True), (1, True), (8, False)):
        if function == "sigmoid" and not pre:
            continue
        if groups[0] and k == 1:
            continue  # Megatron takes the sum of 1 // 4 = 0 scores a group there
        arguments = {
            "use_pre_softmax": pre, "num_groups": groups[0], "group_topk": groups[1], "scaling_factor": 2.5,
            "score_function": function, "expert_bias": bias,
        }  # fmt: skip
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        want, want_map = moe_utils.topk_routing_with_score_function(a, k, **arguments)
        got, got_map = router.fused_topk_with_score_function(b, k, **arguments)
        assert torch.equal(got_map, want_map)
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-7)
        grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(2))
        want.backward(grad)
        got.backward(grad)
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-5, atol=1e-6)
    mask = torch.arange(200) % 3 == 0
    want_map, want = moe_utils.compute_routing_scores_for_aux_loss(x, 8, function, padding_mask=mask)
    got_map, got = router.fused_compute_score_for_moe_aux_loss(x, 8, function, padding_mask=mask)
    assert torch.equal(got_map, want_map)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_for_the_auxiliary_loss_and_their_gradient(function: str) -> None:
    x = logits(30, 48)[9:].requires_grad_()
    got = router.scores_for_aux_loss(x, function)  # type: ignore[arg-type]
    wide = x.detach().double().requires_grad_()
    want = scores64(wide, function)
    want = want / want.sum(-1, keepdim=True)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(2))
    (dx,) = torch.autograd.grad(got, x, grad)
    (dwide,) = torch.autograd.grad(want, wide, grad.double())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-8)
    torch.testing.assert_close(dx.double(), dwide, rtol=2e-5, atol=1e-7)


def test_no_row_sees_its_batch() -> None:
    x = logits(600, 96)
    for more in ({"renormalize": True}, {"score_function": "sigmoid"}, {"pre_softmax": False}):
        want = router.route(x, 6, **more)  # type: ignore[arg-type]
        for rows in (1, 2, 7, 16, 33, 65, 257):
            got = router.route(x[-rows:], 6, **more)  # type: ignore[arg-type]
            assert same(got.ids, want.ids[-rows:]) and same(got.weights, want.weights[-rows:])
        strided = torch.stack([x, x], -1)[..., 0]
        assert same(router.route(strided, 6, **more).weights, want.weights)  # type: ignore[arg-type]
        cube = router.route(x.view(20, 30, 96), 6, **more)  # type: ignore[arg-type]
        assert cube.ids.shape == (20, 30, 6) and same(cube.weights.view(600, 6), want.weights)
    finite = x[9:]
    across = torch.softmax(finite.t().contiguous(), 0).t()
    assert not same(across.contiguous(), torch.softmax(finite, -1)), "the twin: torch's own softmax sees the layout"


def test_index_and_map_outputs_say_the_same() -> None:
    x = logits(50, 40).requires_grad_()
    got = router.route(x, 5, score_function="sigmoid", scaling_factor=1.5)
    dense, chosen = router.fused_topk_with_score_function(x, 5, True, None, None, 1.5, "sigmoid", None)
    assert torch.equal(chosen, torch.zeros(50, 40, dtype=torch.bool).scatter(1, got.ids, True))
    assert same(dense.gather(1, got.ids), got.weights) and dense[~chosen].eq(0).all()
    grad = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    a = torch.autograd.grad(dense, x, grad)[0]
    assert same(a, torch.autograd.grad(got.weights, x, grad.gather(1, got.ids))[0])
    for dtype in (torch.int16, torch.int32, torch.int64):
        buffer = torch.full((50, 5), -7, dtype=dtype)
        _, written = router.fused_topk_with_score_function(
            x, 5, True, None, None, 1.5, "sigmoid", None, topk_indices=buffer
        )
        assert written is buffer and torch.equal(buffer.long(), got.ids)
        assert torch.equal(router.route(x, 5, score_function="sigmoid", index_dtype=dtype).ids, buffer)


@pytest.mark.parametrize("experts", [1, 8, 13, 64])
def test_a_map_of_bits_says_what_the_map_of_bytes_says(experts: int) -> None:
    for lead in ((0,), (6,), (2, 3)):
        x = torch.randn(*lead, experts)
        arguments = (x, 1 + experts // 3, True, None, None, None, "softmax", None)
        _, chosen = router.fused_topk_with_score_function(*arguments)
        _, packed = router.fused_topk_with_score_function(*arguments, "bitmap_u8")
        assert packed.dtype == torch.uint8 and packed.shape == (*lead, (experts + 7) // 8)
        bit = [(packed[..., e // 8] >> (e % 8)) & 1 for e in range(experts)]
        assert torch.equal(torch.stack(bit, -1).bool(), chosen)
        for_loss, values = router.fused_compute_score_for_moe_aux_loss(x, arguments[1], "softmax", 1)
        assert torch.equal(for_loss, packed) and values.shape == x.shape
    with pytest.raises(ValueError, match="'bytemap'.*got 'bits'"):
        router.fused_topk_with_score_function(*arguments, "bits")
    with pytest.raises(ValueError, match="takes the place of the map"):
        buffer = torch.empty(*lead, arguments[1], dtype=torch.int32)
        router.fused_topk_with_score_function(*arguments, "bitmap_u8", buffer)
    with replay.record() as tape, pytest.raises(ValueError, match="topk_indices is"):
        router.fused_topk_with_score_function(*arguments, topk_indices=buffer[0])
    assert len(tape) == 0


@pytest.mark.skipif(not CXX, reason="no C++ compiler")
def test_compiled_code_routes_as_written() -> None:
    """Inductor keeps bf16 values in fp32 between operators that it fuses: decisions, weights and scores would move."""

    def layer(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        got = router.route(x * 1.1, 4)
        values = router.scores_for_aux_loss(x * 1.1)
        counts = losses.count_tokens(got.ids, 64)
        loss = losses.load_balancing_loss(values, counts, x.shape[0], 4, 0.01)
        return got.ids, got.weights.float() * 3, values, counts, loss, losses.z_loss(x * 1.1, 0.1), gate(x * 1.1, w)

    x, w = logits(3000, 64, dtype=torch.bfloat16)[9:], logits(16, 64, dtype=torch.bfloat16)[9:]
    want = layer(x, w)
    torch._dynamo.reset()
    compiled = torch.compile(layer)
    assert all(same(a, b) for a, b in zip(compiled(x, w), want, strict=True))
    assert all(same(a, b) for a, b in zip(compiled(x[:50], w), layer(x[:50], w), strict=True))


def test_padding_never_reaches_a_result() -> None:
    x = logits(40, 32)
    mask = torch.arange(40) % 4 == 1
    poisoned = x.clone()
    poisoned[mask] = torch.nan
    leaf = poisoned.requires_grad_()
    got = router.route(leaf, 4, renormalize=True, padding_mask=mask)
    values = router.scores_for_aux_loss(leaf, padding_mask=mask)
    assert got.ids[mask].eq(-1).all() and got.weights[mask].eq(0).all() and values[mask].eq(0).all()
    clean = router.route(x, 4, renormalize=True)
    assert same(got.ids[~mask], clean.ids[~mask]) and same(got.weights[~mask], clean.weights[~mask])
    (a,) = torch.autograd.grad(got.weights, leaf, torch.ones_like(got.weights))
    (b,) = torch.autograd.grad(values, leaf, torch.ones_like(values))
    assert a[mask].eq(0).all() and b[mask].eq(0).all()


def test_routing_by_given_ids_uses_live_logits_and_skips_minus_one() -> None:
    x = logits(30, 16)[9:].requires_grad_()
    ids = router.route(torch.randn(21, 16, generator=torch.Generator().manual_seed(8)), 4).ids
    ids[::3, 2] = -1
    for more in ({"score_function": "sigmoid"}, {"pre_softmax": False}, {"renormalize": True}):
        got = router.route(x, 4, ids=ids, **more)  # type: ignore[arg-type]
        assert torch.equal(got.ids, ids) and got.weights[::3, 2].eq(0).all()
        torch.testing.assert_close(got.weights.sum(-1), torch.ones(21))
        (dx,) = torch.autograd.grad(got.weights, x, torch.randn(21, 4))
        assert torch.isfinite(dx).all()


def test_no_tokens() -> None:
    x = torch.empty(0, 16, requires_grad=True)
    got = router.route(x, 4)
    assert got.weights.shape == got.ids.shape == (0, 4)
    (dx,) = torch.autograd.grad(got.weights.sum(), x)
    assert dx.shape == (0, 16)
