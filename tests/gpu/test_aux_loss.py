"""The auxiliary loss on a GPU: the bits of the CPU's definition, in every run, stream and graph, and past 2**31."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bicomm.model_hooks import aux_loss, aux_loss_kernel, exact_loss, exact_loss_kernel
from bicomm.model_hooks.aux_loss import aux_loss_workspace, fused_moe_aux_loss, fused_moe_aux_loss_out
from router_cases import LOSSES, bits, probabilities, same, token_counts

CUDA = torch.device("cuda")


def loss_and_gradient(probs: Tensor, counts: Tensor, total: int | Tensor, experts: int, **more: object) -> list[Tensor]:
    p = probs.detach().clone().requires_grad_()
    loss = fused_moe_aux_loss(p, counts, total, experts, 4, 0.01, True, **more)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(loss, p, torch.full_like(loss, 1.5))
    return [loss.detach(), grad]


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_32_repeats_have_the_bits_of_the_definition(case: tuple[int, int, int, torch.dtype, torch.dtype]) -> None:
    rows, cols, experts, dtype, count_dtype = case
    probs, counts = probabilities(rows, cols, dtype), token_counts(cols, count_dtype)
    padding = torch.arange(rows) % 5 == 1
    every = rows > 4000  # the largest case in all four ways; the others in two, since each way is a compile
    for mask in (None, padding):
        p = probs.clone()
        if mask is not None:
            p[mask] = torch.nan
        want = loss_and_gradient(p, counts, rows, experts, padding_mask=mask)
        on_gpu = [p.to(CUDA), counts.to(CUDA)]
        gpu_mask = None if mask is None else mask.to(CUDA)
        both = [rows, torch.tensor(rows, device=CUDA)]
        for total in both if every else both[mask is not None :][:1]:
            for repeat in range(32):
                with torch.cuda.stream(torch.cuda.Stream() if repeat % 4 == 3 else torch.cuda.current_stream()):
                    torch.cuda.synchronize()
                    got = loss_and_gradient(*on_gpu, total, experts, padding_mask=gpu_mask)
                    torch.cuda.synchronize()
                assert all(same(a, b) for a, b in zip(got, want, strict=True)), (got, want)


@pytest.mark.parametrize("case", [c for c in LOSSES if not c[4].is_floating_point], ids=str)
def test_the_exact_loss_has_the_bits_of_the_definition_however_rows_are_split(
    case: tuple[int, int, int, torch.dtype, torch.dtype],
) -> None:
    rows, cols, experts, dtype, count_dtype = case
    probs, counts = probabilities(rows, cols, dtype), token_counts(cols, count_dtype)
    want = loss_and_gradient(probs, counts, rows, experts, reduction="exact")
    got = loss_and_gradient(probs.to(CUDA), counts.to(CUDA), rows, experts, reduction="exact")
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
    sums = exact_loss_kernel.column_sums(probs.to(CUDA), None).cpu()
    for parts in (1, 2, 8):
        split = [exact_loss_kernel.column_sums(part.to(CUDA), None).cpu() for part in probs.tensor_split(parts)]
        assert torch.equal(torch.stack(split).sum(0), sums)
    if rows < 4000:
        return
    total = torch.tensor(rows, device=CUDA)
    on_device = fused_moe_aux_loss(probs.to(CUDA), counts.to(CUDA), total, experts, 4, 0.01, reduction="exact")
    assert same(on_device, want[0])


def test_wide_exponents_and_cancellations_sum_exactly() -> None:
    generator = torch.Generator().manual_seed(3)
    for trial in range(12):
        x = torch.randn(17, 5, generator=generator)
        x = x * torch.exp2(torch.randint(-140, 120, (17, 5), generator=generator).float())
        if trial % 3 == 0:
            x[1] = -x[0]
        x[:3, 0] = torch.tensor([2.0**60, 1.0, -(2.0**60)])
        counts = torch.randint(0, 2**40, (5,), generator=generator)
        c = float(torch.tensor(3e-7 * 10.0 ** (trial % 40 - 30)))
        sums = exact_loss_kernel.column_sums(x.to(CUDA), None)
        assert torch.equal(sums.cpu(), exact_loss.definition(x))
        want = torch.tensor(exact_loss.finish_definition(sums.cpu(), counts, c))
        assert bits(exact_loss_kernel.finish(sums, counts.to(CUDA), c)) == bits(want)


def test_two_streams_at_once_each_keep_their_scratch() -> None:
    cases = [(probabilities(4097, 128, seed=s).to(CUDA), token_counts(128, torch.int64, s).to(CUDA)) for s in (1, 2)]
    want = [fused_moe_aux_loss(p, n, 4097, 128, 4, 0.01) for p, n in cases]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    got: list[list[Tensor]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(300):
        for i in (0, 1):
            with torch.cuda.stream(streams[i]):
                got[i].append(fused_moe_aux_loss(*cases[i], 4097, 128, 4, 0.01))
    torch.cuda.synchronize()
    assert all(same(x, want[i]) for i in (0, 1) for x in got[i])
    assert len({key[1] for key in aux_loss_kernel._scratch}) >= 3


def test_two_graphs_captured_on_one_stream_replay_on_two_at_once_with_a_changing_total() -> None:
    cases = [(probabilities(4097, 128, seed=s).to(CUDA), token_counts(128, torch.int64, s).to(CUDA)) for s in (1, 2)]
    totals = [torch.tensor(4097, device=CUDA), torch.tensor(4097, device=CUDA)]
    graphs, results = [], []
    capture_stream = torch.cuda.Stream()
    for (p, n), t in zip(cases, totals, strict=True):
        loss_and_gradient(p, n, t, 128)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        leaf = p.clone().requires_grad_()
        with torch.cuda.graph(graph, stream=capture_stream):
            loss = fused_moe_aux_loss(leaf, n, t, 128, 4, 0.01, True)
            (grad,) = torch.autograd.grad(loss, leaf)
        graphs.append(graph)
        results.append((loss, grad))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for total in (4097, 100, 1, 0, 2**33):
        for t in totals:
            t.fill_(total)
        torch.cuda.synchronize()
        for _ in range(20):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for (p, n), (loss, grad) in zip(cases, results, strict=True):
            leaf = p.cpu().requires_grad_()
            want = fused_moe_aux_loss(leaf, n.cpu(), torch.tensor(total), 128, 4, 0.01)
            want.backward()
            assert same(loss, want.detach())
            assert leaf.grad is not None and same(grad, leaf.grad)
            assert total != 0 or (loss.item() == 0.0 and not grad.any())


def test_a_workspace_is_used_and_its_contents_do_not_matter() -> None:
    spec = aux_loss_workspace()
    probs, counts = probabilities(4097, 128).to(CUDA), token_counts(128, torch.int64).to(CUDA)
    want = fused_moe_aux_loss(probs, counts, 4097, 128, 4, 0.01)
    space = torch.full(spec.shape, torch.nan, dtype=spec.dtype, device=CUDA)
    out, const = torch.empty((), device=CUDA), torch.empty(2, device=CUDA)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    fused_moe_aux_loss_out(probs, counts, 4097, 128, 4, 0.01, out=out, const_buf=const, workspace=space)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert same(out, want) and same(const[1], want) and const[0].item() == aux_loss.coefficient(128, 0.01, 4, 4097)
    with pytest.raises(ValueError, match="wrong device cpu"):
        fused_moe_aux_loss_out(probs, counts, 4097, 128, 4, 0.01, out=out, const_buf=const, workspace=torch.empty(256))


def test_offsets_past_int32() -> None:
    rows, cols = 16_777_216, 128
    probs = torch.full((rows, cols), 2.0**-7, dtype=torch.bfloat16, device=CUDA)
    probs[-1, -1] = 1.0
    counts = torch.full((cols,), rows, dtype=torch.int64, device=CUDA)
    counts[-1] = 3
    for reduction in ("blocked", "exact"):
        leaf = probs.detach().requires_grad_()
        loss = fused_moe_aux_loss(leaf, counts, rows, cols, 1, 1.0, reduction=reduction)  # type: ignore[arg-type]
        columns = rows * 2.0**-7 * (cols - 1) * rows + 3 * ((rows - 1) * 2.0**-7 + 1.0)
        want = torch.tensor(columns * cols / rows / rows, dtype=torch.float64)
        assert abs(loss.double().item() / want.item() - 1) < 2.0**-8
        (grad,) = torch.autograd.grad(loss, leaf)
        assert grad[-1, 0] == grad[0, 0] != 0 and grad[-1, -1] == grad[0, -1] != grad[0, 0]
        del grad, loss
        if reduction == "blocked":  # with a mask the gradient is written out in full
            mask = torch.zeros(rows, dtype=torch.bool, device=CUDA)
            mask[0] = True
            loss = fused_moe_aux_loss(leaf, counts, rows, cols, 1, 1.0, padding_mask=mask)
            (grad,) = torch.autograd.grad(loss, leaf)
            assert not grad[0].any() and torch.equal(grad[-1], grad[1]) and grad[-1].all()
            del grad, loss
        del leaf


def test_rows_of_zero_and_total_of_zero() -> None:
    counts = torch.ones(8, dtype=torch.int64, device=CUDA)
    empty = torch.empty(0, 8, device=CUDA, requires_grad=True)
    for reduction in ("blocked", "exact"):
        loss = fused_moe_aux_loss(empty, counts, 5, 8, 2, 0.1, reduction=reduction)  # type: ignore[arg-type]
        (grad,) = torch.autograd.grad(loss, empty)
        assert loss.item() == 0.0 and grad.shape == (0, 8)
        probs = torch.rand(4, 8, device=CUDA, requires_grad=True)
        zero = torch.tensor(0, device=CUDA)
        loss = fused_moe_aux_loss(probs, counts, zero, 8, 2, 0.1, reduction=reduction)  # type: ignore[arg-type]
        (grad,) = torch.autograd.grad(loss, probs)
        assert loss.item() == 0.0 and not grad.any()
        with pytest.raises(ValueError, match="total_num_tokens must be at least 1"):
            fused_moe_aux_loss(probs, counts, 0, 8, 2, 0.1, reduction=reduction)  # type: ignore[arg-type]


def test_transposed_and_sliced_probs_have_the_same_bits() -> None:
    base = probabilities(513, 65).to(CUDA)
    counts = token_counts(64, torch.int64).to(CUDA)
    sliced = base[:, 1:]
    want = fused_moe_aux_loss(sliced.contiguous(), counts, 513, 64, 4, 0.01)
    assert same(fused_moe_aux_loss(sliced, counts, 513, 64, 4, 0.01), want)
    assert same(fused_moe_aux_loss(sliced.t().contiguous().t(), counts, 513, 64, 4, 0.01), want)
    exact = fused_moe_aux_loss(sliced, counts, 513, 64, 4, 0.01, reduction="exact")
    assert same(exact, fused_moe_aux_loss(sliced.cpu(), counts.cpu(), 513, 64, 4, 0.01, reduction="exact"))
