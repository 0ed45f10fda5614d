"""The mirror's kernels on a GPU against the plain torch definition on the CPU, bit for bit, and how they run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from bicomm import mirror
from bicomm.contract import Contract, Partial
from bicomm.mirror import definition
from mirror_cases import OWNERS, RULES, TREES, Case, bits, make_case

GPU = "cuda"
SWIGLU = Contract("ordered", partial=Partial("slot", "fp64"))
WEIGHTED = Contract("ordered", partial=Partial("slot", "fp32", "combine"))


def same_bits(case: Case, contract: Contract, out_dtype: torch.dtype) -> None:
    got, want = case.to(GPU).mirror(contract, out_dtype).cpu(), case.mirror(contract, out_dtype)
    different = bits(got) != bits(want)
    assert not different.any(), (contract.id, different.nonzero()[:4].tolist(), got[different][:4], want[different][:4])


def rules_of(tree: Partial) -> list[tuple[Contract, torch.dtype]]:
    """Every accumulator meets every rule and both dtypes of rows, in few kernels: each one compiles for about 1 s.

    The order of a tree is the sorting kernel's alone, so trees in slot and in expert order share kernels.
    """
    bf16, fp32 = torch.bfloat16, torch.float32
    if tree.probability == "combine":
        first = TREES.index(tree) % len(RULES)
        return [(RULES[first], (bf16, fp32)[first // 2])] if (tree.product == "bf16") != (tree.weight == "bf16") else []
    if tree.accumulator in ("exact", "fp64"):
        return [(rule, bf16) for rule in RULES] + [(RULES[0], fp32), (RULES[2], fp32)]
    return [(RULES[0], bf16), (RULES[3], fp32)]


@pytest.mark.parametrize("tree", [t for t in TREES if rules_of(t)], ids=lambda t: t.id)
def test_forward_bits_of_every_tree(tree: Partial) -> None:
    for i, (rule, dtype) in enumerate(rules_of(tree)):
        case = make_case("all", TREES.index(tree) + i, 24, 8, 13 * 48, dtype=dtype)
        same_bits(case, dataclasses.replace(rule, partial=tree), (torch.float32, torch.bfloat16)[i % 2])


def test_ranks_of_many_slots() -> None:
    for family in ("all", "any_bits"):  # 8 slots on 2 ranks: three or more go through fp64
        case = make_case(family, 7, 24, 8, 13 * 48, ep_size=2)
        for rule in RULES:
            for tree in (TREES[0], TREES[1]):
                same_bits(
                    case,
                    dataclasses.replace(rule, partial=tree),
                    (torch.float32, torch.bfloat16)[RULES.index(rule) % 2],
                )


@pytest.mark.parametrize("contract", [*OWNERS, Contract("window", (8, 30, 20), TREES[1])], ids=str)
def test_forward_bits_of_owner_and_a_narrow_window(contract: Contract) -> None:
    plain = contract == Contract("owner")
    for dtype, topk in (
        (torch.bfloat16, 8),
        *(((torch.float32, 8), (torch.bfloat16, 1), (torch.bfloat16, 2)) if plain else ()),
    ):
        same_bits(make_case("all", topk, 24, topk, 13 * 48, dtype=dtype), contract, torch.float32)


def test_odd_widths_and_many_slots() -> None:
    exact, owner = Contract("exact", partial=Partial()), Contract("owner")
    for hidden, dtype, contract in (
        (1, torch.bfloat16, SWIGLU), (7, torch.float32, exact), (2050, torch.bfloat16, exact),
        (4097, torch.float32, owner), (7168, torch.bfloat16, SWIGLU), (7168, torch.bfloat16, owner),
    ):  # fmt: skip
        same_bits(make_case("spread", hidden, 5, 8, hidden, dtype=dtype), contract, torch.float32)
    same_bits(make_case("tie_dust", 3, 3, 70, 64, experts=128), exact, torch.float32)


def test_a_row_buffer_that_is_not_contiguous_or_aligned() -> None:
    case = make_case("cancellation", 5, 9, 8, 200)
    want = case.mirror(SWIGLU)
    wide = torch.full((case.rows.shape[0], 211), float("nan"), dtype=case.rows.dtype)
    wide[:, 3:203] = case.rows
    for rows in (wide.to(GPU)[:, 3:203], case.rows.to(GPU).t().contiguous().t()):
        got = dataclasses.replace(case.to(GPU), rows=rows).mirror(SWIGLU)
        assert torch.equal(bits(got.cpu()), bits(want))


def test_offsets_beyond_31_bits() -> None:
    hidden = 8192
    rows = torch.zeros(2**31 // hidden + 8, hidden, dtype=torch.bfloat16, device=GPU)
    rows[-1], rows[-2] = 3.0, 4.0
    maps = torch.tensor([[rows.shape[0] - 1, rows.shape[0] - 2], [-1, -1]], device=GPU)
    ranks = torch.zeros_like(maps)
    out = mirror.unpermute(rows, maps, rank_of_slot=ranks, ep_size=2, contract=SWIGLU)
    assert out[0].eq(7.0).all() and out[1].eq(0.0).all()
    rows.requires_grad_()
    mirror.unpermute(rows, maps, rank_of_slot=ranks, ep_size=2, contract=SWIGLU).sum().backward()
    assert rows.grad is not None and rows.grad[-2:].eq(1.0).all() and not rows.grad[:-2].any()


def test_zero_tokens_and_zero_slots() -> None:
    for tokens, topk in ((0, 8), (4, 0)):
        maps = torch.zeros(tokens, topk, dtype=torch.int64, device=GPU)
        rows = torch.zeros(3, 16, dtype=torch.bfloat16, device=GPU, requires_grad=True)
        out = mirror.unpermute(rows, maps, rank_of_slot=maps, ep_size=2, contract=SWIGLU)
        out.sum().backward()
        assert out.shape == (tokens, 16) and not out.any() and rows.grad is not None and not rows.grad.any()


def test_what_does_not_exist_is_nan() -> None:
    rows = torch.ones(4, 64, device=GPU)
    for row, rank in ((4, 0), (2**40, 0), (1, 3)):
        maps = torch.tensor([[0, row], [1, 2]], device=GPU), torch.tensor([[0, rank], [1, 1]], device=GPU)
        out = mirror.unpermute(rows, maps[0], rank_of_slot=maps[1], ep_size=3, contract=SWIGLU)
        assert out[0].isnan().all() and out[1].eq(2.0).all()


def gradients(case: Case, contract: Contract, grad: torch.Tensor, device: str) -> tuple[Any, Any]:
    case = case.to(device)
    case.rows.requires_grad_()
    weighted = contract.partial is not None and contract.partial.probability == "combine"
    if weighted:
        case.probs = case.probs.nan_to_num(0.5).requires_grad_()
    case.mirror(contract, grad.dtype).backward(grad.to(device))
    return case.rows.grad, case.probs.grad if weighted else None


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_equal_the_definitions(weighted: bool, each: bool) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    for hidden, dtype, grad_dtype in ((7168, bf16, fp32), (96, bf16, fp32), (8200, fp32, bf16)):
        case = make_case("normal", hidden, 13, 8, hidden, dtype=dtype)
        grad = torch.randn(13, hidden).to(grad_dtype)
        grad[1] = float("nan")  # a padded token's
        places, tags = case.row_of_slot, None
        if not each:
            places, tags = definition.sort_slots(case.row_of_slot, case.rank_of_slot, None)
        rows, probs = (case.rows, case.probs) if weighted else (None, None)
        given = (grad, places, tags, rows, probs)
        rest = (each, case.rows.shape[0], dtype, True)
        on_gpu = [None if x is None else x.to(GPU) for x in given]
        got = torch.ops.bicomm_mirror.unpermute_backward(*on_gpu, *rest)
        want = torch.ops.bicomm_mirror.unpermute_backward(*given, *rest)
        assert torch.equal(bits(got[0].cpu()), bits(want[0]))
        # an fp64 sum in another order, rounded once
        torch.testing.assert_close(got[1].cpu(), want[1], rtol=1e-6, atol=1e-6)


def test_gradients_of_a_token_do_not_depend_on_the_batch() -> None:
    case = make_case("normal", 1, 300, 8, 2048).to(GPU)
    grad = torch.randn(300, 2048, device=GPU)
    d_rows, d_probs = gradients(case, WEIGHTED, grad, GPU)
    for token in (0, 17, 299):
        names = ("row_of_slot", "rank_of_slot", "order_of_slot", "probs")
        one = dataclasses.replace(
            case, rows=case.rows.detach(), **{name: getattr(case, name)[token : token + 1] for name in names}
        )
        alone_rows, alone_probs = gradients(one, WEIGHTED, grad[token : token + 1], GPU)
        used = one.row_of_slot[one.row_of_slot >= 0]
        assert torch.equal(bits(alone_rows[used]), bits(d_rows[used]))
        assert torch.equal(bits(alone_probs[0]), bits(d_probs[token]))


def test_no_host_sync_and_graph_capture() -> None:
    ids = torch.stack([torch.randperm(64, device=GPU)[:8] for _ in range(64)])
    ids[3, 2] = -1
    placement = mirror.Placement.counts([10, 0, 22, 32])
    leaves = (torch.randn(64, 512, device=GPU, dtype=torch.bfloat16), torch.rand(64, 8, device=GPU))
    tree = Contract("exact", partial=Partial("expert", "fp32", "combine"))

    def step() -> list[torch.Tensor]:
        x, probs = (leaf.detach().requires_grad_() for leaf in leaves)  # leaves of the stream that the step runs on
        slots = mirror.inverse_map(ids, 64, align=16)
        rows = mirror.permute(x, slots.row_of_slot, slots.num_rows)
        out = mirror.unpermute(
            rows, slots.row_of_slot, rank_of_slot=mirror.rank_of_slot(ids, placement),
            order_of_slot=mirror.order_of_slot(ids, placement), ep_size=4, contract=tree, probs=probs,
        )  # fmt: skip
        return [out, *torch.autograd.grad(out, (x, probs), torch.ones_like(out))]

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    eager = [t.clone() for t in eager]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for shift in range(3):
        if shift:
            ids.copy_((ids + 1) % 64)
            eager = [t.clone() for t in step()]
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(captured, eager, strict=True))


def test_compiled_whole_and_under_autocast() -> None:
    case = make_case("normal", 2, 50, 8, 256).to(GPU)
    weight = torch.randn(256, 256, device=GPU)

    def model(rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        moved = dataclasses.replace(case, rows=rows, probs=probs)
        return moved.mirror(WEIGHTED) @ weight

    results = []
    for fn in (model, torch.compile(model, fullgraph=True)):
        rows, probs = case.rows.clone().requires_grad_(), case.probs.nan_to_num(0.0).requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = fn(rows, probs)
        out.float().sum().backward()
        results.append((out, rows.grad, probs.grad))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*results, strict=True))


def test_combine_of_stacked_partials() -> None:
    for ranks, rules in ((1, RULES[3:]), (3, RULES), (72, RULES[2:])):
        case = make_case("all", ranks, ranks, 8, 13 * 40, dtype=torch.float32, drop=0.0)
        partials = case.rows.nan_to_num(1.0)[: ranks * 8].view(ranks, 8, -1)
        for rule in rules:
            got = mirror.combine(partials.to(GPU).requires_grad_(), rule)
            assert torch.equal(bits(got.detach().cpu()), bits(mirror.combine(partials, rule))), (ranks, rule)
    x = torch.randn(4, 8, 16, device=GPU, requires_grad=True)
    mirror.combine(x, "exact").backward(grad := torch.randn(8, 16, device=GPU))
    assert x.grad is not None and all(torch.equal(g, grad) for g in x.grad)


def test_memory_of_a_step_is_its_output_and_the_maps() -> None:
    tokens, hidden = 4096, 2048
    rows = torch.randn(tokens * 8, hidden, device=GPU, dtype=torch.bfloat16)
    ids = torch.randint(0, 64, (tokens, 8), device=GPU)
    slots = mirror.inverse_map(ids, 64)
    ranks = mirror.rank_of_slot(ids, mirror.Placement.even(64, 8))
    for contract in (SWIGLU, Contract("exact", partial=Partial()), Contract("owner")):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = mirror.unpermute(rows, slots.row_of_slot, rank_of_slot=ranks, ep_size=8, contract=contract)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - out.numel() * 4
        assert extra <= tokens * 8 * 16 + 4096, extra  # the maps alone
        del out
