"""Who may use the NVLink switch: decided by all ranks, confirmed by a self-check, taken back by all ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bicomm import plan as planning
from bicomm.certify import emulate, trust
from bicomm.contract import EXACT, GB200_WINDOW, ORDERED, Contract
from bicomm.transports.nvls import Nvls, decide

W = 8
FACTS = planning.Facts("cuda", W, "", "")


def alone(reason: str) -> str:
    """The agreement of a group in which only this rank has something to say."""
    return f"rank 0: {reason}" if reason else ""


def alike(_: Contract) -> str:
    """A block of the operand in which nothing differs."""
    return ""


def self_check(name: str):  # type: ignore[no-untyped-def]
    fabric = emulate.emulated(name, W)
    return lambda contract: trust.self_check(fabric, contract, rank=0)


@pytest.mark.parametrize(("name", "contract"), [("exact", EXACT), ("window", GB200_WINDOW)])
def test_a_certificate_that_the_self_check_confirms_is_trusted(name: str, contract: Contract) -> None:
    assert decide(None, contract, "", self_check(name), alone) == (contract, "")


def test_a_contract_passed_as_mode_needs_no_certificate_but_the_self_check() -> None:
    assert decide(EXACT, None, "no certificate", self_check("exact"), alone)[0] == EXACT
    confirmed, reason = decide(EXACT, None, "no certificate", self_check("window"), alone)
    assert confirmed is None
    assert "self-check failed: rank 0: the switch gave" in reason and "exact/1" in reason


@pytest.mark.parametrize("name", ["window", "window2", "fp64", "chain", "rotated", "tree", "truncating", "ftz"])
def test_no_other_fabric_passes_for_exact(name: str) -> None:
    assert decide(None, EXACT, "", self_check(name), alone)[0] is None


def test_without_a_certificate_the_reason_is_the_certificates() -> None:
    assert decide(None, None, "no certificate of these GPUs", self_check("exact"), alone) == (
        None,
        "no certificate of these GPUs",
    )
    # the switch has no contract of the kind `ordered`, so such a Contract asks nothing of it
    assert decide(ORDERED, None, "none", self_check("chain"), alone)[0] is None


def test_one_rank_that_sees_a_difference_speaks_for_all() -> None:
    """Agreement is by all ranks: this rank's own check passes, another's does not."""
    confirmed, reason = decide(None, EXACT, "", self_check("exact"), lambda _: "rank 5: the switch gave 0x3f800000")
    assert confirmed is None and "rank 5" in reason


def test_the_plan_says_why_the_switch_is_not_used() -> None:
    confirmed = dataclasses.replace(FACTS, certified=GB200_WINDOW, confirmed=GB200_WINDOW)
    assert planning.plan("multimem", confirmed).executor.startswith("multimem")
    assert planning.plan("multimem", confirmed).contract == GB200_WINDOW
    assert planning.plan(GB200_WINDOW, confirmed).executor.startswith("multimem")
    assert "found to obey window" in str(planning.plan(EXACT, confirmed))
    assert "names the software kernel" in str(planning.plan("window(16,95,86)", confirmed))
    assert "no contract of the kind ordered" in str(planning.plan("ordered", confirmed))
    failed = dataclasses.replace(FACTS, certified=GB200_WINDOW, unconfirmed="the self-check failed: rank 3: ...")
    chosen = planning.plan("multimem", failed)
    assert chosen.contract == GB200_WINDOW, "the certified contract stands, in software"
    assert "exact.py" in chosen.executor and "self-check failed: rank 3" in str(chosen)
    off = dataclasses.replace(confirmed, multicast="NCCL_NVLS_ENABLE=0 is set")
    assert "NCCL_NVLS_ENABLE=0" in str(planning.plan("multimem", off))


def test_a_periodic_check_that_fails_turns_the_word_off_for_good() -> None:
    calls = []

    def check(contract: Contract) -> str:
        calls.append(contract)
        return "the switch gave 0x0" if len(calls) == 2 else ""

    nvls = Nvls(EXACT, torch.device("cpu"), check, alone, every=3)
    assert nvls.trusted.tolist() == [1]
    for _ in range(5):
        nvls.count_call(alike)
    assert nvls.trusted.tolist() == [1] and len(calls) == 1
    nvls.count_call(alike)
    assert nvls.trusted.tolist() == [0] and "rank 0: the switch gave" in nvls.reason
    for _ in range(20):
        nvls.count_call(alike)
    assert nvls.trusted.tolist() == [0] and len(calls) == 2


def test_a_block_of_the_operand_is_looked_at_even_where_known_columns_differ() -> None:
    """Both parts are collective: a rank that left one out would keep the others waiting."""
    blocks: list[Contract] = []

    def block(contract: Contract) -> str:
        blocks.append(contract)
        return "of the operand of a call"

    nvls = Nvls(EXACT, torch.device("cpu"), lambda _: "the switch gave 0x0", alone, every=1)
    nvls.count_call(block)
    assert blocks == [EXACT] and nvls.reason == "rank 0: of the operand of a call; the switch gave 0x0"


def test_by_default_no_call_is_checked() -> None:
    nvls = Nvls(EXACT, torch.device("cpu"), lambda _: "must not run", alone)
    for _ in range(1000):
        nvls.count_call(lambda _: "must not run")
    assert nvls.reason == ""
