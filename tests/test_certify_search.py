"""A window's three parameters are found from what is read; and no window is found where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bicomm.certify.emulate import Emulated
from bicomm.certify.families import FAMILIES, power
from bicomm.certify.measure import measure
from bicomm.certify.search import EXPONENTS, fit_steps, fit_window, smallest_survivors, staircase
from bicomm.contract import Contract, exact, fp64, ordered, window

CPU = torch.device("cpu")


def staircase_of(g: int, s: int) -> list[int]:
    return [min(max(g * -(-e // g) - s, -149), e + 1) for e in EXPONENTS]


@pytest.mark.parametrize("world", [3, 8])
@pytest.mark.parametrize(
    "parameters", [(16, 95, 86), (24, 72, 65), (1, 24, 1), (5, 60, 33), (128, 90, 80), (100, 150, 149)]
)
def test_steps_and_depth_are_found(parameters: tuple[int, int, int], world: int) -> None:
    g, t, s = parameters
    survivors = smallest_survivors(window(staircase(world, CPU), g, t, s))
    assert survivors == staircase_of(g, s)
    steps = fit_steps(survivors)  # type: ignore[arg-type]
    assert (g, s) in steps
    batches = []
    for seed, name in enumerate(("ties", "depths", "cancel", "edges")):
        x = FAMILIES[name](torch.Generator().manual_seed(seed), world, 1 << 14)
        batches.append((x, window(x, g, t, s)))
    found = fit_window(steps, batches)
    for contract in found:  # where exponents end, several windows may be one function
        for x, read in batches:
            assert torch.equal(contract.sum(x), read)
    if g <= 24:
        assert found[0] == Contract("window", parameters)


@pytest.mark.parametrize("parameters", [(16, 200, 190), (7, 100, 60), (32, 40, 40), (3, 31, 8)])
def test_other_windows_are_certified_as_they_are(parameters: tuple[int, int, int]) -> None:
    result = measure(Emulated("w", 4, lambda x, rank, call, blocks, alignment: window(x, *parameters)), channels=2000)
    assert result.contract == Contract("window", parameters).id


@pytest.mark.parametrize(("parameters", "world"), [((2, 271, 231), 4), ((24, 261, 241), 4), ((4, 257, 177), 3)])
def test_a_depth_that_random_columns_hardly_show_is_found(parameters: tuple[int, int, int], world: int) -> None:
    reduction: Any = lambda x, rank, call, blocks, alignment: window(x, *parameters)  # noqa: E731
    result = measure(Emulated("w", world, reduction), channels=50)
    assert result.contract == Contract("window", parameters).id


def test_a_window_that_loses_nothing_is_exact() -> None:
    result = measure(Emulated("w", 4, lambda x, rank, call, blocks, alignment: window(x, 5, 512, 512)), channels=500)
    assert (result.verdict, result.contract, result.search) == ("exact", "exact/1", "no window: nothing is dropped")


def test_windows_that_are_one_function_get_one_of_its_names() -> None:
    """With g = 128 there are two anchors only, and no exponent tells a t of 300 from one of 280."""
    reduction: Any = lambda x, rank, call, blocks, alignment: window(x, 128, 300, 200)  # noqa: E731
    result = measure(Emulated("w", 3, reduction), channels=500)
    assert result.verdict == "window"
    named = Contract.parse(result.contract or "")
    for seed, make in enumerate(FAMILIES.values()):
        x = make(torch.Generator().manual_seed(seed), 3, 5000)
        assert torch.equal(named.sum(x).view(torch.int32), window(x, 128, 300, 200).view(torch.int32))


@pytest.mark.parametrize(
    ("reduction", "says"),
    [
        (exact, "nothing is dropped"),
        (ordered, "a smaller number survived where a larger one was dropped"),
        (fp64, "a smaller number survived where a larger one was dropped"),
        (lambda x: exact(x) * 2, "something other than the third addend or zero"),
        (lambda x: torch.zeros_like(x[0]), "254 exponents lose small sums, in no even steps"),
        (lambda x: torch.where(exact(x).abs() < 2.0**-50, 0.0, exact(x)), "in no even steps"),
    ],
    ids=["exact", "ordered", "fp64", "twice", "nothing", "a fixed threshold"],
)
def test_why_there_is_no_window(reduction: Any, says: str) -> None:
    result = measure(Emulated("n", 3, lambda x, rank, call, blocks, alignment: reduction(x)), channels=100)
    assert result.search.startswith("no window: ")
    assert says in result.search
    assert result.verdict != "window"


def test_a_window_needs_three_addends() -> None:
    with pytest.raises(ValueError, match="three addends"):
        staircase(2, CPU)
    assert fit_window([(16, 86)], []) == [Contract("window", (16, t, 86)) for t in range(86, 90)]  # nothing was read
    assert fit_steps([-149] * len(EXPONENTS)) == []


# ------------------------------------------------------------------------------------------------------- the inputs


def test_powers() -> None:
    e = torch.arange(-160, 128, dtype=torch.int32)
    want = torch.tensor([2.0 ** int(v) if v >= -149 else 0.0 for v in e], dtype=torch.float32)
    assert torch.equal(power(e), want)


@pytest.mark.parametrize("world", [2, 3, 8, 72])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, world: int) -> None:
    x, again, other = (FAMILIES[name](torch.Generator().manual_seed(seed), world, 3000) for seed in (1, 1, 2))
    assert (x.shape, x.dtype) == ((world, 3000), torch.float32)
    assert torch.equal(x.view(torch.int32), again.view(torch.int32))
    assert not torch.equal(x.view(torch.int32), other.view(torch.int32))
    assert bool(torch.isfinite(x).all()) == (name != "specials")
    used = (x != 0).any(1) | (name == "zeros")
    assert bool(used.all()) or world == 72  # every rank holds something
    assert FAMILIES[name](torch.Generator().manual_seed(0), world, 0).shape == (world, 0)


def test_each_family_separates_what_it_is_for() -> None:
    def differ(name: str, first: Any, second: Any) -> int:
        x = FAMILIES[name](torch.Generator().manual_seed(3), 8, 4000)
        return int((first(x).view(torch.int32) != second(x).view(torch.int32)).sum())

    def switch(x: torch.Tensor) -> torch.Tensor:
        return window(x, 16, 95, 86)

    assert differ("normal", ordered, exact) > 1000
    assert differ("normal", fp64, exact) == differ("normal", switch, exact) == 0
    assert differ("ties", fp64, exact) > 400
    for name in ("cancel", "depths", "split", "edges", "order", "overflow", "wide"):
        assert differ(name, ordered, exact) > 50, name
    assert differ("split", fp64, exact) > 50
    for name in ("ties", "cancel", "depths", "edges"):
        assert differ(name, fp64, exact) > 50, name
        assert differ(name, switch, exact) > 50, name
        assert differ(name, switch, fp64) > 50, name
    assert differ("order", ordered, lambda x: ordered(x.flip(0))) > 1000
