"""Contract objects, their text forms, presets, errors; and what the functions do with odd tensors."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import pickle

import numpy as np
import pytest
import torch

from bicomm import contract as module
from bicomm.contract import EXACT, FP64, GB200_WINDOW, ORDERED, OWNER, RULES, Contract, Partial
from bicomm.presets import PARTIALS, PRESETS, name_of_partial, partial_named

RULE_OBJECTS = [ORDERED, EXACT, OWNER, FP64, GB200_WINDOW]


def bits(x: torch.Tensor) -> list[int]:
    if x.dtype == torch.bfloat16:
        return (x.contiguous().view(torch.int16).int() & 0xFFFF).flatten().tolist()
    return (x.contiguous().view(torch.int32).long() & 0xFFFFFFFF).flatten().tolist()


def all_partials() -> list[Partial]:
    trees = []
    for values in itertools.product(*module._PARTIAL_VALUES.values()):
        try:
            trees.append(Partial(*values))  # type: ignore[arg-type]
        except ValueError:
            continue
    return trees


# -------------------------------------------------------------------------------------------------- names and text


def test_ids_are_the_documented_ones() -> None:
    assert [c.id for c in RULE_OBJECTS] == ["ordered/1", "exact/1", "owner/1", "fp64/1", "window(16,95,86)/1"]
    assert PRESETS["megatron-vllm-swiglu"].id == "ordered/1+megatron-vllm-swiglu/1"
    assert Contract("exact", partial=Partial("expert", "bf16")).id == "exact/1+expert-bf16-activation/1"
    assert Partial("slot", "fp32", "combine", "fma").id == "slot-fp32-combine-fma-fp32/1"
    assert str(EXACT) == EXACT.id


def test_every_contract_survives_its_id_and_its_json() -> None:
    rules = [*RULE_OBJECTS, Contract("window", (1, 1, 1)), Contract("window", (128, 512, 512))]
    for rule, partial in itertools.product(rules, [None, *all_partials()]):
        contract = dataclasses.replace(rule, partial=partial)
        copied = pickle.loads(pickle.dumps(contract))
        for again in (Contract.parse(contract.id), Contract.from_json(contract.json()), copied):
            assert again == contract
            assert hash(again) == hash(contract)
            assert (again.id, again.json()) == (contract.id, contract.json())
    assert len({c.id for c in rules}) == len(rules)


def test_different_trees_have_different_ids() -> None:
    trees = all_partials()
    assert len(trees) == 8 + 2 * (4 * 2 * 2 + 2)  # at the activation; in the combine, and fused with two weight types
    assert len({t.id for t in trees}) == len({name_of_partial(t) for t in trees}) == len(trees)
    for tree in trees:
        assert partial_named(tree.id) == partial_named(name_of_partial(tree)) == tree


def test_presets() -> None:
    for name, contract in PRESETS.items():
        assert Contract.parse(name) == contract
        assert Contract.parse(contract.id) == contract
        assert contract.partial == PARTIALS.get(name.removesuffix("-fp64"))  # owner has none
        assert contract.cross_rank == Contract(contract.rule)
        bare = contract.cross_rank
        assert bare.cross_rank is bare
    for name, partial in PARTIALS.items():
        assert partial_named(name) == partial_named(f"{name}/1") == partial
        assert name not in RULES


def test_short_names_are_read() -> None:
    assert Contract.parse("exact") == Contract.parse(" exact/1 ") == EXACT
    assert Contract.parse("window(16, 95, 86)") == GB200_WINDOW
    assert Contract.parse("fp64+slot-fp64-activation") == Contract("fp64", partial=Partial("slot", "fp64"))


@pytest.mark.parametrize(
    "text",
    ["window(" + "1" * 5000 + ",95,86)", "", "multimem", "Exact", "exact/2", "window(16 95, 86)",
     "window(1e1,95,86)", "exact/1/1", "exact()", "exact(1)", "window", "window()", "window(16,95)",
     "window(16,95,86,1)", "window(16,,86)", "window(16,95,86", "window(0,95,86)", "window(16,86,95)",
     "window(16,513,86)", "window(-1,95,86)", "exact/1+", "exact/1+nobody/1", "exact/1+slot-fp16-activation/1",
     "exact/1+slot-fp64-combine-fma-fp32/1", "exact/1+slot-fp64-activation-bf16-fp32/1", "exact\nordered",
     "megatron-vllm-swiglu/1", "window(١٦,95,86)"],
)  # fmt: skip
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"unknown (contract|tree)|takes no parameters|window|Partial|product"
    ) as caught:
        Contract.parse(text)
    assert len(str(caught.value)) < 500


def test_what_is_no_text_is_told_so() -> None:
    for wrong in (None, EXACT, ["exact"], 3, b"exact"):
        with pytest.raises(TypeError, match=f"id is a string, got {type(wrong).__name__}"):
            Contract.parse(wrong)  # type: ignore[arg-type]
    for wrong in (None, EXACT, json.loads(EXACT.json())):
        with pytest.raises(TypeError, match=rf"Contract.json\(\) gave, got {type(wrong).__name__}"):
            Contract.from_json(wrong)  # type: ignore[arg-type]
    for wrong in (16, None):
        with pytest.raises(TypeError, match=f"a tuple of integers, got {wrong}"):
            Contract("window", wrong)  # type: ignore[arg-type]
    assert Contract.parse("  owner\n") == Contract.parse(" owner/1 ") == OWNER
    assert Contract.parse(" megatron-deepgemm ") == PRESETS["megatron-deepgemm"]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'exakt': expected one of ordered, exact, .* an id, or a preset"):
        Contract.parse("exakt")
    with pytest.raises(ValueError, match=r"unknown tree within a rank 'nobody'.*megatron-deepgemm"):
        Contract.parse("exact+nobody")


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("", "JSON object"), ("exact", "JSON object"), ("[]", "version 1"), ("null", "version 1"), ("{}", "version 1"),
        ('{"rule": "exact"}', "version 1"), ('{"rule": "exact", "version": 2}', "version 1"),
        ('{"rule": "exact", "version": "1"}', "version 1"), ('{"rule": "exact", "version": true}', "version 1"),
        ('{"rule": "exact", "version": 1.0}', "version 1"),
        ('{"rule": "exact", "rule": "ordered", "version": 1}', "said more than once: rule"),
        ('{"rule": "exact", "version": ' + "1" * 5000 + "}", "JSON object"),
        ('{"rule": "exact", "version": 1, "partial": {}}', "does not say: accumulator, order, probability"),
        ('{"rule": "exact", "version": 1, "partial": {"order": "slot", "accumulator": "fp64"}}', "say: probability"),
        ('{"version": 1}', "unknown rule ''"), ('{"rule": "sum", "version": 1}', "unknown rule 'sum'"),
        ('{"rule": ["exact"], "version": 1}', "unknown rule"), ('{"rule": null, "version": 1}', "unknown rule None"),
        ('{"rule": "exact", "version": 1, "note": "x"}', "unknown keys in a contract: note"),
        ('{"rule": "exact", "version": 1, "parameters": [1]}', "takes no parameters"),
        ('{"rule": "exact", "version": 1, "parameters": "123"}', "is a list"),
        ('{"rule": "window", "version": 1}', "three integers"),
        ('{"rule": "window", "version": 1, "parameters": [16, 95]}', "three integers"),
        ('{"rule": "window", "version": 1, "parameters": [16.0, 95, 86]}', "three integers"),
        ('{"rule": "window", "version": 1, "parameters": [true, 95, 86]}', "three integers"),
        ('{"rule": "window", "version": 1, "parameters": ["16", "95", "86"]}', "three integers"),
        ('{"rule": "window", "version": 1, "parameters": [16, 86, 95]}', "1 <= s <= t"),
        ('{"rule": "exact", "version": 1, "partial": "slot"}', "an object"),
        ('{"rule": "exact", "version": 1, "partial": {"tree": "slot"}}', "unknown keys in 'partial': tree"),
        ('{"rule": "exact", "version": 1, "partial": {"order": "rank"}}', "Partial.order is one of slot, expert"),
        ('{"rule": "exact", "version": 1, "partial": {"order": "slot", "order": "expert"}}', "more than once: order"),
        ('{"rule": "exact", "version": 1, "partial": {"order": ["slot"]}}', "Partial.order"),
        ("[" * 200_000, "JSON object"),
    ],
)  # fmt: skip
def test_json_is_read_strictly(record: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Contract.from_json(record)


def test_json_is_one_line_with_sorted_keys() -> None:
    text = Contract("window", (16, 95, 86), Partial()).json()
    assert "\n" not in text
    assert list(json.loads(text)) == sorted(json.loads(text))
    assert EXACT.json() == '{"rule": "exact", "version": 1}'


# ------------------------------------------------------------------------------------------------------- the object


def test_contracts_are_values() -> None:
    assert Contract("window", [16, 95, 86]) == GB200_WINDOW  # type: ignore[arg-type]
    assert len({Contract("exact"), EXACT, copy.deepcopy(EXACT), Contract("exact", [])}) == 1  # type: ignore[arg-type]
    assert Contract("exact") != Contract("owner")
    assert Contract("exact", partial=Partial()) != EXACT
    with pytest.raises(dataclasses.FrozenInstanceError):
        EXACT.rule = "fp64"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Partial().order = "expert"  # type: ignore[misc]


def test_impossible_contracts_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown rule 'multimem'"):
        Contract("multimem")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a Partial or None, got 'slot'"):
        Contract("exact", partial="slot")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Partial.accumulator is one of exact, fp64, fp32, bf16; got 'fp16'"):
        Partial(accumulator="fp16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="set probability='combine'"):
        Partial(product="bf16")
    with pytest.raises(ValueError, match="needs accumulator='fp32'"):
        Partial(accumulator="fp64", probability="combine", product="fma")


# ------------------------------------------------------------------------------------------------------ odd tensors


@pytest.mark.parametrize("contract", RULE_OBJECTS, ids=str)
def test_shapes(contract: Contract) -> None:
    for shape in [(), (0,), (1,), (3, 0, 4), (0, 7), (2, 3, 5, 7), (16385,)]:
        x = torch.randn(3, *shape)
        assert contract.sum(x).shape == shape
        assert bits(contract.sum(x)) == bits(contract.sum(list(x))) == bits(contract.sum(tuple(x.unbind(0))))
    assert bits(contract.sum([torch.tensor(-0.0)])) == [0]
    assert bits(contract.sum(torch.ones(5000, 2))) == bits(torch.full((2,), 5000.0))


@pytest.mark.parametrize("contract", RULE_OBJECTS, ids=str)
def test_layout_does_not_matter_and_addends_are_not_written(contract: Contract) -> None:
    base = torch.randn(5, 40, 33)
    base[:, 3] = torch.tensor([float("inf"), float("nan"), -0.0, 2.0**-149, 3e38])[:, None]
    want = bits(contract.sum(base))
    store = torch.empty(5, 33, 45).transpose(1, 2)[:, 5:]
    store.copy_(base)
    padded = torch.full((5, 40, 37), float("nan"))[:, :, 2:35]
    padded.copy_(base)
    for x in (store, padded, [r.t().contiguous().t() for r in base], base.clone(memory_format=torch.contiguous_format)):
        before = [bits(row) for row in x]
        assert bits(contract.sum(x)) == want
        assert [bits(row) for row in x] == before
    expanded = base[:, :1, :1].expand(5, 40, 33)
    assert len(set(bits(contract.sum(expanded)))) == 1
    row = base[0]
    assert bits(contract.sum([row, row, row])) == bits(contract.sum(torch.stack([row, row, row])))


@pytest.mark.parametrize("contract", RULE_OBJECTS, ids=str)
def test_columns_are_independent_of_their_neighbours(contract: Contract) -> None:
    """Where a column lies, and what lies beside it (NaN, infinities, wider exponents), changes nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 20_000, generator=generator)
    want = contract.sum(x)
    wild = torch.ldexp(torch.randn(8, 20_000, generator=generator), torch.randint(-140, 127, (8, 20_000)).float())
    wild[2, ::7] = float("nan")
    wild[3, ::5] = float("inf")
    mixed = torch.stack([x, wild], dim=2).flatten(1)
    assert bits(contract.sum(mixed)[::2]) == bits(want)
    assert bits(contract.sum(x[:, 11:12])) == bits(want[11:12])
    assert bits(contract.sum(x[:, 16000:17000])) == bits(want[16000:17000])


@pytest.mark.parametrize("contract", RULE_OBJECTS, ids=str)
def test_nan_is_canonical_and_zero_is_positive(contract: Contract) -> None:
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    ones = torch.ones(4)
    for rows in ([ones, payloads], [payloads, ones], [payloads], [payloads, payloads, ones * float("inf")]):
        assert bits(contract.sum(rows)) == [0x7FC00000] * 4
        assert bits(contract.sum(rows, out_dtype=torch.bfloat16)) == [0x7FC0] * 4
        out = torch.empty(4, dtype=torch.bfloat16)
        assert contract.sum(rows, out=out) is out
        assert bits(out) == [0x7FC0] * 4
    inf = float("inf")
    assert bits(contract.sum(torch.tensor([[inf], [-inf], [1.0]]))) == [0x7FC00000]
    assert bits(contract.sum(torch.tensor([[inf], [3e38], [1.0]]))) == [0x7F800000]
    assert bits(contract.sum(torch.tensor([[-1.0], [3e38], [-inf]]))) == [0xFF800000]
    for rows in (torch.full((4, 3), -0.0), torch.tensor([[1.0], [-1.0]]), torch.tensor([[-1.0], [1.0]])):
        assert set(bits(contract.sum(rows))) == {0}


def test_overflow_on_the_way() -> None:
    x = torch.tensor([[3e38, 3e38], [3e38, 3e38], [-3e38, float("-inf")]])
    assert bits(EXACT.sum(x)) == bits(OWNER.sum(x)) == bits(FP64.sum(x)) == bits(torch.tensor([3e38, float("-inf")]))
    assert bits(GB200_WINDOW.sum(x)) == bits(torch.tensor([3e38, float("-inf")]))
    assert bits(ORDERED.sum(x)) == [0x7F800000, 0x7FC00000]


def test_the_twin_torch_casts_nan_otherwise() -> None:
    """Why every result ends in `canonical_nan_`: some NaN of a plain sum or cast has other bits."""
    payload = torch.tensor([0x7F812345], dtype=torch.int32).view(torch.float32)
    assert bits(payload + 1.0) != [0x7FC00000]
    casts = {b for n in (1, 7, 16, 64) for b in bits(payload.expand(n).contiguous().to(torch.bfloat16))}
    assert casts != {0x7FC0} or bits(payload.neg().to(torch.bfloat16)) != [0x7FC0]


def test_bf16_rounds_the_fp32_result_to_even() -> None:
    x = torch.tensor([[1.0, 1.0, 1.0, 3.4e38, -(2.0**-149)], [2.0**-8, 2.0**-8, 3 * 2.0**-8, 0.0, 0.0]])
    x[1, 1] += 2.0**-31  # gone when the sum is rounded to fp32: the tie of the second rounding goes to even
    assert bits(EXACT.sum(x, out_dtype=torch.bfloat16)) == [0x3F80, 0x3F80, 0x3F82, 0x7F80, 0x8000]


def test_out() -> None:
    x = torch.randn(3, 4, 6)
    for out in (torch.empty(4, 6), torch.empty(6, 4).t(), torch.empty(4, 12)[:, ::2]):
        assert EXACT.sum(x, out=out) is out
        assert bits(out) == bits(EXACT.sum(x))
    assert bits(EXACT.sum(list(x), out=x[1])) == bits(x[1])  # an output may be one of the addends: it is read first
    with pytest.raises(ValueError, match=r"out has shape \(2, 4, 6\), the result \(4, 6\)"):
        EXACT.sum(x, out=torch.empty(2, 4, 6))
    for dtype in (torch.float16, torch.float64, torch.int32):
        with pytest.raises(TypeError, match=r"a result is torch.float32 or torch.bfloat16"):
            EXACT.sum(x, out_dtype=dtype)
        with pytest.raises(TypeError, match=r"a result is torch.float32 or torch.bfloat16"):
            EXACT.sum(x, out=torch.empty(4, 6, dtype=dtype))


@pytest.mark.parametrize("contract", RULE_OBJECTS, ids=str)
def test_bad_addends(contract: Contract) -> None:
    for empty in ([], torch.empty(0, 4)):
        with pytest.raises(ValueError, match="at least one addend"):
            contract.sum(empty)
    with pytest.raises(ValueError, match="without dimensions"):
        contract.sum(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"addend 1 is torch.float64: .* fp32"):
        contract.sum([torch.zeros(2), torch.zeros(2, dtype=torch.float64)])
    with pytest.raises(TypeError, match=r"addend 0 is torch.int32"):
        contract.sum(torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"addend 1 has shape \(1, 2\), addend 0 has \(2,\)"):
        contract.sum([torch.zeros(2), torch.zeros(1, 2)])
    with pytest.raises(ValueError, match="addend 1 is on meta, addend 0 on cpu"):
        contract.sum([torch.zeros(2), torch.zeros(2, device="meta")])


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_flushed_subnormals_are_refused(default: torch.dtype) -> None:
    x = torch.full((2, 3), 2.0**-149, dtype=torch.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no switch that flushes subnormals")
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        for contract in RULE_OBJECTS:
            with pytest.raises(RuntimeError, match=r"torch.set_flush_denormal\(False\) before a combine"):
                contract.sum(x)
        assert x[:1].double().sum().item() == 0.0  # the twin: this is what a sum would have read
    finally:
        torch.set_flush_denormal(False)
        torch.set_default_dtype(before)
    assert bits(EXACT.sum(x)) == [2, 2, 2]


def test_threads_and_defaults_change_nothing() -> None:
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((8, 50_000)).astype(np.float32))
    want = [bits(c.sum(x)) for c in RULE_OBJECTS]
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        torch.set_num_threads(2)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            assert [bits(c.sum(x)) for c in RULE_OBJECTS] == want
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------- gradients and compilers


@pytest.mark.parametrize("contract", RULE_OBJECTS, ids=str)
def test_an_addends_gradient_is_the_results(contract: Contract) -> None:
    base, grad = torch.randn(3, 2, 5), torch.randn(2, 5)
    base[1] = torch.tensor([2.0**60, float("inf"), 2.0**-149, -0.0, 1.0])
    for out_dtype in (torch.float32, torch.bfloat16):
        want = contract.sum(base, out_dtype=out_dtype)
        x = base.clone().requires_grad_()
        got = contract.sum(x, out_dtype=out_dtype)
        assert bits(got.detach()) == bits(want)
        got.backward(grad.to(out_dtype))
        assert x.grad is not None and all(bits(g) == bits(grad.to(out_dtype).float()) for g in x.grad)
    # A list of several types; a row twice, one that needs no gradient; the result written afterwards.
    half, row = base[0].bfloat16().requires_grad_(), base[2].clone().requires_grad_()
    total = contract.sum([half, base[1], row, row])
    total.mul_(2.0).backward(grad)
    assert half.grad is not None and bits(half.grad) == bits((2 * grad).bfloat16())
    assert row.grad is not None and bits(row.grad) == bits(4 * grad)
    x = base[:, 0, 2:3].clone().requires_grad_()
    (first,) = torch.autograd.grad(contract.sum(x).pow(3), x, create_graph=True)
    first.sum().backward()  # of the cube of the sum: 3 s^2 for each of three, then 18 s
    assert x.grad is not None and torch.equal(x.grad, 18 * contract.sum(x.detach()).expand(3, 1))
    with torch.no_grad():
        assert not contract.sum(x).requires_grad
    with pytest.raises(ValueError, match="out= cannot be used with gradients"):
        contract.sum(x, out=torch.empty(1))


def test_a_compiler_calls_the_definition_and_does_not_rewrite_it() -> None:
    x = torch.from_numpy(np.random.default_rng(2).standard_normal((5, 70)).astype(np.float32))
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(len([node for node in graph.graph.nodes if node.op.startswith("call")]))
        return graph

    for contract in RULE_OBJECTS:

        def twice(rows: torch.Tensor, contract: Contract = contract) -> torch.Tensor:
            return contract.sum(rows * 2, out_dtype=torch.bfloat16).float() + 1

        torch._dynamo.reset()
        graphs.clear()
        assert bits(torch.compile(twice, backend=backend)(x)) == bits(twice(x))
        assert graphs == [1, 2], (contract, graphs)  # what the caller does before and after, and nothing between
