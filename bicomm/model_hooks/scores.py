"""Scores, weights and their gradients, as plain torch: the definition of the router's arithmetic, and its CPU path.

Everything is fp32 in the pinned steps of `pinned.py`, whatever the dtype of the logits; results are rounded once, at
the end, by the caller. A token is one row; no row looks at another, so the batch cannot change a bit.

Formulas (E experts, k slots; TransformerEngine's and Megatron-LM's routers use the same):
softmax       s_e = exp(x_e - max) / sum_e exp(x_e - max)
sigmoid       s_e = 1 / (1 + exp(-x_e))
sqrtsoftplus  s_e = sqrt(log(1 + exp(x_e)))
after top-k   softmax over the k chosen logits
renormalised  w_i = s_i / (sum_i s_i + 1e-20), unless k = 1
scaled        w_i = w_i * scaling_factor
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from bicomm.model_hooks import pinned

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SCORE_FUNCTIONS: tuple[ScoreFunction, ...] = ("softmax", "sigmoid", "sqrtsoftplus")
EPSILON = 1e-20  # keeps a token whose scores are all 0 from dividing by 0


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a row of logits becomes k expert ids and k weights. See :func:`bicomm.model_hooks.router.route`."""

    topk: int
    score_function: ScoreFunction = "softmax"
    pre_softmax: bool = True
    renormalize: bool = False
    scaling_factor: float | None = None
    num_groups: int = 1
    group_topk: int = 1
    group_score_topk: int = 1

    @property
    def softmax_after(self) -> bool:
        """Selection is by logits, and the softmax runs over the chosen ones."""
        return self.score_function == "softmax" and not self.pre_softmax


def softmax_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Row maximum and denominator [..., 1] of fp32 x [..., E]. A NaN, +inf, or only -inf in a row makes it all NaN."""
    high = torch.where(torch.isnan(x), -torch.inf, x).amax(-1, keepdim=True)
    return high, pinned.fixed_sum(pinned.exp_neg(x - high)).unsqueeze(-1)


def pointwise(x: Tensor, parts: tuple[Tensor, Tensor] | None, rule: Rule) -> Tensor:
    """The score of each fp32 logit in x, given its row's softmax parts; the logit itself for a softmax after top-k."""
    if rule.softmax_after:
        return x
    if rule.score_function == "softmax":
        assert parts is not None
        high, denominator = parts
        return pinned.exp_neg(x - high) / denominator
    return pinned.sigmoid(x) if rule.score_function == "sigmoid" else pinned.sqrt_rn(pinned.softplus(x))


def row_parts(x: Tensor, rule: Rule) -> tuple[Tensor, Tensor] | None:
    """What `pointwise` needs to know of the whole row."""
    return softmax_parts(x) if rule.score_function == "softmax" and rule.pre_softmax else None


def _chosen(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The logits [T, k] at ids (0 in slots that are not routed), and which slots are routed."""
    routed = (ids >= 0) & (ids < x.shape[-1])
    picked = x.gather(-1, torch.where(routed, ids, 0).to(torch.int64))
    return torch.where(routed, picked, 0.0), routed


@dataclasses.dataclass(frozen=True)
class _Weights:
    weights: Tensor  # before the scaling factor, 0 where a slot is not routed
    scores: Tensor
    denominator: Tensor | None  # of the renormalisation, [T, 1]
    routed: Tensor
    logits: Tensor


def _weigh(x: Tensor, ids: Tensor, parts: tuple[Tensor, Tensor] | None, rule: Rule) -> _Weights:
    logits, routed = _chosen(x, ids)
    if rule.softmax_after:
        high = torch.where(routed & ~torch.isnan(logits), logits, -torch.inf).amax(-1, keepdim=True)
        scores = torch.where(routed, pinned.exp_neg(logits - high), 0.0)
        denominator = pinned.fixed_sum(scores).unsqueeze(-1)
        weights = scores / denominator
        return _Weights(torch.where(routed, weights, 0.0), scores, denominator, routed, logits)
    scores = torch.where(routed, pointwise(logits, parts, rule), 0.0)
    if not rule.renormalize or rule.topk == 1:
        return _Weights(scores, scores, None, routed, logits)
    denominator = pinned.fixed_sum(scores).unsqueeze(-1) + EPSILON
    return _Weights(torch.where(routed, scores / denominator, 0.0), scores, denominator, routed, logits)


def weights_of(x: Tensor, ids: Tensor, rule: Rule) -> Tensor:
    """The weights [T, k] (fp32) of given expert ids [T, k], from fp32 logits x [T, E]; 0 for ids outside 0..E-1."""
    w = _weigh(x, ids, row_parts(x, rule), rule).weights
    return w if rule.scaling_factor is None else w * rule.scaling_factor


def logits_gradient(x: Tensor, ids: Tensor, grad: Tensor, rule: Rule) -> Tensor:
    """d logits [T, E] (fp32) for d weights `grad` [T, k] (fp32), at fp32 logits x [T, E] and ids [T, k]."""
    parts = row_parts(x, rule)
    w = _weigh(x, ids, parts, rule)
    g = torch.where(w.routed, grad if rule.scaling_factor is None else grad * rule.scaling_factor, 0.0)
    if rule.softmax_after:
        dot = pinned.fixed_sum(g * w.weights).unsqueeze(-1)
        slot = torch.where(w.routed, w.weights * (g - dot), 0.0)
        return _scatter(x, ids, w.routed, slot)
    if w.denominator is not None:
        dot = pinned.fixed_sum(g * w.weights).unsqueeze(-1)
        g = torch.where(w.routed, (g - dot) / w.denominator, 0.0)
    if rule.score_function == "softmax":
        dot = pinned.fixed_sum(g * w.scores).unsqueeze(-1)
        return pointwise(x, parts, rule) * (_scatter(x, ids, w.routed, g) - dot)
    return _scatter(x, ids, w.routed, torch.where(w.routed, g * slope(w.logits, w.scores, rule.score_function), 0.0))


def slope(x: Tensor, s: Tensor, score_function: ScoreFunction) -> Tensor:
    """d score / d logit of sigmoid and sqrtsoftplus at logit x with score s. 0 where a sqrtsoftplus score is 0."""
    if score_function == "sigmoid":
        return s * (1.0 - s)
    return torch.where(s == 0, 0.0, pinned.sigmoid(x) / (s * 2.0))


def _scatter(x: Tensor, ids: Tensor, routed: Tensor, slot: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], x.shape[1] + 1)
    return out.scatter_(1, torch.where(routed, ids, x.shape[1]).to(torch.int64), slot)[:, :-1]


# ------------------------------------------------------------------------------------- scores for the auxiliary loss


def all_scores(x: Tensor, score_function: ScoreFunction) -> Tensor:
    """Scores of all experts that add up to 1 in each row: fp32 [T, E] from fp32 logits x [T, E]."""
    rule = Rule(1, score_function)
    s = pointwise(x, row_parts(x, rule), rule)
    return s if score_function == "softmax" else s / (pinned.fixed_sum(s).unsqueeze(-1) + EPSILON)


def all_scores_gradient(x: Tensor, grad: Tensor, score_function: ScoreFunction) -> Tensor:
    """d logits [T, E] (fp32) for d scores `grad` [T, E] (fp32) of :func:`all_scores` at fp32 x."""
    rule = Rule(1, score_function)
    s = pointwise(x, row_parts(x, rule), rule)
    if score_function == "softmax":
        return s * (grad - pinned.fixed_sum(grad * s).unsqueeze(-1))
    denominator = pinned.fixed_sum(s).unsqueeze(-1) + EPSILON
    dot = pinned.fixed_sum(grad * (s / denominator)).unsqueeze(-1)
    return ((grad - dot) / denominator) * slope(x, s, score_function)
