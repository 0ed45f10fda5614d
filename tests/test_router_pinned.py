"""exp, log and sums with pinned bits: near the true value, the same in kernels, and free of order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from bicomm.model_hooks import pinned
from bicomm.model_hooks import pinned_triton as pin
from router_cases import bits, same

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, in the interpreter, on NaN and infinity


def ulps(got: torch.Tensor, true: torch.Tensor) -> float:
    near = true.float().abs()
    ulp = (torch.nextafter(near, torch.tensor(torch.inf)) - near).double()
    return float(((got.double() - true).abs() / ulp).max())


def inputs(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(100_000, generator=generator)
    if kind == "negative":
        return torch.cat([torch.tensor([0.0, -0.0, -torch.inf, torch.nan, -104.0, -87.4, -1e-30]), -u * 104])
    if kind == "unit":
        return torch.cat([torch.tensor([0.0, 1.0, 1e-30, 2.0**-149, torch.nan]), u])
    if kind == "large":
        return torch.cat([torch.tensor([1.0, 1.0 + 2.0**-23, 2.0**20, torch.nan, torch.inf]), u * 1023 + 1])
    special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 2.0**-149])
    return torch.cat([special, (u - 0.5) * 200])


CASES: list[tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor], str, float]] = [
    (pinned.exp_neg, torch.exp, "negative", 1.5),
    (pinned.log1p_unit, torch.log1p, "unit", 3.0),
    (pinned.log_from_one, torch.log, "large", 3.0),
    (pinned.sigmoid, torch.sigmoid, "real", 3.0),
    (pinned.softplus, lambda x: torch.nn.functional.softplus(x, threshold=1e9), "real", 3.0),
    (pinned.sqrt_rn, torch.sqrt, "large", 0.5000001),
]


@triton.jit
def apply(x, out, n, WHICH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    if WHICH == 0:
        v = pin.exp_neg(v)
    elif WHICH == 1:
        v = pin.log1p_unit(v)
    elif WHICH == 2:
        v = pin.log_from_one(v)
    elif WHICH == 3:
        v = pin.sigmoid(v)
    elif WHICH == 4:
        v = pin.softplus(v)
    else:
        v = tl.sqrt_rn(v)
    tl.store(out + i, v, mask=i < n)


@pytest.mark.parametrize("which", range(len(CASES)), ids=[c[0].__name__ for c in CASES])
def test_functions_are_near_the_true_value_and_the_same_in_a_kernel(which: int) -> None:
    function, true, kind, bound = CASES[which]
    x = inputs(kind)
    got = function(x)
    finite = torch.isfinite(x) & torch.isfinite(got)
    assert ulps(got[finite], true(x[finite].double())) <= bound
    assert torch.equal(torch.isnan(got), torch.isnan(true(x.double())))
    if not torch.cuda.is_available():
        out = torch.empty_like(x)
        apply[(triton.cdiv(x.numel(), 8192),)](x, out, x.numel(), WHICH=which, BLOCK=8192, enable_fp_fusion=False)
        assert same(out, got)


def test_values_at_the_ends() -> None:
    assert pinned.exp_neg(torch.tensor([0.0, -torch.inf])).tolist() == [1.0, 0.0]
    assert pinned.sigmoid(torch.tensor([0.0, 18.0, -torch.inf, torch.inf])).tolist() == [0.5, 1.0, 0.0, 1.0]
    assert pinned.log_from_one(torch.tensor(1.0)).item() == 0.0


def test_torch_sqrt_would_not_be_a_definition() -> None:
    """The twin: what sqrt_rn is for. (If this fails, torch's CPU square root has become exact.)"""
    x = inputs("large")[5:]
    assert not same(torch.sqrt(x), pinned.sqrt_rn(x)) or torch.equal(torch.sqrt(x), x.double().sqrt().float())


@triton.jit
def sum_rows(x, out, n, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)[None, :]
    v = tl.load(x + row * n + i, mask=i < n, other=0.0)
    tl.store(out + row + tl.zeros([1, 1], tl.int32), pin.fixed_sum(v, 1))


@pytest.mark.parametrize("scale", [1.0, 2.0**-140, 2.0**120])
def test_fixed_sum_has_no_order_and_is_near_the_exact_sum(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 1000, generator=generator) * torch.exp2(torch.randint(-25, 1, (40, 1000)).float())
    x = x * scale
    x[0], x[1, 3], x[2, 5] = 0.0, torch.nan, torch.inf
    got = pinned.fixed_sum(x)
    naive = x.sum(-1)
    differ = False
    for seed in range(5):
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))
        assert same(pinned.fixed_sum(x[:, order]), got)
        differ |= not torch.equal(x[3:, order].sum(-1), naive[3:])
    assert differ or scale < 2.0**-126, "the data cannot tell one order from another"  # subnormals add exactly
    assert got[0] == 0.0 and torch.isnan(got[1]) and torch.isnan(got[2])
    exact = x[3:].double().sum(-1)
    bound = exact.abs() * 2.0**-24 + 1000 * 2.0**-40 * x[3:].double().abs().amax(-1) + 2.0**-149
    assert ((got[3:].double() - exact).abs() <= bound).all()
    if not torch.cuda.is_available():
        out = torch.empty(40)
        sum_rows[(40,)](x, out, 1000, BLOCK=1024, enable_fp_fusion=False)
        assert same(out, got)


def test_fixed_sum_of_nothing_and_of_ties_with_dust() -> None:
    assert pinned.fixed_sum(torch.empty(3, 0)).tolist() == [0.0] * 3
    assert bits(pinned.fixed_sum(torch.tensor([[-0.0, -0.0]])))[0] == 0
    assert pinned.fixed_sum(torch.tensor([[1.0, 2.0**-24, 2.0**-40]])).item() == 1.0 + 2.0**-23
