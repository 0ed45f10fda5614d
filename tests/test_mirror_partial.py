"""partial_sum against rational arithmetic, and the traps of its special cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import oracle
from bicomm.contract import Partial
from bicomm.partial import fused_multiply_add, partial_sum
from families import FAMILIES

TREES = [Partial("slot", a, "activation") for a in ("exact", "fp64", "fp32", "bf16")]
TREES += [
    Partial("slot", a, "combine", p, w)
    for a, p, w in itertools.product(("exact", "fp64", "fp32", "bf16"), ("fp32", "bf16"), ("fp32", "bf16"))
]
TREES += [Partial("slot", "fp32", "combine", "fma", w) for w in ("fp32", "bf16")]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize("tree", TREES, ids=lambda t: t.id)
def test_partial_sum_equals_rational_arithmetic(tree: Partial) -> None:
    n, t, h = 5, 2, 6
    for seed, (name, family) in enumerate(FAMILIES.items()):
        rng = np.random.default_rng(seed)
        x = torch.from_numpy(family(rng, n, t * h)).view(n, t, h)
        if seed % 2:
            x = x.bfloat16()
        present = torch.from_numpy(rng.random((n, t)) < 0.8)
        weights = torch.from_numpy(rng.random((n, t)).astype(np.float32)) if tree.probability == "combine" else None
        got = bits(partial_sum(x, tree, present=present, weights=weights))
        for i, j in itertools.product(range(t), range(h)):
            want = oracle.partial(
                x[:, i, j].tolist(), accumulator=tree.accumulator, probability=tree.probability, product=tree.product,
                weight=tree.weight, weights=None if weights is None else weights[:, i].tolist(),
                experts=[k if present[k, i] else -1 for k in range(n)],
            )  # fmt: skip
            want_bits = oracle.bits_of(want if want else 0.0)
            assert got[i, j].item() & 0xFFFFFFFF == want_bits, (name, i, j, x[:, i, j].tolist())


def test_fused_multiply_add_rounds_once() -> None:
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: half an ulp that a separate product drops, and dust that decides a tie.
    a = torch.tensor([1 + 2.0**-12, 2.0**-30, 3e38, float("inf"), 2.0**-100])
    b = torch.tensor([1 + 2.0**-12, -(2.0**-30), 10.0, 1.0, 2.0**-100])
    c = torch.tensor([2.0**-60, 1 + 2.0**-23, -3e38, 1.0, 2.0**-149])
    want = [oracle.bits_of(oracle.fused_multiply_add(*v)) for v in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert [v & 0xFFFFFFFF for v in bits(fused_multiply_add(a, b, c)).tolist()] == want
    assert not torch.equal(fused_multiply_add(a, b, c)[:1], (a * b + c)[:1])  # the twin: rounding twice differs


def test_absent_addends_never_reach_a_result() -> None:
    x = torch.full((3, 2, 4), float("nan"))
    x[1] = 1.5
    present = torch.tensor([[False, False], [True, False], [False, False]])
    weights = torch.where(present, 2.0, float("nan"))
    for tree in TREES:
        got = partial_sum(x, tree, present=present, weights=weights if tree.probability == "combine" else None)
        assert got[0].tolist() == [3.0 if tree.probability == "combine" else 1.5] * 4 and bits(got[1]).eq(0).all(), tree


def test_a_weight_of_zero_is_not_skipped() -> None:
    x = torch.tensor([[[float("inf")]], [[1.0]]])
    tree = Partial("slot", "fp32", "combine")
    assert partial_sum(x, tree, weights=torch.tensor([[0.0], [1.0]])).isnan().all()


def test_nothing_to_add_is_plus_zero() -> None:
    for tree in TREES:
        weights = torch.zeros(0, 3) if tree.probability == "combine" else None
        assert bits(partial_sum(torch.zeros(0, 3, 4), tree, weights=weights)).eq(0).all()
    assert partial_sum(torch.zeros(2, 0, 4), TREES[0]).shape == (0, 4)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match="takes no weights"):
        partial_sum(x, Partial(), weights=torch.ones(2, 3))
    with pytest.raises(ValueError, match="needs weights"):
        partial_sum(x, Partial("slot", "fp32", "combine"))
    with pytest.raises(ValueError, match=r"\[N, T\] = \(2, 3\)"):
        partial_sum(x, Partial(), present=torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\[N, T, H\]"):
        partial_sum(x[0], Partial())
    with pytest.raises(TypeError, match="float64"):
        partial_sum(x.double(), Partial())


@pytest.mark.parametrize("tree", TREES, ids=lambda t: t.id)
def test_roundings_count_as_the_identity_in_the_backward_pass(tree: Partial) -> None:
    x, grad = torch.randn(3, 2, 4).requires_grad_(), torch.randn(2, 4)
    weights = torch.rand(3, 2).requires_grad_() if tree.probability == "combine" else None
    partial_sum(x, tree, weights=weights).backward(grad)
    rounded = None if weights is None else weights.detach()
    if rounded is not None and tree.weight == "bf16":
        rounded = rounded.bfloat16().float()
    want = grad.expand(3, 2, 4) if rounded is None else rounded.unsqueeze(-1) * grad
    assert x.grad is not None and torch.equal(x.grad, want)
    if weights is not None:
        torch.testing.assert_close(weights.grad, (x.detach() * grad).sum(-1))


def test_a_compiler_keeps_the_roundings_to_bf16() -> None:
    x, weights = torch.randn(5, 3, 40), torch.rand(5, 3)
    for tree in (Partial("slot", "bf16"), Partial("slot", "bf16", "combine", "bf16", "bf16")):
        given = weights if tree.probability == "combine" else None
        compiled = torch.compile(lambda x, w, tree=tree: partial_sum(x, tree, weights=w))
        assert torch.equal(bits(compiled(x, given)), bits(partial_sum(x, tree, weights=given))), tree
