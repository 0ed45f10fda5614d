"""The router as one Triton kernel a direction: scores, selection, weights; up to 1,024 experts.

Bit for bit what `scores.py` and `topk.py` define. One program holds whole rows, and every reduction is a maximum or an
integer sum, so neither the number of tokens nor the launch shape can change a result; they are free to be tuned.
A tile has one lane per expert, laid out [groups, experts of a group], each padded to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.model_hooks import pinned_triton as pin
from bicomm.model_hooks.launching import on_its_device
from bicomm.model_hooks.scores import EPSILON, SCORE_FUNCTIONS, Rule

MAX_EXPERTS = 1024
SOFTMAX = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
SOFTMAX_AFTER = tl.constexpr(3)
EPS = tl.constexpr(EPSILON)
ABSENT = tl.constexpr(-2147483648)  # below every `order_key`: no candidate, or one that is taken
NOBODY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def row_parts(x, valid, FUNCTION: tl.constexpr):
    if FUNCTION == SOFTMAX:
        high = tl.max(tl.where(valid & (x == x), x, float("-inf")), axis=1, keep_dims=True)
        denominator = pin.fixed_sum_unit(tl.where(valid, pin.exp_neg(x - high), 0.0), 1)
    else:
        high = tl.zeros([x.shape[0], 1], tl.float32)
        denominator = high
    return high, denominator


@triton.jit
def pointwise(x, high, denominator, FUNCTION: tl.constexpr):
    if FUNCTION == SOFTMAX:
        s = tl.div_rn(pin.exp_neg(x - high), denominator + tl.zeros_like(x))
    elif FUNCTION == SIGMOID:
        s = pin.sigmoid(x)
    elif FUNCTION == SOFTMAX_AFTER:
        s = x
    else:
        s = tl.sqrt_rn(pin.softplus(x))
    return s


@triton.jit
def slope(x, s, FUNCTION: tl.constexpr):
    if FUNCTION == SIGMOID:
        d = s * (1.0 - s)
    else:
        d = tl.where(s == 0.0, 0.0, tl.div_rn(pin.sigmoid(x), s * 2.0))
    return d


@triton.jit
def _slot_parts(x, s, routed, FUNCTION: tl.constexpr, RENORMALIZE: tl.constexpr):
    """Maximum and denominator over the chosen slots [R, KP]: of the softmax after top-k, or of the renormalisation."""
    if FUNCTION == SOFTMAX_AFTER:
        high = tl.max(tl.where(routed & (x == x), x, float("-inf")), axis=1, keep_dims=True)
        denominator = pin.fixed_sum(tl.where(routed, pin.exp_neg(x - high), 0.0), 1)
    elif RENORMALIZE:
        high = tl.zeros([x.shape[0], 1], tl.float32)
        denominator = pin.fixed_sum(tl.where(routed, s, 0.0), 1) + EPS
    else:
        high = tl.zeros([x.shape[0], 1], tl.float32)
        denominator = high
    return high, denominator


@triton.jit
def _weight(x, s, high, denominator, FUNCTION: tl.constexpr, RENORMALIZE: tl.constexpr):
    if FUNCTION == SOFTMAX_AFTER:
        w = tl.div_rn(pin.exp_neg(x - high), denominator + tl.zeros_like(x))
    elif RENORMALIZE:
        w = tl.div_rn(s, denominator + tl.zeros_like(x))
    else:
        w = s
    return w


@triton.jit
def _first(key, position, axis: tl.constexpr):
    """(largest key, the lowest position that has it): two int32 reductions, each one instruction across a warp."""
    best = tl.max(key, axis=axis, keep_dims=True)
    return best, tl.min(tl.where(key == best, position, NOBODY), axis=axis, keep_dims=True)


@triton.jit
def _drop_groups(key, expert, g, gp, S_PAD: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr,
                 GROUP_TOPK: tl.constexpr, GROUP_SCORE_TOPK: tl.constexpr):  # fmt: skip
    """Make the experts of all but the GROUP_TOPK first groups no candidates. g: each lane's group; gp: [1, G_PAD]."""
    members = tl.reshape(key, (key.shape[0], G_PAD, S_PAD))
    places = tl.reshape(tl.broadcast_to(expert, key.shape), (key.shape[0], G_PAD, S_PAD))
    for i in tl.static_range(GROUP_SCORE_TOPK):
        best, place = _first(members, places, 2)
        members = tl.where(places == place, ABSENT, members)
        value = pin.value_of_key(best)
        if i == 0:
            total = value
        else:
            total = total + value
    total = tl.reshape(total, (key.shape[0], G_PAD))
    group_key = tl.where(gp < G, pin.order_key(total), ABSENT)
    keep = tl.zeros([key.shape[0], key.shape[1]], tl.int32)
    for _ in tl.static_range(GROUP_TOPK):
        _, place = _first(group_key, gp, 1)
        group_key = tl.where(gp == place, ABSENT, group_key)
        keep = tl.where(g == place, 1, keep)
    return tl.where(keep == 1, key, ABSENT)


@triton.jit(do_not_specialize=["T"])
def route_forward(
    logits, bias, padding, fixed_ids, weights, ids, dense, routing_map, T: tl.int64, row_stride: tl.int64, scale,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, S_PAD: tl.constexpr,
    GROUP_TOPK: tl.constexpr, GROUP_SCORE_TOPK: tl.constexpr, FUNCTION: tl.constexpr, RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, PADDING: tl.constexpr, REPLAY: tl.constexpr, INDEX: tl.constexpr,
    DENSE: tl.constexpr, MAP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    S: tl.constexpr = E // G
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None].to(tl.int64)
    position = tl.arange(0, G_PAD * S_PAD)[None, :]
    g = position // S_PAD
    member = position % S_PAD
    e = g * S + member
    valid = (g < G) & (member < S)
    expert = tl.where(valid, e, -1)
    live = row < T
    if PADDING:
        live = live & (tl.load(padding + row, mask=row < T, other=1) == 0)
    x = pin.widen(tl.load(logits + row * row_stride + e, mask=live & valid, other=0.0))
    high, denominator = row_parts(x, valid, FUNCTION)
    s = pointwise(x, high, denominator, FUNCTION)

    slot = tl.arange(0, KP)[None, :]
    # without a bias the key of a chosen expert holds its value: nothing is read or computed a second time
    FROM_KEY: tl.constexpr = not (REPLAY or BIAS)
    chosen = tl.zeros([R, G_PAD * S_PAD], tl.int32)
    if REPLAY:
        id_tile = tl.load(fixed_ids + row * K + slot, mask=live & (slot < K), other=-1).to(tl.int32)
        if DENSE or MAP:
            for j in range(K):
                id_j = tl.load(fixed_ids + row * K + j, mask=live, other=-1).to(tl.int32)
                chosen = tl.where(expert == id_j, 1, chosen)
    else:
        if BIAS:
            key = pin.order_key(s + pin.widen(tl.load(bias + e, mask=valid, other=0.0)))
        elif FUNCTION == SOFTMAX_AFTER:
            key = pin.order_key(s)
        else:
            key = pin.order_key_of_score(s)
        key = tl.where(valid, key, ABSENT)
        if G > 1:
            key = _drop_groups(key, expert, g, tl.arange(0, G_PAD)[None, :], S_PAD, G, G_PAD,
                               GROUP_TOPK, GROUP_SCORE_TOPK)  # fmt: skip
        id_tile = tl.full([R, KP], -1, tl.int32)
        key_tile = tl.full([R, KP], 0, tl.int32)
        for j in range(K):
            top, best = _first(key, expert, 1)
            id_tile = tl.where(slot == j, best, id_tile)
            if FROM_KEY:
                key_tile = tl.where(slot == j, top, key_tile)
            if DENSE or MAP:
                chosen = tl.where(expert == best, 1, chosen)
            key = tl.where(expert == best, ABSENT, key)

    routed = live & (slot < K) & (id_tile >= 0) & (id_tile < E)
    if INDEX or DENSE:
        if FROM_KEY:
            sk = pin.value_of_key(key_tile)
            xk = sk  # read by the softmax after top-k alone, whose scores are the logits
        else:
            xk = pin.widen(tl.load(logits + row * row_stride + id_tile, mask=routed, other=0.0))
            sk = pointwise(xk, high, denominator, FUNCTION)
        high_k, denominator_k = _slot_parts(xk, sk, routed, FUNCTION, RENORMALIZE)
    if INDEX:
        w = tl.where(routed, _weight(xk, sk, high_k, denominator_k, FUNCTION, RENORMALIZE), 0.0)
        if SCALE:
            w = w * scale
        tl.store(weights + row * K + slot, pin.narrow(w, weights.dtype.element_ty), mask=(row < T) & (slot < K))
        if not REPLAY:
            tl.store(ids + row * K + slot, tl.where(live, id_tile, -1), mask=(row < T) & (slot < K))
    hit = (chosen == 1) & live
    if DENSE:
        w = tl.where(hit, _weight(x, s, high_k, denominator_k, FUNCTION, RENORMALIZE), 0.0)
        if SCALE:
            w = w * scale
        tl.store(dense + row * E + e, pin.narrow(w, dense.dtype.element_ty), mask=(row < T) & valid)
    if MAP:
        tl.store(routing_map + row * E + e, hit.to(tl.uint8), mask=(row < T) & valid)


@triton.jit(do_not_specialize=["T"])
def route_backward(
    logits, padding, ids, grad, grad_logits, T: tl.int64, row_stride: tl.int64, scale,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, P: tl.constexpr, FUNCTION: tl.constexpr,
    RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, PADDING: tl.constexpr, DENSE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None].to(tl.int64)
    e = tl.arange(0, P)[None, :]
    valid = e < E
    live = row < T
    if PADDING:
        live = live & (tl.load(padding + row, mask=row < T, other=1) == 0)
    x = pin.widen(tl.load(logits + row * row_stride + e, mask=live & valid, other=0.0))
    high, denominator = row_parts(x, valid, FUNCTION)
    s = pointwise(x, high, denominator, FUNCTION)

    slot = tl.arange(0, KP)[None, :]
    id_tile = tl.load(ids + row * K + slot, mask=live & (slot < K), other=-1).to(tl.int32)
    routed = live & (slot < K) & (id_tile >= 0) & (id_tile < E)
    xk = pin.widen(tl.load(logits + row * row_stride + id_tile, mask=routed, other=0.0))
    sk = tl.where(routed, pointwise(xk, high, denominator, FUNCTION), 0.0)
    high_k, denominator_k = _slot_parts(xk, sk, routed, FUNCTION, RENORMALIZE)
    wk = _weight(xk, sk, high_k, denominator_k, FUNCTION, RENORMALIZE)
    if DENSE:
        gk = pin.widen(tl.load(grad + row * E + id_tile, mask=routed, other=0.0))
    else:
        gk = pin.widen(tl.load(grad + row * K + slot, mask=routed, other=0.0))
    chosen = tl.zeros([R, P], tl.int32)
    g = tl.zeros([R, P], tl.float32)
    for j in range(K):
        id_j = tl.load(ids + row * K + j, mask=live, other=-1).to(tl.int32)
        chosen = tl.where(e == id_j, 1, chosen)
        if not DENSE:
            g = tl.where(e == id_j, pin.widen(tl.load(grad + row * K + j, mask=live, other=0.0)), g)
    hit = (chosen == 1) & valid & live
    if DENSE:
        g = pin.widen(tl.load(grad + row * E + e, mask=hit, other=0.0))
    if SCALE:
        gk = gk * scale
        g = g * scale
    if FUNCTION == SOFTMAX_AFTER:
        w = _weight(x, s, high_k, denominator_k, FUNCTION, RENORMALIZE)
        out = tl.where(hit, w * (g - pin.fixed_sum(tl.where(routed, gk * wk, 0.0), 1)), 0.0)
    else:
        if RENORMALIZE:
            dot = pin.fixed_sum(tl.where(routed, gk * wk, 0.0), 1)
            gk = tl.div_rn(gk - dot, denominator_k + tl.zeros_like(gk))
            g = tl.div_rn(g - dot, denominator_k + tl.zeros_like(g))
        if FUNCTION == SOFTMAX:
            dot = pin.fixed_sum(tl.where(routed, gk * sk, 0.0), 1)
            out = s * (tl.where(hit, g, 0.0) - dot)
        else:
            out = tl.where(hit, g * slope(x, s, FUNCTION), 0.0)
    out = pin.narrow(tl.where(live, out, 0.0), grad_logits.dtype.element_ty)
    tl.store(grad_logits + row * E + e, out, mask=(row < T) & valid)


# --------------------------------------------------------------------------------------------------------- launchers


def pad(n: int) -> int:
    return triton.next_power_of_2(n)  # type: ignore[no-any-return]


def launch_shape(rows: int, lanes: int, a_thread: int = 32) -> tuple[int, int]:
    """(rows of a program, warps). One warp keeps every reduction inside it; it affects time only, never bits.

    a_thread: experts that one thread holds at most. The forward takes 16, so that more warps hide each other's waits.
    """
    if lanes > 512:
        return 1, 4
    return (1 if rows < 2048 else max(1, min(8, 32 * a_thread // lanes))), 1


def _function(rule: Rule) -> int:
    return 3 if rule.softmax_after else SCORE_FUNCTIONS.index(rule.score_function)


def rows_2d(logits: Tensor) -> tuple[Tensor, int]:
    x = logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()
    return x, x.stride(0)


@on_its_device
def run_forward(
    logits: Tensor, bias: Tensor | None, padding_mask: Tensor | None, fixed_ids: Tensor | None, rule: Rule, *,
    weights: Tensor | None, ids: Tensor | None, dense: Tensor | None, routing_map: Tensor | None,
    shape: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Fill the outputs that are given: weights and ids [T, k], dense [T, E], routing_map bool [T, E]."""
    x, stride = rows_2d(logits)
    T, E = x.shape
    if T == 0:
        return
    group = E // rule.num_groups
    g_pad, s_pad = pad(rule.num_groups), pad(group)
    R, warps = shape or launch_shape(T, g_pad * s_pad, 16)
    spare = x  # stands where an argument is not used
    route_forward[(triton.cdiv(T, R),)](
        x,
        spare if bias is None else bias,
        spare if padding_mask is None else padding_mask.view(torch.uint8),
        spare if fixed_ids is None else fixed_ids,
        spare if weights is None else weights,
        spare if ids is None else ids,
        spare if dense is None else dense,
        spare if routing_map is None else routing_map.view(torch.uint8),
        T, stride, 1.0 if rule.scaling_factor is None else float(rule.scaling_factor),
        E=E, K=rule.topk, KP=pad(rule.topk), G=rule.num_groups, G_PAD=g_pad, S_PAD=s_pad, GROUP_TOPK=rule.group_topk,
        GROUP_SCORE_TOPK=rule.group_score_topk, FUNCTION=_function(rule),
        RENORMALIZE=rule.renormalize and rule.topk > 1, SCALE=rule.scaling_factor is not None, BIAS=bias is not None,
        PADDING=padding_mask is not None, REPLAY=fixed_ids is not None, INDEX=weights is not None,
        DENSE=dense is not None, MAP=routing_map is not None, R=R, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


@on_its_device
def run_backward(
    logits: Tensor, padding_mask: Tensor | None, ids: Tensor, grad: Tensor, rule: Rule, *, dense: bool,
    shape: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """d logits [T, E] in the dtype of the logits, for `grad` [T, k], or [T, E] if `dense`."""
    x, stride = rows_2d(logits)
    T, E = x.shape
    out = torch.empty(T, E, dtype=logits.dtype, device=logits.device)
    if T == 0:
        return out
    R, warps = shape or launch_shape(T, pad(E))
    route_backward[(triton.cdiv(T, R),)](
        x, x if padding_mask is None else padding_mask.view(torch.uint8), ids, grad.contiguous(), out, T, stride,
        1.0 if rule.scaling_factor is None else float(rule.scaling_factor),
        E=E, K=rule.topk, KP=pad(rule.topk), P=pad(E), FUNCTION=_function(rule),
        RENORMALIZE=rule.renormalize and rule.topk > 1, SCALE=rule.scaling_factor is not None,
        PADDING=padding_mask is not None, DENSE=dense, R=R, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out
