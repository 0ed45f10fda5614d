"""The Triton kernels of the router: the definition's bits in the interpreter, and what the compiler makes of them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bicomm.model_hooks import all_scores_kernel, losses, pinned, router, router_kernel, scores, z_loss_kernel
from router_cases import RULES, logits, same

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, in the interpreter, on NaN and infinity
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU these run for real: tests/gpu")


def rule_of(experts: int, k: int, more: dict[str, Any]) -> tuple[scores.Rule, torch.Tensor | None]:
    keyword = {name: value for name, value in more.items() if name != "bias"}
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(5)) * 0.1 if more.get("bias") else None
    names = (
        "score_function",
        "pre_softmax",
        "renormalize",
        "scaling_factor",
        "num_groups",
        "group_topk",
        "group_score_topk",
    )
    values = {"score_function": "softmax", "pre_softmax": True, **keyword}
    return router._rule(experts, k, *(values.get(name) for name in names)), bias  # type: ignore[arg-type]


@interpreted
@pytest.mark.parametrize("shape", [(1, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("case", RULES, ids=str)
def test_forward_and_backward_have_the_bits_of_the_definition(
    case: tuple[int, int, dict[str, Any]], shape: tuple[int, int]
) -> None:
    experts, k, more = case
    rule, bias = rule_of(experts, k, more)
    dtype = torch.float32 if shape == (1, 1) else torch.bfloat16
    rows = 11
    mask = torch.arange(rows) == 9
    x = logits(rows, experts, dtype=dtype)
    x[9] = torch.nan
    leaf = x.clone().requires_grad_()
    keyword = {
        "padding": mask, "fixed": None, "rule": rule, "index_dtype": torch.int64, "weights_dtype": dtype,
    }  # fmt: skip
    grad = torch.randn(rows, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    weights, ids, _ = router._Route.apply(leaf, bias, *keyword.values(), False)
    (dx,) = torch.autograd.grad(weights, leaf, grad)
    dense, chosen, _ = router._Route.apply(leaf, bias, *keyword.values(), True)
    full = torch.randn(rows, experts, generator=torch.Generator().manual_seed(2)).to(dtype)
    (dx_dense,) = torch.autograd.grad(dense, leaf, full)

    got = {
        "weights": torch.empty(rows, k, dtype=dtype), "ids": torch.empty(rows, k, dtype=torch.int64),
        "dense": torch.empty(rows, experts, dtype=dtype), "routing_map": torch.empty(rows, experts, dtype=torch.bool),
    }  # fmt: skip
    router_kernel.run_forward(x, bias, mask, None, rule, **got, shape=shape)
    assert same(got["ids"], ids) and same(got["weights"], weights)
    assert same(got["routing_map"], chosen) and same(got["dense"], dense)
    assert same(router_kernel.run_backward(x, mask, ids, grad, rule, dense=False, shape=shape), dx)
    assert same(router_kernel.run_backward(x, mask, ids, full, rule, dense=True, shape=shape), dx_dense)

    replayed = {name: torch.full_like(value, 1) for name, value in got.items() if name != "ids"}
    router_kernel.run_forward(x, bias, mask, ids, rule, ids=None, **replayed, shape=shape)
    assert all(same(value, got[name]) for name, value in replayed.items())


@interpreted
@pytest.mark.parametrize("function", scores.SCORE_FUNCTIONS)
def test_all_scores_and_z_loss_have_the_bits_of_the_definition(function: scores.ScoreFunction) -> None:
    x = logits(12, 33, dtype=torch.bfloat16)
    grad = torch.randn(12, 33, generator=torch.Generator().manual_seed(0))
    plain = x.float()
    assert same(all_scores_kernel.run_all_scores(x, function), scores.all_scores(plain, function))
    for given in (grad, grad[:1].expand(12, 33)):  # the auxiliary loss gives one row, expanded
        want = scores.all_scores_gradient(plain, given, function).to(x.dtype)
        assert same(all_scores_kernel.run_all_scores(x, function, given), want)
    if function == "softmax":
        high, denominator = scores.softmax_parts(plain)
        lse = pinned.log_from_one(denominator) + high
        assert same(z_loss_kernel.forward(x), lse)
        want = (pinned.exp_neg(plain - high) / denominator * grad[:, :1]).to(x.dtype)
        assert same(z_loss_kernel.backward(x, grad[:, :1]), want)
        assert losses.z_loss(x[9:], 1e-3).dtype == torch.float32


@functools.cache
def built() -> list[dict[str, Any]]:
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(tests / "router_compile.py")], env=environment, capture_output=True, text=True,
        timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@interpreted
def test_the_front_door_gives_kernels_what_they_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strided or expanded bias, ids beyond int32, a negative scale: a kernel sees addresses and 32 bits."""
    x = logits(20, 24)[9:]
    bias = (torch.randn(24, 2, generator=torch.Generator().manual_seed(0)) * 3)[:, 1]
    ids = router.route(x, 3).ids
    ids[::2, 1] += 1 << 32
    calls: list[dict[str, Any]] = [
        {"expert_bias": bias},
        {"expert_bias": torch.full((1,), 0.5, dtype=torch.bfloat16).expand(24)},
        {"ids": ids},
        {"ids": ids.to(torch.int32), "scaling_factor": -1.0},
    ]
    for more in calls:
        want = router.route(x, 3, score_function="sigmoid", **more)
        with monkeypatch.context() as patched:
            patched.setattr(router, "_kernel", lambda x: True)
            got = router.route(x, 3, score_function="sigmoid", **more)
        assert same(got.ids, want.ids) and same(got.weights, want.weights), more
    arguments = (x, 3, True, 4, 2, -1.0, "sigmoid", bias)
    want = router.fused_topk_with_score_function(*arguments)
    monkeypatch.setattr(router, "_kernel", lambda x: True)
    got = router.fused_topk_with_score_function(*arguments)
    assert same(got[0], want[0]) and same(got[1], want[1])


def test_every_kernel_compiles_for_hopper_and_blackwell_without_spills_or_float_atomics() -> None:
    records = built()
    assert {r["arch"] for r in records} == {90, 100} and len([r for r in records if r["kind"] == "usual"]) >= 34
    for record in records:
        assert record["stack"] == 0 and record["local"] == 0, record
        assert record["float atomics"] == 0 and record["approximate"] == 0, record


def test_every_kernel_compiles_with_each_integer_one_and_no_launcher_makes_it_a_constant() -> None:
    """Triton makes an argument that is 1 a constant without methods, unless the kernel names the argument's type."""
    ones = [r for r in built() if r["kind"] == "ones"]
    assert {r["kernel"] for r in ones} == {r["kernel"] for r in built()}
    for record in ones:
        strides = ["a_col", "a_row", "b_col", "b_row"] if record["kernel"] == "serial_product" else []
        assert record["launcher's ones"] == strides, record


def test_no_pinned_kernel_contracts_a_product_with_a_sum() -> None:
    for record in built():
        if record["kernel"] != "serial_product":  # matrix products are fused by nature
            assert record["fma"] == 0, record
