"""Which experts: the order of candidates against plain Python, and what libraries leave open."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bicomm.model_hooks import router, topk
from bicomm.model_hooks.scores import Rule
from router_cases import logits


def in_order(values: list[float]) -> list[int]:
    """Value descending, id ascending, NaN after -inf; -0 equals +0."""
    return sorted(
        range(len(values)), key=lambda i: (math.isnan(values[i]), -values[i] if values[i] == values[i] else 0, i)
    )


VALUES = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True), st.sampled_from([0.0, -0.0, 1.0, math.nan, -math.inf])
)


@settings(max_examples=300, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=40), st.data())
def test_top_is_pythons_sort(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    assert topk.top(torch.tensor([values]), k)[0].tolist() == in_order(torch.tensor(values).tolist())[:k]


def test_256_equal_scores_and_the_hard_rows() -> None:
    x = logits(12, 256)
    for function in ("softmax", "sigmoid", "sqrtsoftplus"):
        ids = router.route(x, 8, score_function=function).ids  # type: ignore[arg-type]
        assert all(len(set(row)) == 8 for row in ids.tolist())
        assert ids[0].tolist() == list(range(8))  # all equal
        assert ids[1].tolist() == list(range(8))  # nothing but -inf
        assert ids[3].tolist() == list(range(8))  # nothing but NaN
        assert ids[5].tolist() == list(range(8))  # -0 equals +0
    saturated = router.route(x[4:5], 8, score_function="sigmoid", renormalize=False)
    assert saturated.ids[0].tolist() == list(range(8)) and saturated.weights.unique().tolist() == [1.0]
    assert 128 not in router.route(x[2:3], 8, score_function="sigmoid").ids[0]  # the one NaN


def test_torch_topk_leaves_ties_open() -> None:
    """The twin: 256 equal values."""
    assert torch.topk(torch.ones(256), 8).indices.tolist() != list(range(8))


def test_a_row_of_nan_or_minus_inf_has_nan_weights_and_others_are_untouched() -> None:
    x = logits(32, 64)
    clean = router.route(x[9:], 4)
    got = router.route(x, 4)
    assert torch.isnan(got.weights[[1, 2, 3, 6]]).all()
    assert torch.equal(got.weights[9:], clean.weights) and torch.equal(got.ids[9:], clean.ids)
    after = router.route(x, 4, pre_softmax=False)
    assert torch.isfinite(after.weights[2]).all()  # the NaN logit is not among the chosen


@pytest.mark.parametrize(
    ("experts", "groups", "kept", "best", "k"), [(64, 8, 4, 2, 8), (160, 8, 3, 1, 6), (12, 3, 2, 2, 4)]
)
def test_groups_against_plain_python(experts: int, groups: int, kept: int, best: int, k: int) -> None:
    values = torch.round(torch.randn(200, experts, generator=torch.Generator().manual_seed(0)) * 2) / 2  # many ties
    rule = Rule(k, num_groups=groups, group_topk=kept, group_score_topk=best)
    size = experts // groups
    for row, got in zip(values.tolist(), topk.select(values, rule).tolist(), strict=True):
        members = [row[g * size : (g + 1) * size] for g in range(groups)]
        totals = [sum(sorted(m, reverse=True)[:best]) for m in members]
        allowed = set(in_order(totals)[:kept])
        assert got == [e for e in in_order(row) if e // size in allowed][:k]


def test_an_expert_bias_only_selects() -> None:
    x = torch.full((1, 8), -9.21)  # a sigmoid score of 1e-4
    bias = torch.zeros(8)
    bias[5] = 1000.0
    got = router.route(x, 2, score_function="sigmoid", renormalize=False, expert_bias=bias)
    assert got.ids[0].tolist() == [5, 0]
    score = torch.sigmoid(torch.tensor(-9.21, dtype=torch.float64)).item()
    assert abs(got.weights[0, 0].item() / score - 1) < 1e-6
    undone = (torch.tensor(score, dtype=torch.float32) + 1000.0) - 1000.0
    assert abs(undone.item() / score - 1) > 0.01, "the twin: adding and taking off cancels"


def test_errors_name_both_sides() -> None:
    x = torch.randn(4, 16)
    for arguments, message in [
        ({"k": 17}, "topk must be between 1 and the 16"),
        ({"k": 9, "num_groups": 4, "group_topk": 2}, "1 and the 8"),
        ({"k": 2, "num_groups": 3}, "num_groups must divide 16"),
        ({"k": 2, "score_function": "relu"}, "softmax, sigmoid, sqrtsoftplus"),
        ({"k": 2, "expert_bias": torch.zeros(15)}, r"floating-point \[16\]"),
        ({"k": 2, "expert_bias": torch.zeros(16), "pre_softmax": False}, "expert_bias needs scores"),
        ({"k": 2, "pre_softmax": False, "renormalize": True}, "already adds up to 1"),
        ({"k": 2, "padding_mask": torch.zeros(5, dtype=torch.bool)}, "padding_mask is bool"),
        ({"k": 2, "ids": torch.zeros(4, 3, dtype=torch.int64)}, r"\(4, 2\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            router.route(x, **arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int16, int32 or int64"):
        router.route(x, 2, index_dtype=torch.uint8)
    with pytest.raises(TypeError, match="fp32, bf16, fp16 or fp64"):
        router.route(x.to(torch.int32), 2)
