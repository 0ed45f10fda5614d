"""Every executor compiled for Hopper and Blackwell without a GPU: what its PTX, SASS and cubin have to say."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bicomm.kernels.call import Tile

HERE = Path(__file__).parent
Report = dict[str, Any]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> list[Report]:
    """One report for each kernel and target, from a process of its own: here kernels may be the interpreter's."""
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": paths}
    command = [sys.executable, str(HERE / "kernels_compile.py")]
    if not request.config.getoption("--long"):
        command.append("--main")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def named(reports: list[Report], start: str) -> list[Report]:
    found = [report for report in reports if report["name"].startswith(start)]
    assert {report["capability"] for report in found} == {90, 100, 103}, start
    return found


def test_every_target_is_the_one_asked_for(reports: list[Report]) -> None:
    for report in reports:
        assert report["target"] == f"sm_{report['capability']}a"
    for kernel in ("ordered", "exact", "window", "owner", "gather", "multimem", "broadcast"):
        named(reports, kernel)


def test_nothing_is_contracted_flushed_or_approximated(reports: list[Report]) -> None:
    """Products and sums round by themselves, subnormals stay; integer multiply-adds are no concern."""
    for report in reports:
        for operation in report["operations"]:
            kind, _, types = operation.partition(".")
            if kind in ("fma", "mad", "div", "rcp", "sqrt", "ex2", "lg2"):
                assert not types.endswith(("f32", "f64")), (report["name"], operation)
            assert ".ftz" not in operation and ".approx" not in operation and ".sat" not in operation, report["name"]
        assert not [word for word in report["sass"] if word.startswith(("FFMA", "DFMA"))], report["name"]


def test_no_atomics_on_floats(reports: list[Report]) -> None:
    """The one atomic counts finished blocks in a barrier."""
    for report in reports:
        atomics = [word for word in report["operations"] if word.startswith(("atom.", "red."))]
        assert atomics == ["atom.global.gpu.acq_rel.add.u64"], (report["name"], atomics)


def test_registers_are_enough(reports: list[Report]) -> None:
    for report in reports:
        # owner holds its rows' tiles in the registers of two warps, and was measured fastest so on sm_90; for the
        # others the assembler of Triton 3.6 rather keeps some words on the stack than take more than 168 registers.
        owner = report["name"].startswith("owner")
        some = 24 if owner and report["capability"] != 90 else 0
        assert report["stack"] <= some and report["local"] == 0, report
        assert some or not [word for word in report["sass"] if word.startswith(("LDL", "STL"))], report["name"]
        assert report["registers"] <= (255 if owner else 152), report


def test_aligned_data_move_in_16_bytes(reports: list[Report]) -> None:
    for report in reports:
        name, operations = report["name"], report["operations"]
        if "scalar" in name or "halves" in name:
            assert "ld.global.v4.b32" not in operations, name
            continue
        assert "ld.global.v4.b32" in operations, name
        wide_store = "st.global.v2.b32" if name in ("exact small bf16", "owner fp32") else "st.global.v4.b32"
        assert wide_store in operations or "edges" in name, (name, operations)


def test_exact_sums_know_fp64_and_ordered_chains_do_not(reports: list[Report]) -> None:
    for report in named(reports, "ordered"):
        assert any(word.startswith("add.rn.f32") or word == "add.f32" for word in report["operations"])
        assert not any(word.endswith("f64") for word in report["operations"]), report["name"]
    for report in named(reports, "exact"):
        assert any(word.endswith("f64") for word in report["operations"]), report["name"]


def test_offsets_have_64_bits(reports: list[Report]) -> None:
    """No pointer moves by a 32-bit scalar but in small tables (peers, splits), and by constants."""
    for report in reports:
        for line in report["narrow_offsets"]:
            assert "!tt.ptr<i64>, i32" in line, (report["name"], line)


def test_the_switch_is_asked_as_the_contract_needs(reports: list[Report]) -> None:
    """One multimem load: relaxed, at system scope, fp32, 16 bytes; after a proxy fence, beside software loads."""
    for report in named(reports, "multimem"):
        multimem = [word for word in report["operations"] if word.startswith("multimem")]
        assert multimem == ["multimem.ld_reduce.relaxed.sys.global.add.v4.f32"]
        assert "fence.proxy.alias" in report["operations"] and "ld.global.v4.b32" in report["operations"]
        if report["sass"]:
            assert "LDGMC.E.ADD.F32x4.RN.STRONG.SYS" in report["sass"]
    for report in named(reports, "broadcast"):
        multimem = [word for word in report["operations"] if word.startswith("multimem")]
        assert multimem == ["multimem.st.relaxed.sys.global.v4.f32"] and "fence.proxy.alias" in report["operations"]
        if report["sass"]:
            assert "STG.E.128.STRONG.SYS" in report["sass"]
    for report in reports:
        if not report["name"].startswith(("multimem", "broadcast")):
            assert not [word for word in report["operations"] if "multimem" in word or "proxy" in word], report["name"]


def test_sass_was_read_where_the_tools_can(reports: list[Report]) -> None:
    assert all(report["sass"] for report in reports if report["capability"] in (90, 100))


def _launches() -> list[tuple[str, ast.Call]]:
    """Every `kernel[grid](...)` of the library: where it stands, and the call."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((HERE.parent / "bicomm").rglob("*.py"))}
    kernels = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    }
    return [
        (f"{path.relative_to(HERE.parent)}:{node.lineno}", node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        if ast.unparse(node.func.value).rpartition(".")[2] in kernels | {"kernel"}
    ]


def _forbids_contraction(call: ast.Call, source: str) -> bool:
    """By its own keyword, or by one of the dictionaries that it spreads, which hold it."""
    words = {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg}
    spread = {ast.unparse(word.value) for word in call.keywords if not word.arg}
    inside = spread & {"common", "options"} and '"enable_fp_fusion": False' in source
    return words.get("enable_fp_fusion") == "False" or "tile.options" in spread or bool(inside)


def test_every_launch_forbids_contraction() -> None:
    """The reports above are of kernels that this folder compiles; launches have options of their own."""
    launches = _launches()
    assert len(launches) >= 27 and Tile(512, 4, 8).options["enable_fp_fusion"] is False
    for where, call in launches:
        source = (HERE.parent / where.partition(":")[0]).read_text()
        assert _forbids_contraction(call, source), where
    bare = ast.parse("kernel[grid](x, num_warps=4, **sizes)", mode="eval").body
    assert isinstance(bare, ast.Call) and not _forbids_contraction(bare, "")
