"""Every contract against the rational oracle, bit for bit, on the families of inputs that break summation."""

from __future__ import annotations

import functools
import math
import operator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
from bicomm.contract import Contract
from families import FAMILIES

COUNTS = (1, 2, 3, 5, 8, 72, 128, 300)
WINDOWS = ((16, 95, 86), (16, 60, 50), (8, 40, 40), (1, 24, 1), (32, 120, 110), (128, 300, 200), (5, 512, 512))
CASES = 20_000  # sums checked by each of the tests below


def columns_of(x: np.ndarray) -> list[list[float]]:
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return x.T.astype(np.float64).tolist()  # a float64 holds every fp32 number


def bits(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int32).numpy().astype(np.int64) & 0xFFFFFFFF


def compare(contract: Contract, x: np.ndarray) -> int:
    """Check one batch of columns [N, C]; the number of sums checked."""
    before = x.copy()
    got = bits(contract.sum(torch.from_numpy(x)))
    assert np.array_equal(x.view(np.int32), before.view(np.int32)), "an addend was written"
    want = oracle.column_bits(contract.rule, columns_of(x), contract.parameters)
    for j in np.flatnonzero(got != np.array(want)):
        operands = ", ".join(f"{int(v):#010x}" for v in x[:, j].view(np.uint32))
        raise AssertionError(f"{contract}: got {got[j]:#010x}, want {want[j]:#010x} for [{operands}]")
    return len(want)


def columns_for(n: int) -> int:
    """Columns in one example: fewer where a column is long, so that each count of addends gets its time."""
    return max(6, min(100, 1600 // n))


def run(contracts: list[Contract], seed_start: int) -> int:
    """Let hypothesis draw family, count, contract and seed until CASES sums are checked; then sweep all pairs once."""
    checked, seeds = 0, st.integers(0, 2**32)

    @settings(max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(sorted(FAMILIES)), st.sampled_from(COUNTS), st.sampled_from(contracts), seeds)
    def check(family: str, n: int, contract: Contract, seed: int) -> None:
        nonlocal checked
        x = FAMILIES[family](np.random.default_rng(seed), n, columns_for(n))
        checked += compare(contract, np.ascontiguousarray(x))

    check()
    seed = seed_start
    while checked < CASES:
        for n in COUNTS:
            for make in FAMILIES.values():
                seed += 1
                x = make(np.random.default_rng(seed), n, columns_for(n))
                checked += compare(contracts[seed % len(contracts)], np.ascontiguousarray(x))
    return checked


@pytest.mark.parametrize("rule", ["ordered", "exact", "owner", "fp64"])
def test_rule(rule: str) -> None:
    assert run([Contract(rule)], 1000) >= CASES  # type: ignore[arg-type]


def test_window() -> None:
    assert run([Contract("window", p) for p in WINDOWS], 2000) >= CASES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ["ordered", "exact", "fp64"])
def test_half_addends_are_widened(rule: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    x = torch.from_numpy(FAMILIES["spread"](rng, 5, 200) * 2.0**-30).to(dtype)
    assert np.array_equal(bits(Contract(rule).sum(x)), bits(Contract(rule).sum(x.float())))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bf16_result_is_rounded_twice(family: str) -> None:
    x = FAMILIES[family](np.random.default_rng(11), 5, 300)
    got = Contract("exact").sum(torch.from_numpy(x), out_dtype=torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    want = [oracle.bf16_bits_of(oracle.exact(c)) for c in columns_of(x)]
    assert got.tolist() == want


def test_sums_of_the_smallest_number_round_to_bf16() -> None:
    x = torch.full((128, 4), 2.0**-149)
    x[:, 1] *= -1
    x[:65, 2] *= -1
    x[:64, 3] *= -1
    got = Contract("exact").sum(x, out_dtype=torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert got.tolist() == [oracle.bf16_bits_of(v) for v in (2.0**-142, -(2.0**-142), -(2.0**-148), 0.0)]
    assert got.tolist() == [0, 0x8000, 0x8000, 0]
    big = Contract("exact").sum(torch.full((128, 1), 2.0**-139), out_dtype=torch.bfloat16)
    assert big.item() == 2.0**-132


# ------------------------------------------------------------------------------------ twins: naive ways do break


def fp32_chain(columns: list[list[float]]) -> list[int]:
    out = []
    for column in columns:
        acc = np.float32(0)
        for v in column:
            acc = np.float32(acc + np.float32(v))
        out.append(oracle.bits_of(float(acc)))
    return out


def fp64_chain(columns: list[list[float]]) -> list[int]:
    return [oracle.bits_of(oracle.convert(chain(column), "fp32") + 0.0) for column in columns]


def chain(column: list[float]) -> float:
    """Not sum(), which carries the errors along from Python 3.12 on."""
    return functools.reduce(operator.add, column, 0.0)


def fsum(columns: list[list[float]]) -> list[int]:
    return [oracle.bits_of(float(np.float32(math.fsum(column))) + 0.0) for column in columns]


NAIVE = {"fp32 chain": fp32_chain, "fp64 chain": fp64_chain, "fsum": fsum}
BREAKS = {
    "normal": ("fp32 chain",),
    "spread": ("fp32 chain",),
    "tie_dust": ("fp32 chain", "fp64 chain", "fsum"),
    "cancellation": ("fp32 chain", "fp64 chain"),
    "split_cancellation": ("fp32 chain", "fp64 chain"),
    "bin_edges": ("fp32 chain", "fp64 chain"),
    "permutations": ("fp32 chain",),
    "overflow": ("fp32 chain", "fp64 chain", "fsum"),
}


@pytest.mark.parametrize(("family", "way"), [(f, w) for f, ways in BREAKS.items() for w in ways])
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_a_naive_sum_breaks(family: str, way: str) -> None:
    x = FAMILIES[family](np.random.default_rng(3), 8, 400)
    columns = columns_of(x)
    wrong = sum(a != b for a, b in zip(NAIVE[way](columns), oracle.column_bits("exact", columns), strict=True))
    assert wrong > 0, f"{way} is right on all of {family}: the family tests nothing"


def test_a_window_is_not_exact_where_it_says_so() -> None:
    x = FAMILIES["cancellation"](np.random.default_rng(3), 8, 400)
    columns = columns_of(x)
    exact = oracle.column_bits("exact", columns)
    assert oracle.column_bits("window", columns, (16, 95, 86)) != exact
    normal = columns_of(FAMILIES["normal"](np.random.default_rng(3), 8, 400))
    assert oracle.column_bits("window", normal, (16, 95, 86)) == oracle.column_bits("exact", normal)


def test_a_slice_without_carries_would_be_wrong() -> None:
    """[-128, 64, 64, 2**-33, 2**-60]; and 256 addends at a slice's top need one more slice above it."""
    column = [-128.0, 64.0, 64.0, 2.0**-33, 2.0**-60]
    many = [2.0**100] * 256 + [2.0**84, 2.0**54]
    for values in (column, many, many[::-1], [-v for v in many]):
        got = bits(Contract("exact").sum(torch.tensor(values).view(-1, 1)))
        assert got.tolist() == [oracle.bits_of(oracle.exact(values))]
    h = chain(many)  # what 53 bits make of it: the dust is gone, and the tie goes the other way
    assert oracle.bits_of(oracle.convert(h, "fp32")) != oracle.bits_of(oracle.exact(many))


# ------------------------------------------------------------------------------------- the oracle against hardware


def test_the_oracle_rounds_as_the_processor_does() -> None:
    rng = np.random.default_rng(8)
    a, b = (np.concatenate([FAMILIES[f](rng, 1, 200)[0] for f in FAMILIES]) for _ in range(2))
    with np.errstate(all="ignore"):
        sums, products = a + b, a * b
    for x, y, s, p in zip(a.tolist(), b.tolist(), sums, products, strict=True):
        assert oracle.bits_of(oracle.add(x, y)) == oracle.bits_of(float(s))
        assert oracle.bits_of(oracle.multiply(x, y)) == oracle.bits_of(float(p))
    wide = torch.from_numpy(np.ldexp(rng.standard_normal(500), rng.integers(-160, 130, 500)))
    for value, want in zip(wide.tolist(), wide.float().tolist(), strict=True):
        assert oracle.convert(value, "fp32") == want
    half = wide.float().to(torch.bfloat16).float()
    for value, want in zip(wide.float().tolist(), half.tolist(), strict=True):
        assert oracle.convert(value, "bf16") == want


def test_the_oracle_fuses() -> None:
    w, x, c = 1 + 2.0**-23, 1 + 2.0**-23, -(1 + 2.0**-22)
    assert oracle.fused_multiply_add(w, x, c) == 2.0**-46
    assert oracle.add(oracle.multiply(w, x), c) == 0.0
    fused = {"accumulator": "fp32", "probability": "combine", "product": "fma"}
    assert oracle.partial([c, x], weights=[1.0, w], **fused) == 2.0**-46
    assert oracle.partial([c, x], weights=[1.0, w], accumulator="fp32", probability="combine") == 0.0


def test_the_oracle_knows_the_trees_within_a_rank() -> None:
    rows = [2.0**60, 1.0, -(2.0**60), 2.0**-60]
    assert oracle.partial(rows) == 1.0
    assert oracle.partial(rows, accumulator="fp32") == 2.0**-60
    assert oracle.partial(rows, accumulator="fp64") == 2.0**-60
    assert oracle.partial([1.0, 2.0**-8, 2.0**-8], accumulator="bf16") == 1.0
    assert oracle.partial([2.0**-8, 2.0**-8, 1.0], accumulator="bf16") == 1.0078125
    experts = [3, 0, -1, 2]
    assert oracle.partial(rows, experts=experts, order="expert", accumulator="fp32") == 2.0**60
    assert oracle.partial([math.nan, 1.0], experts=[-1, 0]) == 1.0  # a slot that is not routed is skipped
    weighted = {"probability": "combine", "weights": [0.0, 1.0]}
    assert math.isnan(oracle.partial([math.inf, 1.0], **weighted))  # a weight of 0 is not
    assert oracle.owner([3.0, 5.0], [1 / 3, 1.0], "bf16") == oracle.owner([1.0, 5.0])
    assert oracle.owner([1 + 2.0**-23], [1 + 2.0**-23]) == 1 + 2.0**-22
