"""The router: logits in, expert ids and weights out, the same bits for a token whatever else is in the batch.

`route` is the front door. `scores.py` and `topk.py` define the arithmetic and the order; on a GPU one kernel
(`router_kernel.py`) gives the same bits. `fused_topk_with_score_function` and `fused_compute_score_for_moe_aux_loss`
have the signatures, shapes and dtypes of TransformerEngine's functions of those names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bicomm.as_written import as_written
from bicomm.model_hooks import replay, scores, topk
from bicomm.model_hooks.scores import SCORE_FUNCTIONS, Rule, ScoreFunction

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDEX_DTYPES = (torch.int16, torch.int32, torch.int64)
MAX_FUSED_EXPERTS = 1024


class Routing(NamedTuple):
    """weights [..., k] in slot order, ids [..., k] (-1 where a token is padding)."""

    weights: Tensor
    ids: Tensor


def _rule(
    experts: int, k: int, score_function: str, pre_softmax: bool, renormalize: bool | None,
    scaling_factor: float | None, num_groups: int | None, group_topk: int | None, group_score_topk: int | None,
) -> Rule:  # fmt: skip
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"score_function is one of {', '.join(SCORE_FUNCTIONS)}; got {score_function!r}")
    groups = num_groups or 1
    chosen = (group_topk or groups) if groups > 1 else 1
    if groups < 1 or experts % groups or not 1 <= chosen <= groups:
        raise ValueError(f"num_groups must divide {experts} experts and be >= group_topk >= 1: got {groups}, {chosen}")
    size = experts // groups
    if not 1 <= k <= chosen * size:
        raise ValueError(f"topk must be between 1 and the {chosen * size} experts that can be chosen, got {k}")
    best = group_score_topk if group_score_topk is not None else max(1, k // chosen)
    if groups > 1 and not 1 <= best <= size:
        raise ValueError(f"group_score_topk must be between 1 and the group size {size}, got {best}")
    if score_function == "softmax" and not pre_softmax and renormalize:
        raise ValueError("a softmax after top-k already adds up to 1: renormalize=True means nothing there")
    norm = score_function != "softmax" if renormalize is None else renormalize
    return Rule(k, score_function, pre_softmax, norm, scaling_factor, groups, chosen, best)


def _check(logits: Tensor, rule: Rule, bias: Tensor | None, padding: Tensor | None, index_dtype: torch.dtype) -> None:
    if logits.dtype not in LOGIT_DTYPES or logits.dim() < 1:
        raise TypeError(
            f"logits are [..., experts] in fp32, bf16, fp16 or fp64; got {logits.dtype} {tuple(logits.shape)}"
        )
    experts = logits.shape[-1]
    if index_dtype not in INDEX_DTYPES or experts > torch.iinfo(index_dtype).max:
        raise TypeError(f"ids are int16, int32 or int64 wide enough for {experts} experts; got {index_dtype}")
    if bias is not None:
        if bias.shape != (experts,) or bias.device != logits.device or not bias.is_floating_point():
            raise ValueError(
                f"expert_bias is a floating-point [{experts}] on {logits.device}; "
                f"got {bias.dtype} {tuple(bias.shape)} on {bias.device}"
            )
        if rule.softmax_after:
            raise ValueError("expert_bias needs scores before the selection: not with a softmax after top-k")
    if padding is not None and (
        padding.dtype != torch.bool or padding.shape != logits.shape[:-1] or padding.device != logits.device
    ):
        raise ValueError(
            f"padding_mask is bool {tuple(logits.shape[:-1])} on {logits.device}, True where a token is padding; "
            f"got {padding.dtype} {tuple(padding.shape)} on {padding.device}"
        )


def _kernel(x: Tensor) -> bool:
    return x.is_cuda and x.shape[-1] <= MAX_FUSED_EXPERTS


def _plain(x: Tensor, padding: Tensor | None) -> Tensor:
    x = x.to(torch.float32)
    return x if padding is None else torch.where(padding.unsqueeze(-1), 0.0, x)


def _select(x: Tensor, bias: Tensor | None, padding: Tensor | None, rule: Rule, index_dtype: torch.dtype) -> Tensor:
    """Live ids [T, k]."""
    if _kernel(x):
        from bicomm.model_hooks import router_kernel

        ids = torch.empty(x.shape[0], rule.topk, dtype=index_dtype, device=x.device)
        spare = torch.empty(x.shape[0], rule.topk, dtype=torch.float32, device=x.device)
        router_kernel.run_forward(
            x, bias, padding, None, rule, weights=spare, ids=ids, dense=None, routing_map=None
        )  # fmt: skip
        return ids
    plain = _plain(x, padding)
    value = scores.pointwise(plain, scores.row_parts(plain, rule), rule)
    ids = topk.select(value if bias is None else value + bias.to(torch.float32), rule)
    return (ids if padding is None else ids.masked_fill(padding.unsqueeze(-1), -1)).to(index_dtype)


class _Route(torch.autograd.Function):
    """(weights, ids) in the index form, (dense weights, map) in the dense form; ids are saved for the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, padding: Tensor | None, fixed: Tensor | None, rule: Rule,
        index_dtype: torch.dtype, weights_dtype: torch.dtype, dense: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        T, E = x.shape
        if _kernel(x):
            from bicomm.model_hooks import router_kernel

            weights = torch.empty(T, rule.topk, dtype=weights_dtype, device=x.device)
            ids = torch.empty(T, rule.topk, dtype=index_dtype, device=x.device) if fixed is None else fixed
            full = torch.empty(T, E, dtype=weights_dtype, device=x.device) if dense else None
            routing_map = torch.empty(T, E, dtype=torch.bool, device=x.device) if dense else None
            router_kernel.run_forward(
                x, bias, padding, fixed, rule, weights=weights, ids=ids, dense=full, routing_map=routing_map
            )
            first, second = (weights, ids) if full is None or routing_map is None else (full, routing_map)
        else:
            ids = _select(x, bias, padding, rule, index_dtype) if fixed is None else fixed
            weights = scores.weights_of(_plain(x, padding), ids, rule)
            if dense:
                routed = (ids >= 0) & (ids < E)
                where = torch.where(routed, ids, E).to(torch.int64)
                nothing = 0.0 if rule.scaling_factor is None else 0.0 * rule.scaling_factor  # -0 for a negative one
                first = weights.new_full((T, E + 1), nothing).scatter_(1, where, weights)[:, :E].to(weights_dtype)
                second = torch.zeros(T, E + 1, dtype=torch.bool, device=x.device).scatter_(1, where, True)[:, :E]
            else:
                first, second = weights.to(weights_dtype), ids
        ctx.rule, ctx.dense = rule, dense
        ctx.save_for_backward(x, padding, ids)
        ctx.mark_non_differentiable(*({second, ids} if dense else {ids}))
        return first.contiguous(), second.contiguous(), ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, padding, ids = ctx.saved_tensors
        if _kernel(x):
            from bicomm.model_hooks import router_kernel

            out = router_kernel.run_backward(x, padding, ids, grad, ctx.rule, dense=ctx.dense)
        else:
            g = grad.to(torch.float32)
            if ctx.dense:
                routed = (ids >= 0) & (ids < x.shape[1])
                g = torch.where(routed, g.gather(1, torch.where(routed, ids, 0).to(torch.int64)), 0.0)
            out = scores.logits_gradient(_plain(x, padding), ids, g, ctx.rule)
            if padding is not None:
                out = out.masked_fill(padding.unsqueeze(-1), 0.0)
            out = out.to(x.dtype)
        return out, None, None, None, None, None, None, None


def _run(
    logits: Tensor, rule: Rule, bias: Tensor | None, padding: Tensor | None, ids: Tensor | None,
    index_dtype: torch.dtype, weights_dtype: torch.dtype | None, dense: bool, name: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check(logits, rule, bias, padding, index_dtype)
    x = logits.reshape(-1, logits.shape[-1])
    mask = None if padding is None else padding.reshape(-1).contiguous()
    bias = None if bias is None else bias.detach().contiguous()
    shape = (x.shape[0], rule.topk)
    source = None
    if ids is None:
        ids, source = replay.fixed_ids(shape, name)
    if ids is not None:
        wrong = ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
        if wrong or ids.shape[-1:] != shape[1:] or ids.numel() != shape[0] * shape[1]:
            raise ValueError(f"ids to route by are integers [tokens, k] = {shape}; got {ids.dtype} {tuple(ids.shape)}")
        # to -1..E before anything makes it narrower: 65,536 is no expert, and 0 in int16. Also makes a tensor that a
        # backward may keep of one that was recorded in inference mode.
        ids = ids.reshape(shape).to(device=x.device, dtype=torch.int64).clamp(-1, x.shape[1]).to(index_dtype)
        if mask is not None:
            ids = ids.masked_fill(mask.unsqueeze(-1), -1)
        if source is not None and source.check:
            live = _select(x.detach(), bias, mask, rule, index_dtype)
            source.differences.append(
                replay.compare_ids(live, ids, padding_mask=mask, call=source.position - 1, name=name)
            )
    first, second, used = _Route.apply(  # type: ignore[no-untyped-call]
        x, bias, mask, ids, rule, index_dtype,
        logits.dtype if weights_dtype is None else weights_dtype, dense,
    )  # fmt: skip
    replay.note(used, name)
    lead = logits.shape[:-1]
    return first.view(*lead, first.shape[-1]), second.view(*lead, second.shape[-1]), used


def _is_bitmap(routing_map_format: str | int) -> bool:
    formats = ("bytemap", "bitmap_u8")
    if isinstance(routing_map_format, str):
        known = routing_map_format in formats
        index = formats.index(routing_map_format) if known else -1
    else:
        index = int(routing_map_format)  # TransformerEngine's enumeration has these numbers
        known = index in (0, 1)
    if not known:
        raise ValueError(f"routing_map_format is {formats[0]!r} (0) or {formats[1]!r} (1), got {routing_map_format!r}")
    return index == 1


def _pack(routing_map: Tensor) -> Tensor:
    """bool [..., E] as uint8 [..., ceil(E / 8)], the lowest expert in the lowest bit."""
    length = -(-routing_map.shape[-1] // 8)
    whole = torch.nn.functional.pad(routing_map, (0, 8 * length - routing_map.shape[-1]))
    place = torch.arange(8, dtype=torch.uint8, device=routing_map.device)
    return (whole.view(*routing_map.shape[:-1], length, 8).to(torch.uint8) << place).sum(-1, dtype=torch.uint8)


@as_written
def route(
    logits: Tensor,
    k: int,
    *,
    score_function: ScoreFunction = "softmax",
    pre_softmax: bool = True,
    renormalize: bool | None = None,
    scaling_factor: float | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_score_topk: int | None = None,
    expert_bias: Tensor | None = None,
    padding_mask: Tensor | None = None,
    ids: Tensor | None = None,
    index_dtype: torch.dtype = torch.int64,
    weights_dtype: torch.dtype | None = None,
    name: str = "",
) -> Routing:
    """Choose k experts a token and their weights. Differentiable in the logits.

    logits           [..., E], fp32, bf16, fp16 or fp64; the arithmetic is fp32 (see `scores.py` for the formulas).
    score_function   softmax, sigmoid or sqrtsoftplus. pre_softmax=False: softmax over the k chosen logits instead.
    renormalize      divide the k weights by their sum + 1e-20; not done for k = 1. Default: all but softmax.
    scaling_factor   multiplies the weights, last.
    num_groups, group_topk, group_score_topk   only experts of the group_topk best of num_groups equal groups can be
                     chosen; a group's score is the sum of its group_score_topk best values (default k // group_topk).
    expert_bias      [E]: added to the scores for the selection only; the weights are of the raw scores.
    padding_mask     bool [...], True where a token is padding: ids -1, weights 0, gradient 0, whatever its logits are.
    ids              [..., k]: route by these instead of choosing; below 0 or from E on is "not routed" (weight 0, and
                     returned as -1 or E). The routed ids of one token must differ. Inside `replay.replay` they come
                     from the tape.
    index_dtype      int16, int32 or int64. weights_dtype: default that of the logits. name: for `replay`.

    Returns weights [..., k] and ids [..., k], in the order value descending, then id ascending; -0 equals +0, NaN comes
    after -inf. A row whose softmax is undefined (NaN, +inf, or nothing but -inf) has NaN weights and still k distinct
    ids. Raises TypeError or ValueError for what does not fit, naming both sides.
    """
    rule = _rule(
        logits.shape[-1], k, score_function, pre_softmax, renormalize, scaling_factor, num_groups, group_topk,
        group_score_topk,
    )  # fmt: skip
    weights, chosen, _ = _run(logits, rule, expert_bias, padding_mask, ids, index_dtype, weights_dtype, False, name)
    return Routing(weights, chosen)


@as_written
def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: str | int = "bytemap",
    topk_indices: Tensor | None = None,
    *,
    padding_mask: Tensor | None = None,
    name: str = "",
) -> tuple[Tensor, Tensor]:
    """TransformerEngine's signature: dense weights [..., E] in the dtype of the logits, and bool map [..., E].

    With topk_indices, an int16/32/64 buffer [..., topk], the ids are written there and returned in place of the map.
    routing_map_format: "bytemap" (or 0), or "bitmap_u8" (or 1) for a map uint8 [..., ceil(E / 8)], where bit e % 8 of
    byte e // 8 says expert e. The other arguments mean what they mean in :func:`route`, and so do the errors. What
    TransformerEngine has behind these, for quantile balancing, is not here.
    """
    packed = _is_bitmap(routing_map_format)
    if topk_indices is not None:
        if topk_indices.shape != (*logits.shape[:-1], topk) or topk_indices.device != logits.device:
            raise ValueError(
                f"topk_indices is {(*logits.shape[:-1], topk)} on {logits.device}, "
                f"got {tuple(topk_indices.shape)} on {topk_indices.device}"
            )
        if packed:
            raise ValueError("topk_indices takes the place of the map: it goes with routing_map_format='bytemap' only")
    rule = _rule(
        logits.shape[-1], topk, score_function, use_pre_softmax, None, scaling_factor, num_groups, group_topk, None
    )
    index_dtype = torch.int64 if topk_indices is None else topk_indices.dtype
    probs, routing_map, ids = _run(logits, rule, expert_bias, padding_mask, None, index_dtype, None, True, name)
    if topk_indices is None:
        return probs, _pack(routing_map) if packed else routing_map
    topk_indices.copy_(ids.view(topk_indices.shape))
    return probs, topk_indices


class _AllScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, score_function: ScoreFunction) -> Tensor:
        ctx.score_function = score_function
        ctx.save_for_backward(x)
        if _kernel(x):
            from bicomm.model_hooks import all_scores_kernel

            return all_scores_kernel.run_all_scores(x, score_function)
        return scores.all_scores(x.to(torch.float32), score_function)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if _kernel(x):
            from bicomm.model_hooks import all_scores_kernel

            return all_scores_kernel.run_all_scores(x, ctx.score_function, grad), None
        g = scores.all_scores_gradient(x.to(torch.float32), grad.to(torch.float32), ctx.score_function)
        return g.to(x.dtype), None


@as_written
def scores_for_aux_loss(
    logits: Tensor, score_function: ScoreFunction = "softmax", *, padding_mask: Tensor | None = None
) -> Tensor:
    """Scores of all experts, fp32 [..., E], each row adding up to 1; rows of padding are 0. Differentiable.

    logits [..., E] in fp32, bf16, fp16 or fp64; padding_mask bool [...], True where a token is padding.
    """
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"score_function is one of {', '.join(SCORE_FUNCTIONS)}; got {score_function!r}")
    _check(logits, Rule(1), None, padding_mask, torch.int64)
    x = logits.reshape(-1, logits.shape[-1])
    if padding_mask is not None:
        x = torch.where(padding_mask.reshape(-1, 1), 0.0, x)  # before the softmax: 0 * NaN would reach the gradient
    out: Tensor = _AllScores.apply(x, score_function)  # type: ignore[no-untyped-call]
    if padding_mask is not None:
        out = torch.where(padding_mask.reshape(-1, 1), 0.0, out)
    return out.view(logits.shape)


@as_written
def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str, routing_map_format: str | int = "bytemap", *,
    padding_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """TransformerEngine's signature: (map of the topk best scores, fp32 scores [..., E]).

    The map is as in :func:`fused_topk_with_score_function`. Neither bias nor groups enter: these are the scores and
    choices that the auxiliary loss balances.
    """
    packed = _is_bitmap(routing_map_format)
    values = scores_for_aux_loss(logits, score_function, padding_mask=padding_mask)  # type: ignore[arg-type]
    rule = _rule(logits.shape[-1], topk, score_function, True, None, None, None, None, None)
    _, routing_map, _ = _Route.apply(  # type: ignore[no-untyped-call]
        logits.detach().reshape(-1, logits.shape[-1]), None,
        None if padding_mask is None else padding_mask.reshape(-1).contiguous(), None, rule, torch.int64,
        torch.float32, True,
    )  # fmt: skip
    routing_map = routing_map.view(logits.shape)
    return _pack(routing_map) if packed else routing_map, values
