"""The router on a GPU: the bits of the CPU's definition for any batch and launch shape; gate, z-loss, replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bicomm.model_hooks import losses, replay, router, router_kernel, scores
from bicomm.model_hooks.gate import gate
from router_cases import RULES, logits, same

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def arguments(experts: int, more: dict[str, Any]) -> dict[str, Any]:
    keyword = {k: v for k, v in more.items() if k != "bias"}
    if more.get("bias"):
        keyword["expert_bias"] = torch.randn(experts, generator=torch.Generator().manual_seed(5)) * 0.1
    return keyword


def on(device: torch.device, keyword: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in keyword.items()}


def leaf_on(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """A leaf there that shares nothing with x: `x.to(cpu)` is x itself, and a copy of what requires grad is no leaf."""
    return x.detach().clone().to(device).requires_grad_()


# every rule in one dtype, and the first two in the others; each third case without padding. A case costs two compiles.
CASES = [(rule, DTYPES[i % 4], i % 3 != 0) for i, rule in enumerate(RULES)] + [
    (RULES[0], torch.bfloat16, True),
    (RULES[1], torch.float32, False),
]


@pytest.mark.parametrize(("rule", "dtype", "padded"), CASES, ids=str)
def test_forward_and_backward_have_the_bits_of_the_definition(
    rule: tuple[int, int, dict[str, Any]], dtype: torch.dtype, padded: bool
) -> None:
    experts, k, more = rule
    keyword = arguments(experts, more)
    padding = torch.arange(300) % 7 == 3
    x = logits(300, experts, dtype=dtype)
    if padded:
        x[padding] = torch.nan
    grad = torch.randn(300, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for device in (CPU, CUDA):
        leaf = leaf_on(device, x)
        mask = padding.to(device) if padded else None
        got = router.route(leaf, k, padding_mask=mask, index_dtype=torch.int32, **on(device, keyword))
        (dx,) = torch.autograd.grad(got.weights, leaf, grad.to(device))
        results.append((got.weights, got.ids, dx))
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("function", "dtype"), [("softmax", torch.bfloat16), ("sqrtsoftplus", torch.float32)], ids=str)
def test_dense_outputs_scores_and_their_gradients(function: str, dtype: torch.dtype) -> None:
    x = logits(300, 192, dtype=dtype)
    grad = torch.randn(300, 192, generator=torch.Generator().manual_seed(1))
    results = []
    for device in (CPU, CUDA):
        leaf = leaf_on(device, x)
        probs, routing_map = router.fused_topk_with_score_function(leaf, 8, True, 4, 2, 2.5, function, None)
        (a,) = torch.autograd.grad(probs, leaf, grad.to(device, dtype))
        aux_map, values = router.fused_compute_score_for_moe_aux_loss(leaf, 8, function)
        (b,) = torch.autograd.grad(values, leaf, grad.to(device))
        results.append((probs, routing_map, a, aux_map, values, b))
    assert all(same(p, q) for p, q in zip(*results, strict=True))


def test_a_row_does_not_see_its_batch_nor_the_launch_shape() -> None:
    x = logits(8192, 256).to(CUDA)
    want = router.route(x, 8, renormalize=True, index_dtype=torch.int32)
    for rows in (1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 255, 1024, 2047, 2048, 4096):
        got = router.route(x[:rows], 8, renormalize=True, index_dtype=torch.int32)
        assert same(got.ids, want.ids[:rows]) and same(got.weights, want.weights[:rows])
        last = router.route(x[-rows:], 8, renormalize=True, index_dtype=torch.int32)
        assert same(last.ids, want.ids[-rows:]) and same(last.weights, want.weights[-rows:])
    rule = scores.Rule(8, renormalize=True)
    for shape in ((2, 1), (8, 1), (1, 4), (4, 8)):
        weights, ids = torch.empty_like(want.weights), torch.empty_like(want.ids)
        router_kernel.run_forward(
            x, None, None, None, rule, weights=weights, ids=ids, dense=None, routing_map=None, shape=shape
        )
        assert same(ids, want.ids) and same(weights, want.weights)


def test_more_experts_than_the_kernel_takes() -> None:
    x = logits(64, 1500)
    a, b = router.route(x, 8), router.route(x.to(CUDA), 8)
    assert same(a.ids, b.ids) and same(a.weights, b.weights)


def test_route_in_a_graph_follows_its_input() -> None:
    x = logits(512, 256).to(CUDA)
    router.route(x, 8, renormalize=True, index_dtype=torch.int32)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = router.route(x, 8, renormalize=True, index_dtype=torch.int32)
    for seed in (1, 2, 3):
        x.copy_(logits(512, 256, seed))
        graph.replay()
        torch.cuda.synchronize()
        want = router.route(logits(512, 256, seed), 8, renormalize=True, index_dtype=torch.int32)
        assert same(got.ids, want.ids) and same(got.weights, want.weights)


def test_gate_rows_do_not_see_the_batch_and_3d_is_2d() -> None:
    for hidden, experts, dtype in (
        (2048, 128, torch.bfloat16),
        (7168, 256, torch.bfloat16),
        (2050, 17, torch.bfloat16),
        (2048, 128, torch.float32),
        (64, 1, torch.float16),
    ):
        generator = torch.Generator().manual_seed(hidden)
        x = torch.randn(1024, hidden, generator=generator).to(CUDA, dtype)
        w = torch.randn(experts, hidden, generator=generator).to(CUDA, dtype)
        want = gate(x, w)
        reference = x.double() @ w.double().t()
        assert ((want - reference).abs() <= 1e-5 * (x.double().abs() @ w.double().abs().t())).all()
        for rows in (1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 256, 257):
            assert same(gate(x[:rows], w), want[:rows])
        assert same(gate(x.view(4, 256, hidden), w).view(1024, experts), want)
        shuffled = torch.randperm(1024, generator=generator).to(CUDA)
        assert same(gate(x[shuffled], w), want[shuffled])


def test_gate_gradients_repeat_and_dx_rows_do_not_see_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(513, 2048, generator=generator).to(CUDA, torch.bfloat16).detach().requires_grad_()
    w = torch.randn(128, 2048, generator=generator).to(CUDA, torch.bfloat16).detach().requires_grad_()
    g = torch.randn(513, 128, generator=generator).to(CUDA)
    dx, dw = torch.autograd.grad(gate(x, w), (x, w), g)
    for _ in range(8):
        again = torch.autograd.grad(gate(x, w), (x, w), g)
        assert same(again[0], dx) and same(again[1], dw)
    part = x.detach()[:65].clone().requires_grad_()
    (dx65,) = torch.autograd.grad(gate(part, w), part, g[:65])
    assert same(dx65, dx[:65])
    assert (
        (dw.double() - g.double().t() @ x.double()).abs() <= 2.0**-7 * (g.double().abs().t() @ x.double().abs())
    ).all()


def test_z_loss_and_counts_have_the_bits_of_the_definition() -> None:
    x = torch.randn(777, 96, generator=torch.Generator().manual_seed(0)) * 3
    mask = torch.arange(777) % 4 == 0
    x[mask] = torch.nan
    for reduction in ("blocked", "exact"):
        results = []
        for device in (CPU, CUDA):
            leaf = leaf_on(device, x)
            loss = losses.z_loss(leaf, 1e-3, padding_mask=mask.to(device), reduction=reduction)  # type: ignore[arg-type]
            (grad,) = torch.autograd.grad(loss, leaf)
            results.append((loss, grad))
        assert all(same(a, b) for a, b in zip(*results, strict=True))
    ids = torch.randint(-1, 97, (777, 8), generator=torch.Generator().manual_seed(2))
    got = losses.count_tokens(ids.to(CUDA), 96, padding_mask=mask.to(CUDA))
    assert torch.equal(got.cpu(), losses.count_tokens(ids, 96, padding_mask=mask))


def test_replay_and_checkpointing_on_the_gpu() -> None:
    x = leaf_on(CUDA, logits(64, 32)[9:])
    with replay.record() as tape:
        first = router.route(x, 4)
    other = x.detach() + torch.randn(x.shape, device=CUDA)
    with replay.replay(tape, check=True) as running:
        again = router.route(other, 4)
    assert same(again.ids, first.ids)
    live = router.route(other, 4)
    assert running.differences[0].tokens.numel() == int(
        (live.ids.sort().values != first.ids.sort().values).any(-1).sum()
    )

    def layer(y: torch.Tensor) -> torch.Tensor:
        return router.route(y + noise(), 4).weights

    def noise() -> torch.Tensor:  # the recomputation sees other logits, as it does where upstream is not reproducible
        calls.append(1)
        return torch.full((1, 32), 0.0, device=CUDA).index_fill(1, torch.tensor([len(calls)], device=CUDA), 9.0)

    calls: list[int] = []
    seen: list[torch.Tensor] = []
    with replay.record() as outer:
        out = torch.utils.checkpoint.checkpoint(
            layer, x, use_reentrant=False, preserve_rng_state=False, context_fn=replay.checkpoint_contexts
        )
        seen.extend(outer.ids)
    out.sum().backward()
    assert len(calls) == 2 and len(outer) == 1


def test_qwen3_moe_trains_twice_and_checkpointed_with_the_same_curve() -> None:
    pytest.importorskip("transformers")
    tests = Path(__file__).resolve().parent.parent
    environment = {
        **os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(tests / "qwen_router.py"), "cuda", "bf16"], env=environment, capture_output=True,
        text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["same_ids"]
    assert record["curves"][0] == record["curves"][1] == record["curves"][2]
    assert record["weights"][0] == record["weights"][1] == record["weights"][2]
    assert record["curves"][0][-1] < record["curves"][0][0]
