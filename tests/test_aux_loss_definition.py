"""The auxiliary loss on a CPU: by value against fp64 and megatron-core, and in every case that broke the original."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import Tensor

from bicomm.model_hooks import aux_loss, aux_loss_order, exact_loss
from bicomm.model_hooks.aux_loss import aux_loss_workspace, fused_moe_aux_loss, fused_moe_aux_loss_out
from bicomm.model_hooks.aux_loss_order import TILE, Partition
from router_cases import LOSSES, bits, probabilities, same, token_counts

REDUCTIONS = ["blocked", "exact"]


def by_value(probs: Tensor, counts: Tensor, total: int, experts: int, topk: int, coeff: float) -> tuple[Tensor, Tensor]:
    """(loss, gradient) in fp64."""
    c = experts * float(torch.tensor(coeff)) / topk / total / total
    loss = (probs.double().sum(0) * counts.double()).sum() * c
    return loss, (counts.double() * c).expand_as(probs)


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_32_repeats_and_the_fp64_value(case: tuple[int, int, int, torch.dtype, torch.dtype]) -> None:
    rows, cols, experts, dtype, count_dtype = case
    probs, counts = probabilities(rows, cols, dtype), token_counts(cols, count_dtype)
    kinds = ["blocked"] if count_dtype.is_floating_point else REDUCTIONS
    tolerance = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}.get(dtype, 2.0**-20)
    for reduction in kinds:
        first: list[Tensor] = []
        for repeat in range(32 if rows < 4000 else 8):
            leaf = probs.clone().requires_grad_()
            deterministic = repeat % 2 == 0
            loss = fused_moe_aux_loss(leaf, counts, rows, experts, 4, 1e-9, deterministic, reduction=reduction)  # type: ignore[arg-type]
            loss.backward()
            assert leaf.grad is not None and loss.dtype == leaf.grad.dtype == dtype and loss.shape == ()
            first = first or [loss.detach(), leaf.grad]
            assert same(loss.detach(), first[0]) and same(leaf.grad, first[1])
        want, gradient = by_value(probs, counts, rows, experts, 4, 1e-9)
        torch.testing.assert_close(first[0].double(), want, rtol=tolerance, atol=1e-7 if dtype != torch.float32 else 0)
        torch.testing.assert_close(first[1].double(), gradient, rtol=tolerance, atol=1e-7)


def test_the_partition_depends_on_the_shape_alone() -> None:
    assert Partition.of(1, 1) == Partition(1, 1, 1, 1)
    assert Partition.of(4097, 128) == Partition(256, 17, 16, 128)
    assert Partition.of(65536, 512) == Partition(256, 256, 4, 512)
    assert Partition.of(0, 8).blocks == 1
    for rows in (1, 255, 256, 257, 4097, 1 << 24):
        for cols in (1, 7, 128, 1025, 1 << 20):
            p = Partition.of(rows, cols)
            assert p.blocks == max(1, min(rows, 256)) and p.blocks * p.rows_per_block >= rows
            assert p.tile_rows * p.tile_cols <= TILE


def test_another_partition_would_be_another_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: a partition that follows the number of SMs, as a naive kernel's does."""
    probs, counts = probabilities(4097, 128), token_counts(128, torch.int64)
    losses = set()
    for sms in (132, 148, 78, 256):
        monkeypatch.setattr(aux_loss_order, "BLOCKS", sms)
        losses.add(bits(aux_loss.definition(probs, counts, 1e-9)).item())
    assert len(losses) > 1
    monkeypatch.undo()
    exact = {
        bits(fused_moe_aux_loss(probs[order], counts, 4097, 128, 4, 0.01, reduction="exact")).item()
        for order in (torch.arange(4097), torch.arange(4096, -1, -1), torch.randperm(4097))
    }
    assert len(exact) == 1


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_megatron_core_agrees(reduction: str) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    probs = torch.softmax(torch.randn(300, 64, generator=torch.Generator().manual_seed(0)), -1)
    counts = torch.randint(0, 60, (64,), generator=torch.Generator().manual_seed(1))
    padding = torch.arange(300) % 7 == 0
    for mask in (None, padding):
        a, b = probs.clone().requires_grad_(), probs.clone().requires_grad_()
        valid = None if mask is None else ~mask
        total = 300 if mask is None else int((~mask).sum())
        want = moe_utils.switch_load_balancing_loss_func(a, counts, total, 8, 64, 0.01, padding_mask=valid)
        got = fused_moe_aux_loss(b, counts, total, 64, 8, 0.01, padding_mask=mask, reduction=reduction)  # type: ignore[arg-type]
        want.backward()
        got.backward()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_total_in_a_tensor_is_the_total_as_an_int(reduction: str) -> None:
    probs, counts = probabilities(50, 24), token_counts(24, torch.int64)
    for total in (1, 50, 16384, 2**31 + 12345, 2**53 + 1):
        host = fused_moe_aux_loss(probs, counts, total, 8, 3, 0.1, reduction=reduction)  # type: ignore[arg-type]
        device = fused_moe_aux_loss(probs, counts, torch.tensor(total), 8, 3, 0.1, reduction=reduction)  # type: ignore[arg-type]
        assert same(host, device)
        want = by_value(probs, counts, total, 8, 3, 0.1)[0]
        torch.testing.assert_close(host.double(), want, rtol=1e-6, atol=0)


def test_topk_times_t_times_t_does_not_overflow() -> None:
    """topk * T * T = 2**31 at T = 16384, topk = 8."""
    probs = torch.full((16384, 8), 1 / 8)
    counts = torch.full((8,), 16384, dtype=torch.int32)
    for reduction in REDUCTIONS:
        loss = fused_moe_aux_loss(probs, counts, 16384, 8, 8, 0.25, reduction=reduction)  # type: ignore[arg-type]
        assert loss.item() == 0.25  # balanced: E * coeff / topk * sum(1/8 * 1)


@pytest.mark.long
def test_2_to_the_24_rows_of_128_in_bounded_memory() -> None:
    """2**31 probabilities. The rows are one row, expanded; 20 s."""
    rows = 1 << 24
    probs = torch.full((1, 128), 1 / 128).expand(rows, 128)
    counts = torch.full((128,), rows // 16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert fused_moe_aux_loss(probs, counts, rows, 128, 8, 0.25).item() == 0.25
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_the_definitions_work_in_parts_and_the_parts_are_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, cols in ((1025, 33), (300, 1025), (257, 3)):
        probs, counts, mask = probabilities(rows, cols), token_counts(cols, torch.int64), torch.arange(rows) % 5 == 0
        for padding in (None, mask):
            results = []
            for at_once in (1 << 22, 1 << 13, 1):
                monkeypatch.setattr(aux_loss, "ADDENDS_AT_ONCE", at_once)
                monkeypatch.setattr(exact_loss, "ADDENDS_AT_ONCE", max(at_once, 512))
                results.append(
                    (aux_loss.definition(probs, counts, 1e-9, padding), exact_loss.definition(probs, padding))
                )
            for loss, sums in results[1:]:
                assert same(loss, results[0][0]) and torch.equal(sums, results[0][1])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_default_device_is_no_matter(reduction: str) -> None:
    """C is made on the host: on a default device it would wait for a GPU, which no graph capture allows."""
    probs, counts = probabilities(50, 24), token_counts(24, torch.int64)
    want = fused_moe_aux_loss(probs, counts, 50, 8, 3, 0.1, reduction=reduction)  # type: ignore[arg-type]
    with torch.device("meta"):
        got = fused_moe_aux_loss(probs, counts, 50, 8, 3, 0.1, reduction=reduction)  # type: ignore[arg-type]
    assert same(got, want)


def test_counts_above_2_to_the_24_keep_their_bits() -> None:
    probs = torch.full((2, 1), 1.5, requires_grad=True)
    for dtype in (torch.int32, torch.int64):
        counts = torch.tensor([2**24 + 1], dtype=dtype)
        for reduction in REDUCTIONS:
            loss = fused_moe_aux_loss(probs, counts, 1, 1, 1, 1.0, reduction=reduction)  # type: ignore[arg-type]
            assert loss.item() == 3 * 2**24 + 4  # RN32(3 * (2**24 + 1))
            loss = fused_moe_aux_loss(probs, counts, 1, 1, 1, 3.0, reduction=reduction)  # type: ignore[arg-type]
            assert torch.autograd.grad(loss, probs)[0].tolist() == [[3 * 2**24 + 4.0]] * 2
    assert (counts.float() * 3).item() == 3 * 2**24, "the twin: fp32 counts lose it"


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows_of_zero_and_totals_of_zero(reduction: str) -> None:
    counts = torch.ones(8, dtype=torch.int64)
    empty = torch.empty(0, 8, requires_grad=True)
    loss = fused_moe_aux_loss(empty, counts, 5, 8, 2, 0.1, reduction=reduction)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(loss, empty)
    assert loss.item() == 0.0 and grad.shape == (0, 8)
    probs = torch.rand(4, 8, requires_grad=True)
    loss = fused_moe_aux_loss(probs, counts, torch.tensor(0), 8, 2, 0.1, reduction=reduction)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(loss, probs)
    assert loss.item() == 0.0 and not grad.any()
    for total in (0, -3):
        with pytest.raises(ValueError, match=f"total_num_tokens must be at least 1, got {total}"):
            fused_moe_aux_loss(probs, counts, total, 8, 2, 0.1, reduction=reduction)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_padding_and_special_values(reduction: str) -> None:
    probs, counts = probabilities(20, 8), token_counts(8, torch.int64)
    mask = torch.arange(20) % 3 == 0
    poisoned = probs.clone()
    poisoned[mask] = torch.nan
    leaf = poisoned.requires_grad_()
    got = fused_moe_aux_loss(leaf, counts, 13, 8, 2, 0.1, padding_mask=mask, reduction=reduction)  # type: ignore[arg-type]
    zeros = torch.where(mask[:, None], 0.0, probs)
    assert same(got, fused_moe_aux_loss(zeros, counts, 13, 8, 2, 0.1, reduction=reduction))  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(got, leaf)
    assert grad[mask].eq(0).all() and grad[~mask].ne(0).all()
    for value in (torch.nan, torch.inf):
        probs[4, 2] = value
        assert torch.isnan(fused_moe_aux_loss(probs, counts, 20, 8, 2, 0.1, reduction=reduction))  # type: ignore[arg-type]


def test_the_workspace_is_256_fp32_whatever_the_input_and_a_wrong_one_is_named() -> None:
    spec = aux_loss_workspace()
    assert spec.shape == (256,) and spec.dtype == torch.float32
    probs, counts = probabilities(300, 16), token_counts(16, torch.int64)
    out, const = torch.empty(()), torch.empty(2)

    def call(workspace: Tensor | None, **other: Tensor) -> Tensor:
        buffers = {"out": out, "const_buf": const, **other}
        return fused_moe_aux_loss_out(probs, counts, 300, 16, 2, 0.1, workspace=workspace, **buffers)

    want = fused_moe_aux_loss(probs, counts, 300, 16, 2, 0.1)
    assert same(call(torch.full(spec.shape, torch.nan)), want) and same(const[1], want)
    assert const[0].item() == aux_loss.coefficient(16, 0.1, 2, 300)
    for workspace, error, message in [
        (None, ValueError, "missing"),
        (torch.empty(256, dtype=torch.float64), TypeError, "wrong dtype"),
        (torch.empty(255), ValueError, "too small, 255"),
        (torch.empty(256, device="meta"), ValueError, "wrong device meta"),
        (torch.empty(512)[::2], ValueError, "not contiguous"),
    ]:
        with pytest.raises(error, match=message):
            call(workspace)
    with pytest.raises(ValueError, match="out is"):
        call(torch.empty(256), out=torch.empty(1))
    with pytest.raises(ValueError, match="const_buf is"):
        call(torch.empty(256), const_buf=torch.empty(1))
    with pytest.raises(ValueError, match="const_buf is not contiguous"):  # a kernel writes two neighbours
        call(torch.empty(256), const_buf=torch.empty(4)[::2])


def test_errors_name_both_sides() -> None:
    probs, counts = probabilities(4, 8), token_counts(8, torch.int64)
    arguments = {"total_num_tokens": 4, "num_experts": 8, "topk": 2, "coeff": 0.1}

    def call(p: Tensor = probs, n: Tensor = counts, **more: object) -> Tensor:
        return fused_moe_aux_loss(p, n, **{**arguments, **more})  # type: ignore[arg-type]

    for error, message, keyword in [
        (TypeError, "fp32, fp16 or bf16", {"p": probs.double()}),
        (ValueError, "no multiple of num_experts = 3", {"num_experts": 3}),
        (ValueError, r"tokens_per_expert is \[8\]", {"n": counts[:7]}),
        (ValueError, "float64", {"n": counts.double()}),
        (TypeError, "total_num_tokens is an int", {"total_num_tokens": 4.0}),
        (ValueError, "0-dim int64", {"total_num_tokens": torch.tensor([4])}),
        (ValueError, "0-dim int64", {"total_num_tokens": torch.tensor(4, dtype=torch.int32)}),
        (ValueError, "at least 1; got 8 and 0", {"topk": 0}),
        (ValueError, "padding_mask is bool", {"padding_mask": torch.zeros(4)}),
        (ValueError, "coeff is a finite number.* got inf", {"coeff": float("inf")}),
        (ValueError, "coeff is a finite number.* got nan", {"coeff": float("nan"), "reduction": "exact"}),
        (ValueError, "coeff .* 8 in fp32; got 3e", {"coeff": 3e38}),  # C would be infinite, and no integer ratio
        (ValueError, "coeff .* 8 in fp32; got -3e", {"coeff": -3e38, "reduction": "exact"}),
        (ValueError, "'blocked' or 'exact'", {"reduction": "fast"}),
        (TypeError, "integer counts", {"n": counts.float(), "reduction": "exact"}),
        (ValueError, "group needs reduction='exact'", {"group": object()}),
    ]:
        with pytest.raises(error, match=message):
            call(**keyword)  # type: ignore[arg-type]
