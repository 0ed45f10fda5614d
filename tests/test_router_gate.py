"""The gate on a CPU: by value, rows that do not see the batch, 3-D as 2-D, and gradients."""

from __future__ import annotations

import pytest
import torch

from bicomm.model_hooks import gate_kernel, router
from bicomm.model_hooks.gate import gate
from router_cases import same

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def operands(rows: int, hidden: int, experts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(hidden)
    x = torch.randn(rows, hidden, generator=generator).to(dtype)
    return x, torch.randn(experts, hidden, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_see_the_batch_and_3d_is_2d(dtype: torch.dtype) -> None:
    for hidden, experts in ((512, 64), (130, 17), (64, 1)):
        x, w = operands(260, hidden, experts, dtype)
        want = gate(x, w)
        assert want.dtype == torch.float32
        bound = 1e-5 * (x.double().abs() @ w.double().abs().t())
        assert ((want - x.double() @ w.double().t()).abs() <= bound).all()
        for rows in (1, 2, 3, 7, 15, 16, 17, 33, 63, 64, 65, 129, 257):
            assert same(gate(x[:rows], w), want[:rows])
            assert same(gate(x[-rows:], w), want[-rows:])
        assert same(gate(x.view(20, 13, hidden), w).view(260, experts), want)
        assert same(gate(x.view(13, 20, hidden).transpose(0, 1), w).transpose(0, 1).reshape(260, experts), want)


def test_neither_layout_nor_threads_nor_autocast_change_a_bit() -> None:
    def forward_and_backward(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        out = gate(x, w)
        return [out, *torch.autograd.grad(out, (x, w), g)]

    def transposed(t: torch.Tensor) -> torch.Tensor:
        return t.t().contiguous().t()

    def strided(t: torch.Tensor) -> torch.Tensor:
        return torch.stack([t, t], -1)[..., 0]

    threads = torch.get_num_threads()
    for hidden, experts in ((1, 3), (64, 1), (129, 1), (1023, 16), (4099, 3), (1023, 256)):
        x, w = operands(130, hidden, experts, torch.float32)
        g = torch.randn(130, experts, generator=torch.Generator().manual_seed(1))
        want = forward_and_backward(x, w, g)
        for change in (transposed, strided):
            got = forward_and_backward(change(x), change(w), change(g))
            assert all(same(a, b) for a, b in zip(got, want, strict=True)), (hidden, experts, change)
        try:
            for n in (2, 3, 8):
                torch.set_num_threads(n)
                got = forward_and_backward(x, w, g)
                assert torch.get_num_threads() == n
                assert all(same(a, b) for a, b in zip(got, want, strict=True)), (hidden, experts, n)
        finally:
            torch.set_num_threads(threads)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = forward_and_backward(x, w, g)
            twin = x @ w.t()
        assert all(same(a, b) for a, b in zip(got, want, strict=True)), (hidden, experts)
        assert twin.dtype == torch.bfloat16, "the twin: a product under autocast"


def test_a_plain_fp32_product_does_see_the_batch() -> None:
    """The twin, on the CPU kernels of torch 2.13: one to three rows take another path."""
    x, w = operands(260, 512, 64, torch.float32)
    want = x @ w.t()
    assert any(not same(x[:rows] @ w.t(), want[:rows]) for rows in (1, 2, 3, 7, 65))


def test_gradients() -> None:
    x, w = operands(150, 96, 24, torch.bfloat16)
    x, w = x.view(3, 50, 96).requires_grad_(), w.requires_grad_()
    g = torch.randn(3, 50, 24, generator=torch.Generator().manual_seed(0))
    dx, dw = torch.autograd.grad(gate(x, w), (x, w), g)
    assert dx.dtype == dw.dtype == torch.bfloat16
    torch.testing.assert_close(dx.double(), g.double() @ w.double(), rtol=2.0**-7, atol=1e-2)
    flat = g.double().flatten(0, 1)
    torch.testing.assert_close(dw.double(), flat.t() @ x.double().flatten(0, 1), rtol=2.0**-7, atol=1e-2)
    again = torch.autograd.grad(gate(x, w), (x, w), g)
    assert same(again[0], dx) and same(again[1], dw)
    part = x.detach()[:1, :7].clone().requires_grad_()
    assert same(torch.autograd.grad(gate(part, w), part, g[:1, :7])[0], dx[:1, :7])


def test_mixed_dtypes_no_rows_and_errors() -> None:
    x, w = operands(5, 32, 8, torch.bfloat16)
    assert same(gate(x, w.float()), gate(x.float(), w.float()))
    assert gate(x[:0], w).shape == (0, 8)
    with pytest.raises(TypeError, match="bf16, fp16 or fp32"):
        gate(x.double(), w)
    with pytest.raises(ValueError, match=r"x \[..., K\] and weight \[E, K\]"):
        gate(x, w[:, :31])


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it runs for real: tests/gpu")
@pytest.mark.parametrize("hidden", [192, 130])
def test_the_kernel_in_the_interpreter(hidden: int) -> None:
    x, w = operands(70, hidden, 20, torch.float32)
    got = gate_kernel.product(x, w.t())
    assert ((got - x.double() @ w.double().t()).abs() <= 1e-5 * (x.double().abs() @ w.double().abs().t())).all()
    for rows in (1, 64, 65):
        assert same(gate_kernel.product(x[:rows], w.t()), got[:rows])
    assert gate_kernel.tile(4096, 128, torch.bfloat16) == gate_kernel.tile(4096, 128, torch.bfloat16)


def test_near_ties_are_told_apart_because_logits_stay_fp32() -> None:
    x = torch.tensor([[1.0, 2.0**-8]], dtype=torch.bfloat16)
    w = torch.tensor([[1.0, 0.0], [1.0, 2.0**-4], [1.0, 2.0**-5]], dtype=torch.bfloat16)
    logits = gate(x, w)
    assert logits.tolist() == [[1.0, 1.0 + 2.0**-12, 1.0 + 2.0**-13]]
    assert router.route(logits, 3).ids.tolist() == [[1, 2, 0]]
    rounded = router.route(logits.to(torch.bfloat16), 3).ids.tolist()
    assert rounded == [[0, 1, 2]], "the twin: logits stored in bf16 tie"
