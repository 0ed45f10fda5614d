"""The Triton kernels of the auxiliary loss in the interpreter: the definition's bits and integers."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from bicomm.model_hooks import aux_loss, aux_loss_kernel, aux_loss_order, exact_loss, exact_loss_kernel
from router_cases import probabilities, same, token_counts

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU these run for real: tests/gpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
# rows, cols, dtype of probs, dtype of counts, blocks (fewer than 256, so that a block has several steps)
CASES = [
    (37, 128, torch.float32, torch.int64, 4),
    (29, 96, torch.float32, torch.float32, 3),
    (3, 7, torch.float32, torch.int64, 256),
    (13, 1025, torch.float32, torch.int32, 2),
    (20, 64, torch.bfloat16, torch.int16, 256),
    (20, 33, torch.float16, torch.bfloat16, 5),
    (1, 1, torch.float32, torch.int64, 256),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocked_kernels_have_the_bits_of_the_definition(
    case: tuple[int, int, torch.dtype, torch.dtype, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, cols, dtype, count_dtype, blocks = case
    monkeypatch.setattr(aux_loss_order, "BLOCKS", blocks)
    monkeypatch.setattr(aux_loss_order, "TILE", 512 if cols < 512 else 1024)
    probs, counts = probabilities(rows, cols, dtype), token_counts(cols, count_dtype)
    mask = torch.arange(rows) % 4 == 1
    start = aux_loss.coefficient(cols, 1e-9, 4, 1)
    for padding in (None, mask):
        if padding is not None:
            probs = probs.clone()
            probs[padding] = torch.nan
        for total in (rows, torch.tensor(rows)):
            c: float | Tensor = aux_loss.coefficient(cols, 1e-9, 4, rows) if isinstance(total, int) else total
            want = aux_loss.definition(probs, counts, aux_loss.coefficient(cols, 1e-9, 4, rows), padding)
            loss, const = aux_loss_kernel.forward(probs, counts, c, start, padding)
            assert same(loss, want.to(dtype)) and same(const[1], want)
            assert const[0].item() == aux_loss.coefficient(cols, 1e-9, 4, rows)
        out, given = torch.empty((), dtype=dtype), torch.empty(2)
        aux_loss_kernel.forward_out(probs, counts, c, start, padding, out, given, torch.full((256,), torch.nan))
        assert same(out, loss) and same(given, const)
        grad = torch.tensor(1.7, dtype=dtype)
        got = aux_loss_kernel.backward(const, counts, grad, rows, dtype, padding)
        assert same(got, aux_loss.gradient(counts, const[0], grad, rows, dtype, padding))
        sliced = torch.cat([probs[:, :1], probs], 1)[:, 1:]
        assert same(aux_loss_kernel.forward(sliced, counts, c, start, padding)[0], loss)


def test_a_ticket_is_back_at_zero_after_each_call() -> None:
    probs, counts = probabilities(9, 8), token_counts(8, torch.int64)
    partials, ticket = torch.full((256,), torch.nan), torch.zeros(1, dtype=torch.int32)
    losses = []
    for _ in range(3):
        loss, const = torch.empty(()), torch.empty(2)
        aux_loss_kernel._launch(probs, counts, 0.5, 1.0, None, loss, const, partials, ticket)
        losses.append(loss)
        assert ticket.item() == 0
    assert same(losses[0], losses[1]) and same(losses[0], losses[2])
    assert same(losses[0], aux_loss.definition(probs, counts, 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_kernels_have_the_integers_and_the_bits_of_the_definition(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(6):
        rows, cols = (17, 5) if trial < 5 else (20, 130)
        x = torch.randn(rows, cols, generator=generator)
        x = (x * torch.exp2(torch.randint(-140, 120, x.shape, generator=generator).float())).to(dtype)
        x[:3, 0] = torch.tensor([2.0**60, 1.0, -(2.0**60)])
        x[3] = -x[4]
        if trial == 1:
            x = x * 2.0**-100 * 2.0**-40
        if trial == 2:
            x[7, 3] = -torch.inf
        mask = (torch.arange(rows) % 5 == 2) if trial % 2 else None
        sums = exact_loss.definition(x, mask)
        assert torch.equal(exact_loss_kernel.column_sums(x, mask), sums)
        counts = torch.randint(-(2**40) if trial == 3 else 0, 2**62, (cols,), generator=generator)
        c = float(torch.tensor(3e-7 * 10.0 ** (10 * trial - 40)))
        want = torch.tensor(exact_loss.finish_definition(sums, counts, c))
        for given in (c, torch.tensor(c)):
            assert same(exact_loss_kernel.finish(sums, counts, given) + 0.0, want + 0.0)
        if trial != 2:
            kept = x if mask is None else x[~mask]
            pairs = [pair for row in kept.tolist() for pair in zip(row, counts.tolist(), strict=True)]
            total = sum((Fraction(v) * n for v, n in pairs), Fraction(0))
            nearest = total * Fraction(c)
            value = want.item()
            if abs(value) < 3e38:
                error = abs(Fraction(value) - nearest)
                for direction in (torch.inf, -torch.inf):
                    other = torch.nextafter(want, torch.tensor(direction)).item()
                    assert abs(other) > 3.4e38 or error <= abs(Fraction(other) - nearest)
