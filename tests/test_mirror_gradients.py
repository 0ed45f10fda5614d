"""Gradients: bits of autograd through the plain chain, no dependence on the batch, and what runs around the ops."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bicomm import mirror
from bicomm.contract import Contract, Partial
from mirror_cases import OWNERS, RULES, TREES, Case, bits, make_case

SWIGLU = Contract("ordered", partial=Partial("slot", "fp64"))
WEIGHTED = Contract("ordered", partial=Partial("slot", "fp32", "combine"))
BF16_PROBS = Contract("ordered", partial=Partial("slot", "fp32", "combine", "fp32", "bf16"))


def small(dtype: torch.dtype = torch.bfloat16, seed: int = 0, hidden: int = 12) -> Case:
    case = make_case("normal", seed, 7, 4, hidden, ep_size=3, experts=9, dtype=dtype)
    case.probs = case.probs.nan_to_num(0.5)
    return case


def plain(case: Case, contract: Contract, rows: Tensor, probs: Tensor | None) -> Tensor:
    """The tree as differentiable torch: ranks, then slots, in the accumulator's type."""
    tree = contract.partial
    assert tree is not None
    total = torch.zeros(case.row_of_slot.shape[0], rows.shape[1])
    for rank in range(case.ep_size):
        acc = total.new_zeros(total.shape, dtype=torch.float64 if tree.accumulator == "fp64" else torch.float32)
        for slot in range(case.row_of_slot.shape[1]):
            here = (case.rank_of_slot[:, slot] == rank).nonzero()[:, 0]
            addend = rows[case.row_of_slot[here, slot]].float()
            if probs is not None:
                addend = probs[here, slot, None] * addend
            acc = acc.index_add(0, here, addend.to(acc.dtype))
        total = total + acc.float()
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("contract", [SWIGLU, WEIGHTED], ids=str)
def test_gradients_are_those_of_autograd_through_the_plain_chain(contract: Contract, dtype: torch.dtype) -> None:
    case, grad = small(dtype), torch.randn(7, 12)
    results = []
    for run in ("mirror", "plain"):
        rows = case.rows.nan_to_num(0.0).requires_grad_()
        probs = case.probs.clone().requires_grad_() if contract == WEIGHTED else None
        if run == "mirror":
            out = dataclasses.replace(case, rows=rows, probs=probs).mirror(contract)
        else:
            out = plain(case, contract, rows, probs)
        out.backward(grad)
        results.append((out, rows.grad, None if probs is None else probs.grad))
    (out, rows_grad, probs_grad), (want, want_rows, want_probs) = results
    assert torch.equal(bits(out), bits(want))
    assert torch.equal(bits(rows_grad), bits(want_rows))
    if want_probs is not None:  # autograd adds fp32 products in an order of its own; ours is fp64, rounded once
        torch.testing.assert_close(probs_grad, want_probs, rtol=1e-5, atol=1e-5)
        g64, x64 = grad.double(), case.rows.nan_to_num(0.0).double()
        routed = case.row_of_slot >= 0
        exact = torch.where(routed, (x64[case.row_of_slot] * g64[:, None]).sum(-1), 0.0)
        torch.testing.assert_close(probs_grad.double(), exact, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("contract", [*(dataclasses.replace(RULES[2], partial=t) for t in TREES), *OWNERS], ids=str)
def test_every_tree_has_the_same_gradient_because_roundings_count_as_the_identity(contract: Contract) -> None:
    case, grad = small(), torch.randn(7, 12)
    tree = contract.partial
    weighted = tree is not None and tree.probability == "combine"
    rows, probs = case.rows.clone().requires_grad_(), case.probs.clone().requires_grad_()
    dataclasses.replace(case, rows=rows, probs=probs).mirror(contract).backward(grad)
    weight = case.probs.bfloat16().float() if tree and tree.weight == "bf16" else case.probs
    want = torch.zeros_like(case.rows)
    for token, slot in (case.row_of_slot >= 0).nonzero().tolist():
        g = grad[token] * weight[token, slot] if weighted else grad[token]
        want[case.row_of_slot[token, slot]] = g.bfloat16()
    assert rows.grad is not None and torch.equal(bits(rows.grad), bits(want))
    assert (probs.grad is not None) == weighted


def test_a_tokens_gradients_do_not_depend_on_the_batch() -> None:
    case, grad = small(torch.float32, hidden=700), torch.randn(7, 700)

    def gradients(tokens: slice) -> tuple[Tensor, Tensor]:
        names = ("row_of_slot", "rank_of_slot", "order_of_slot", "probs")
        part = dataclasses.replace(case, **{name: getattr(case, name)[tokens] for name in names})
        part.rows, part.probs = case.rows.clone().requires_grad_(), part.probs.clone().requires_grad_()
        part.mirror(WEIGHTED).backward(grad[tokens])
        assert part.rows.grad is not None and part.probs.grad is not None
        return part.rows.grad, part.probs.grad

    all_rows, all_probs = gradients(slice(0, 7))
    for token in range(7):
        rows, probs = gradients(slice(token, token + 1))
        used = case.row_of_slot[token][case.row_of_slot[token] >= 0]
        assert torch.equal(bits(rows[used]), bits(all_rows[used]))
        assert torch.equal(bits(probs[0]), bits(all_probs[token]))
    # The twin: the same dot products as one matrix product of all gradients with all rows.
    rows = case.rows.nan_to_num(0.0)
    assert not torch.equal(grad[:1] @ rows.t(), (grad @ rows.t())[:1])


def test_padding_is_never_read_nor_given_a_gradient() -> None:
    case, grad = small(), torch.randn(7, 12)
    grad[1] = float("nan")  # the padded token's
    case.rows.requires_grad_()
    case.probs = case.probs.masked_fill(case.row_of_slot < 0, float("nan")).requires_grad_()
    out = case.mirror(WEIGHTED)
    out.backward(grad)
    unused = torch.ones(case.rows.shape[0], dtype=torch.bool)
    unused[case.row_of_slot[case.row_of_slot >= 0]] = False
    assert case.rows.isnan()[unused].all() and unused.any() and not out.isnan().any()
    assert case.rows.grad is not None and bits(case.rows.grad[unused]).eq(0).all() and not case.rows.grad.isnan().any()
    assert case.probs.grad is not None and bits(case.probs.grad[case.row_of_slot < 0]).eq(0).all()


def test_edges() -> None:
    for tokens, topk in ((0, 4), (5, 0), (5, 1)):
        maps = torch.arange(tokens * topk).view(tokens, topk)
        rows = torch.ones(tokens * topk + 1, 6, requires_grad=True)
        out = mirror.unpermute(rows, maps, rank_of_slot=maps * 0, ep_size=4, contract=SWIGLU)
        out.sum().backward()
        assert out.shape == (tokens, 6) and rows.grad is not None
        assert (
            out.eq(1.0 if topk else 0.0).all() and rows.grad[: tokens * topk].eq(1.0).all() and not rows.grad[-1].any()
        )


def test_permute_and_its_exact_gradient() -> None:
    x = torch.randn(3, 4).bfloat16().requires_grad_()
    slots = mirror.inverse_map(torch.tensor([[1, 0, 2], [-1, 2, 0], [1, -1, -1]]), 3, align=4)
    rows = mirror.permute(x, slots.row_of_slot, slots.num_rows)
    for token, slot in (slots.row_of_slot >= 0).nonzero().tolist():
        assert torch.equal(rows[slots.row_of_slot[token, slot]], x[token])
    grad = torch.zeros(slots.num_rows, 4, dtype=torch.bfloat16)
    for slot, value in enumerate((2.0**60, 1.0, -(2.0**60))):
        grad[slots.row_of_slot[0, slot]] = value
    rows.backward(grad)
    assert x.grad is not None and x.grad[0].eq(1.0).all() and not x.grad[1:].any()


@pytest.mark.parametrize("contract", [SWIGLU, BF16_PROBS, OWNERS[0], OWNERS[1]], ids=str)
def test_opcheck(contract: Contract) -> None:
    case = small()
    weighted = contract.partial is not None and contract.partial.probability == "combine"
    places, tags = torch.ops.bicomm_mirror.sort_slots(
        case.row_of_slot, case.rank_of_slot, case.order_of_slot, case.rows.shape[0], case.ep_size
    )
    probs = case.probs.requires_grad_() if weighted else None
    rows = case.rows.nan_to_num(0.0).requires_grad_()
    given = (rows, places, tags, probs, contract.id, torch.float32)
    torch.library.opcheck(torch.ops.bicomm_mirror.unpermute.default, given)
    sort = (case.row_of_slot, case.rank_of_slot, None, case.rows.shape[0], case.ep_size)
    torch.library.opcheck(torch.ops.bicomm_mirror.sort_slots.default, sort)
    half = case.probs.detach().bfloat16()
    back = (torch.randn(7, 12), places, tags, rows.detach(), half, False, len(rows), rows.dtype, True)
    torch.library.opcheck(torch.ops.bicomm_mirror.unpermute_backward.default, back)
    x = torch.randn(7, 12, requires_grad=True)
    torch.library.opcheck(torch.ops.bicomm_mirror.permute.default, (x, case.row_of_slot, len(rows)))
    partials = torch.randn(3, 5, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.bicomm_mirror.combine.default, (partials, "exact/1", torch.bfloat16))


class Layer(torch.nn.Module):
    """Router, experts (one matrix each) and the mirror, as a trainer would put them together."""

    def __init__(self, experts: int = 6, hidden: int = 8) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.router = torch.nn.Linear(hidden, experts)
        self.experts = torch.nn.Parameter(torch.randn(experts, hidden, hidden) / 3)
        self.placement = mirror.Placement.counts([1, 3, 2])

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x).softmax(-1).topk(2)
        count = len(self.experts)
        slots = mirror.inverse_map(ids, count)
        rows = mirror.permute(x, slots.row_of_slot, slots.num_rows)
        expert = torch.repeat_interleave(slots.tokens_per_expert, output_size=slots.num_rows)
        rows = torch.einsum("rh,rhk->rk", rows, self.experts[expert].to(rows.dtype))
        return mirror.unpermute(
            rows, slots.row_of_slot, rank_of_slot=mirror.rank_of_slot(ids, self.placement), ep_size=3,
            contract="ordered/1+slot-fp32/1", probs=scores,
        )  # fmt: skip


def step(layer: Any, x: Tensor) -> list[Tensor]:
    """Output and all gradients of one step."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


def test_checkpointing_compile_and_autocast_change_no_bit() -> None:
    layer, x = Layer(), torch.randn(10, 8)
    want = step(layer, x)

    class Checkpointed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return out

    assert all(torch.equal(a, b) for a, b in zip(step(Checkpointed(), x), want, strict=True))
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(step(compiled, x), want, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        once, again = step(Layer(), x), step(Layer(), x)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True)) and once[0].dtype == torch.float32


def test_inductor_compiles_the_whole_step_for_any_number_of_tokens() -> None:
    case, stored = small(), WEIGHTED.json()

    def model(rows: Tensor, row_of_slot: Tensor, rank_of_slot: Tensor, probs: Tensor) -> Tensor:
        # The contract as an engine stored it; probabilities that a router rounds to bf16, which is a rounding to keep.
        out = mirror.unpermute(
            rows * 2, row_of_slot, rank_of_slot=rank_of_slot, ep_size=3, contract=stored,
            probs=(probs * 0.7).bfloat16(),
        )  # fmt: skip
        return out + 1

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for tokens in (7, 4):
        given = (case.row_of_slot[:tokens], case.rank_of_slot[:tokens])
        results = []
        for fn in (model, compiled):
            rows, probs = case.rows.clone().requires_grad_(), case.probs[:tokens].clone().requires_grad_()
            out = fn(rows, *given, probs)
            out.sum().backward()
            results.append((out.detach(), rows.grad, probs.grad))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*results, strict=True))


def wrapped_steps(kind: str) -> list[Tensor]:
    """One rank's share of a data-parallel step: each rank its own tokens, gradients averaged by the wrapper."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        layer: Any = Layer()
        if kind == "ddp":
            layer = torch.nn.parallel.DistributedDataParallel(layer)
        else:
            from torch.distributed.fsdp import fully_shard

            fully_shard(layer)
        torch.manual_seed(dist.get_rank())
        out = step(layer, torch.randn(5 + dist.get_rank(), 8))
        return [out[0], *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in out[2:])]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_inside_ddp_and_fsdp(kind: str) -> None:
    results = [result.value for result in run_ranks(3, wrapped_steps, kind, launcher="fork", timeout=120)]
    alone = []
    for rank in range(3):
        torch.manual_seed(1)
        layer = Layer()
        torch.manual_seed(rank)
        alone.append(step(layer, torch.randn(5 + rank, 8)))
    for rank in range(3):
        assert torch.equal(results[rank][0], alone[rank][0])
        for got, *each in zip(results[rank][1:], *(step[2:] for step in alone), strict=True):
            torch.testing.assert_close(got, sum(each) / 3)  # the wrapper's mean, in an order of its own


def test_combine_gradients_reach_every_rank() -> None:
    partials = torch.randn(3, 5, 4, requires_grad=True)
    grad = torch.randn(5, 4)
    mirror.combine(partials, "exact").backward(grad)
    assert partials.grad is not None and all(torch.equal(g, grad) for g in partials.grad)


def test_a_second_derivative_is_an_error_and_not_a_zero() -> None:
    case = small(torch.float32)
    rows = case.rows.nan_to_num(0.0).requires_grad_()
    probs = case.probs.requires_grad_()
    out = dataclasses.replace(case, rows=rows, probs=probs).mirror(WEIGHTED)
    (grad,) = torch.autograd.grad(out.square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()
