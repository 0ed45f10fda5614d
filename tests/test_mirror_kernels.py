"""The mirror's Triton kernels, in the interpreter, against the plain torch definition: bits, for every tree."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from bicomm.contract import Contract, Partial
from bicomm.mirror import definition, kernels
from families import FAMILIES
from mirror_cases import OWNERS, RULES, TREES, Case, bits, make_case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels on the GPU")


def by_kernel(case: Case, contract: Contract, out_dtype: torch.dtype) -> torch.Tensor:
    given = case.arguments(contract)
    if contract.rule == "owner":
        places, tags = case.row_of_slot, None
    else:
        places, tags = kernels.sort_slots(case.row_of_slot, given["rank_of_slot"], given["order_of_slot"], case.ep_size)
    return kernels.unpermute(
        case.rows, places, tags, given["probs"], contract, out_dtype, *places.shape, each=contract.rule == "owner"
    )


@pytest.mark.parametrize("tree", TREES, ids=lambda t: t.id)
def test_forward_kernel_gives_the_definitions_bits(tree: Partial) -> None:
    names = list(FAMILIES)
    first = TREES.index(tree)
    small = tree.accumulator == "exact"  # its second path is long: an exact sum in each pass over the slices
    for i in (first, first + 7):  # every family meets every rule over the trees
        contract = dataclasses.replace(RULES[(first + i) % len(RULES)], partial=tree)
        dtype = (torch.float32, torch.bfloat16)[i % 2]
        case = make_case(names[i % len(names)], i, 1 if small else 2, 4, 4, ep_size=3, experts=7, dtype=dtype)
        out_dtype = (torch.bfloat16, torch.float32)[i % 3 > 0]
        got, want = by_kernel(case, contract, out_dtype), case.mirror(contract, out_dtype)
        assert torch.equal(bits(got), bits(want)), (contract.id, names[i % len(names)])


@pytest.mark.parametrize("rule", [*RULES, Contract("window", (8, 30, 20)), *OWNERS], ids=str)
def test_rules_on_every_family(rule: Contract) -> None:
    # One block of all families goes slice by slice as a whole; of each family alone, some blocks do not.
    first = len(rule.id)  # other ones for other rules
    alone = [list(FAMILIES)[(first + 5 * i) % len(FAMILIES)] for i in range(4)]
    for i, family in enumerate(("all", "all", "normal", *alone)):
        tree = rule.partial if rule.rule == "owner" else (TREES[1], TREES[5], TREES[2])[i % 3]
        contract = dataclasses.replace(rule, partial=tree)
        dtype = (torch.float32, torch.bfloat16)[i % 2]
        hidden = 2 * len(FAMILIES) if family == "all" else 16
        case = make_case(family, i, 1, 6, hidden, ep_size=8, experts=12, dtype=dtype, drop=0.0)
        assert torch.equal(bits(by_kernel(case, contract, torch.float32)), bits(case.mirror(contract))), family


def test_bf16_rows_are_widened_without_a_conversion_to_the_same_bits() -> None:
    # The largest and smallest bf16, subnormals, NaN and infinities in one token; a wrong widening shows in each.
    values = torch.tensor([1.0, 2.0**-133, -(2.0**-126), 3.3895e38, -0.0, 1.5 * 2.0**-130, float("inf"), float("nan")])
    rows = torch.stack([values.roll(k) * (-1) ** k for k in range(6)]).bfloat16()
    maps = torch.arange(6).view(1, 6), torch.tensor([[0, 2, 0, 1, 2, 2]])
    places, tags = definition.sort_slots(*maps, None)
    for rule, accumulator in ((RULES[0], "fp64"), (RULES[1], "exact"), (RULES[2], "exact")):
        contract = dataclasses.replace(rule, partial=Partial("slot", accumulator))  # type: ignore[arg-type]
        got = kernels.unpermute(rows, places, tags, None, contract, torch.bfloat16, 1, 6, each=False)
        want = definition.rounded(definition.unpermute(rows, (places, tags), None, contract), torch.bfloat16)
        assert torch.equal(bits(got), bits(want)), contract


def test_overflow_of_partials_in_groups_of_every_size() -> None:
    # bf16 addends of a rank go through fp32 up to two of them; what overflows there and not in fp64 must not show.
    m, inf = 3.3895e38, float("inf")
    columns = [
        [m, m, -m, 1],
        [m, m, -m, -m],
        [m, -m, m, m],
        [-0.0] * 4,
        [-m, -m, -m, m],
        [inf, -inf, 1, 2],
        [m, m, 1, -m],
    ]
    rows = torch.tensor([*columns, [2.0**-133, -0.0, 2.0**-133, -(2.0**-126)]]).t().contiguous().bfloat16()
    for n, ranks in enumerate(([0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 2, 3])):
        places, tags = definition.sort_slots(torch.arange(4).view(1, 4), torch.tensor([ranks]), None)
        for accumulator, rule in (("fp64", RULES[n % 4]), ("exact", RULES[(n + 2) % 4])):
            contract = dataclasses.replace(rule, partial=Partial("slot", accumulator))  # type: ignore[arg-type]
            got = kernels.unpermute(rows, places, tags, None, contract, torch.float32, 1, 4, each=False)
            assert torch.equal(bits(got), bits(definition.unpermute(rows, (places, tags), None, contract))), contract


def test_sorting_kernel_gives_the_definitions_trees() -> None:
    generator = torch.Generator().manual_seed(0)
    for tokens, slots in ((0, 4), (5, 1), (7, 6), (33, 8)):
        rows = torch.randperm(tokens * slots, generator=generator).view(tokens, slots)
        rows[torch.rand(tokens, slots, generator=generator) < 0.2] = -1
        ranks = torch.randint(-1, 4, (tokens, slots), generator=generator, dtype=torch.int32)
        orders = torch.randint(0, 3, (tokens, slots), generator=generator)  # ties go by slot
        for rank, order in ((ranks, orders), (ranks, None), (None, orders), (None, None)):
            got, want = kernels.sort_slots(rows, rank, order, 4), definition.sort_slots(rows, rank, order)
            assert torch.equal(got[0], want[0])
            used = want[0] >= 0
            assert torch.equal(got[1][used], want[1][used])


def test_a_row_or_rank_that_does_not_exist_is_nan_and_nothing_is_read() -> None:
    rows = torch.ones(4, 5)
    for row, rank in ((4, 0), (2**31 + 7, 0), (1, 3)):
        maps = torch.tensor([[0, row], [1, 2]]), torch.tensor([[0, rank], [1, 1]])
        places, tags = kernels.sort_slots(*maps, None, 3)
        contract = Contract("ordered", partial=Partial("slot", "fp32"))
        out = kernels.unpermute(rows, places, tags, None, contract, torch.float32, 2, 2, each=False)
        assert out[0].isnan().all() and (out[1] == 2).all()


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_backward_kernels(each: bool, weighted: bool) -> None:
    for dtype, grad_dtype, hidden in ((torch.bfloat16, torch.float32, 12), (torch.float32, torch.bfloat16, 7)):
        case = make_case("normal", 3, 4, 3, hidden, ep_size=3, experts=9, dtype=dtype)
        grad = torch.randn(4, hidden).to(grad_dtype)
        grad[1] = float("nan")  # the padded token's
        places, tags = case.row_of_slot, None
        if not each:
            places, tags = definition.sort_slots(case.row_of_slot, case.rank_of_slot, case.order_of_slot)
        for need_rows, rows in ((True, case.rows), (False, case.rows), (True, None)) if weighted else ((True, None),):
            probs = case.probs if weighted else None
            given = (grad, places, tags, rows, probs, weighted and each, case.rows.shape[0], dtype, need_rows)
            got, want = kernels.backward(*given), definition.backward(*given)
            assert torch.equal(bits(got[0]), bits(want[0])) and not got[0].isnan().any()
            # The order of the dot product's sum is not the same, only its fp64 and its one rounding.
            torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1e-7)


def test_combine_kernel_sums_stacked_partials() -> None:
    from bicomm.mirror import combine

    for i, (rule, family) in enumerate(zip(RULES * 2, ["all"] * 4 + list(FAMILIES)[:4], strict=True)):
        case = make_case(family, i, 3, 5, 2 * len(FAMILIES), dtype=torch.float32, drop=0.0)
        partials = case.rows.nan_to_num(0.0)[:15].view(5, 3, -1)
        got = kernels.unpermute(partials.view(15, -1), None, None, None, rule, torch.float32, 3, 5, each=True)
        assert torch.equal(bits(got), bits(combine(partials, rule))), (rule, family)


COMPILE = """
from mirror_compile import compile_kernels
for name, capability, ptx, registers, stack in compile_kernels():
    print(name, capability, registers, stack)
    plain = "swiglu" in name or "exact-activation" in name  # these multiply by 0 and 1
    assert plain or "fma.rn.f64" not in ptx, name
    assert "mad.f" not in ptx and "mad.rn.f" not in ptx, name
    assert ("fma" in name or plain) == ("fma.rn.f32" in ptx), name
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx, name
    assert "atom" not in ptx and "red.global" not in ptx, name
    assert stack <= 128, (name, stack)  # the path that goes slice by slice
    assert registers <= (168 if "backward" in name else 128), (name, registers)  # all sums of a token in registers
"""


def test_kernels_compile_for_hopper_and_blackwell() -> None:
    here = os.path.dirname(__file__)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([os.path.dirname(here), here])}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
