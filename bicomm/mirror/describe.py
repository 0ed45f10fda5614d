"""A contract in words, what two contracts differ in, and what no contract can mirror."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from bicomm.contract import Contract, Partial
from bicomm.presets import PRESETS, name_of_partial

CANNOT_MIRROR: dict[str, str] = {
    "nccl-reduce": "the sum happens inside ncclReduce or a ring (vLLM's batch-invariant mode reduces across ranks so): "
    "its tree depends on the topology, the channels, the message size and NCCL's version, and no public rule gives it",
    "multimem-bf16": "the NVLink switch's sum of bf16 or fp16 is not reproducible from its inputs",
    "multimem": "it names an executor, whose rule a measurement shows (without one, `exact` runs in software): mirror "
    "the contract in comm.plan('multimem').contract, which an engine stores as its json()",
    "multimem-uncertified": "an NVLink switch follows a rule that only a measurement shows: certify the fabric, and "
    "mirror the contract that the certificate names",
    "tensor-parallel-experts": "tensor parallelism inside an expert splits FC2's K and changes the rows themselves, "
    "before any combine",
    "atomics": "float atomics add in the order of arrival, which differs from run to run",
}
"""What cannot be mirrored, by name, with the reason. `resolve` refuses these names with it."""


class ContractMismatch(ValueError):
    """The engine's contract and the trainer's are not the same: their bits differ. The message shows both."""


def resolve(contract: Contract | str | Mapping[str, Any]) -> Contract:
    """The contract itself, or the one that an id, a preset's name or an engine's JSON (text, or parsed) spells.

    Raises ValueError for what is not one, with the reason where it names a sum that cannot be mirrored; TypeError for
    what is neither a contract, a string nor a mapping.
    """
    if isinstance(contract, Contract):
        return contract
    if isinstance(contract, Mapping):
        return Contract.from_json(json.dumps(dict(contract), default=repr))
    if not isinstance(contract, str):
        raise TypeError(
            f"a contract is a bicomm.Contract, an id, a preset's name, or what Contract.json() gave (text, or the "
            f"object in it); got {type(contract).__name__}"
        )
    if contract in CANNOT_MIRROR:
        raise ValueError(f"{contract} cannot be mirrored: {CANNOT_MIRROR[contract]}")
    return Contract.parse(_id_in_json(contract) if contract.lstrip().startswith("{") else contract)


def _id_in_json(text: str) -> str:
    return Contract.from_json(text).id


# As torch.compiler.assume_constant_result does, which imports the compiler: it cannot trace a JSON parser.
_id_in_json._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check(engine: Contract | str | Mapping[str, Any], trainer: Contract | str | Mapping[str, Any]) -> Contract:
    """The engine's contract, if it is the trainer's: call it before the first step with the JSON kept beside rollouts.

    engine: `Contract.json()`, its object, or an id, as the engine stored it. Raises ContractMismatch (a ValueError)
    where the trainer is set to another contract, with both in words; ValueError where either is no contract.
    """
    theirs, ours = resolve(engine), resolve(trainer)
    if theirs != ours:
        raise ContractMismatch(
            f"the engine's contract is not the trainer's ({', '.join(differences(theirs, ours))})\n"
            f"engine:  {describe(theirs)}\ntrainer: {describe(ours)}"
        )
    return theirs


def differences(a: Contract, b: Contract) -> list[str]:
    """The fields in which two contracts differ: `rule: exact / ordered`, `partial.order: slot / expert`."""
    found = []
    for name in ("rule", "parameters"):
        if getattr(a, name) != getattr(b, name):
            found.append(f"{name}: {getattr(a, name)} / {getattr(b, name)}")
    if a.partial is None or b.partial is None:
        return found + ([] if a.partial == b.partial else [f"partial: {_short(a.partial)} / {_short(b.partial)}"])
    for field in dataclasses.fields(Partial):
        left, right = getattr(a.partial, field.name), getattr(b.partial, field.name)
        if left != right:
            found.append(f"partial.{field.name}: {left} / {right}")
    return found


def _short(partial: Partial | None) -> str:
    return "none" if partial is None else name_of_partial(partial)


def describe(contract: Contract | str | Mapping[str, Any]) -> str:
    """The contract's tree in words, a line for each step, after its id and the presets of that name."""
    contract = resolve(contract)
    names = [name for name, known in PRESETS.items() if known == contract]
    title = contract.id + (f" (preset {', '.join(names)})" if names else "")
    lines = [title, *_within(contract), _across(contract)]
    lines.append("the result is fp32; asked for in bf16 it is rounded once more")
    lines.append(f"the bits depend on {_depends(contract)}")
    return "\n  ".join(lines)


def _addend(tree: Partial | None) -> str:
    if tree is None:
        return "each addend is the expert's row, or, where weights are given, weight * row rounded to fp32"
    if tree.probability == "activation":
        return "each addend is the expert's row, which holds the router's weight since the activation"
    weight = "the router's weight" + (", rounded to bf16," if tree.weight == "bf16" else "")
    if tree.product == "fma":
        return f"each step is one fused multiply-add: {weight} times the row plus the sum so far, rounded once to fp32"
    rounded = "fp32" if tree.product == "fp32" else "fp32 and then to bf16"
    return f"each addend is {weight} times the row, rounded to {rounded}"


_CHAINS = {
    "exact": "they are summed exactly and rounded once to fp32",
    "fp64": "they are added to +0 in fp64, one after the other, and the sum is rounded once to fp32",
    "fp32": "they are added to +0 one after the other, with a rounding to fp32 at each addition",
    "bf16": "they are added to +0 one after the other, with a rounding to bf16 at each addition",
}
_ORDERS = {"slot": "ascending top-k slot", "expert": "ascending local expert index"}


def _within(contract: Contract) -> list[str]:
    tree = contract.partial
    if contract.rule == "owner":
        return [f"at the token's owner: {_addend(tree)}"]
    if tree is None:
        return ["within a rank: not said (a combine does not need it, a mirror does)"]
    lines = [f"within each engine rank: {_addend(tree)}"]
    if tree.accumulator == "exact":
        return [*lines, f"within each engine rank: {_CHAINS['exact']}"]
    return [*lines, f"within each engine rank: in {_ORDERS[tree.order]}, {_CHAINS[tree.accumulator]}"]


def _across(contract: Contract) -> str:
    if contract.rule == "owner":
        return "all addends of the token's slots are summed exactly and rounded once to fp32"
    if contract.rule == "window":
        g, t, s = contract.parameters
        return (
            f"across ranks: with A = {g} * ceil(e / {g}), e the largest exponent, partials are truncated toward zero "
            f"below 2^(A-{t}), summed exactly, and the sum is +0 below 2^(A-{s}), else rounded once to fp32"
        )
    if contract.rule == "exact":
        return "across ranks: the partials are summed exactly and rounded once to fp32"
    chain = _CHAINS["fp32" if contract.rule == "ordered" else "fp64"]
    return f"across ranks: the partials, in ascending rank: {chain}"


def _depends(contract: Contract) -> str:
    if contract.rule == "owner":
        return "the rows and weights alone: no expert parallel size, placement or order"
    where = "which expert sits on which rank"
    if contract.rule in ("ordered", "fp64"):
        where += ", the numbering of the ranks"
    tree = contract.partial
    if tree is not None and tree.accumulator != "exact":
        where += ", the order of slots" if tree.order == "slot" else ", the numbering of a rank's experts"
    return where
