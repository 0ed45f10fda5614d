"""Importing bicomm: cheap, without Triton, and without a trace in the process."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
# The rooms of docs/design.md, from the ground up: a module imports from its own room and from those before it. An
# import inside a function, for what is needed late or rarely, is free.
ROOMS = [
    *("errors", "as_written", "contract", "partial", "presets", "ranks", "world", "agreement", "symmem", "kernels"),
    *("capability", "machine", "certify", "arguments", "plan", "transports", "operators", "routes", "zerocopy"),
    *("communicator", "front", "local_gpu", "local", "mirror", "model_hooks", "demo", "doctor", "cli"),
]

pytestmark = [pytest.mark.timeout(120)]

_IMPORT = """
import json, os, sys, time
import torch, torch.distributed
before = {
    "environment": dict(os.environ), "modules": set(sys.modules), "threads": len(os.listdir("/proc/self/task")),
    "descriptors": len(os.listdir("/proc/self/fd")), "settings": settings(),
}
start = time.process_time()
import bicomm
spent = time.process_time() - start
for name in used:
    getattr(bicomm, name)
named = time.process_time() - start
after = {
    "environment": dict(os.environ), "threads": len(os.listdir("/proc/self/task")),
    "descriptors": len(os.listdir("/proc/self/fd")), "settings": settings(),
}
print(json.dumps({
    "spent": spent, "named": named, "new": sorted(set(sys.modules) - before.pop("modules")), "same": before == after,
    "before": before, "after": after, "names": sorted(bicomm.__all__), "dir": dir(bicomm),
}))
"""
_SETTINGS = """
def settings():
    import torch
    b = torch.backends
    return [
        torch.get_num_threads(), str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(), b.cuda.matmul.allow_tf32, b.cudnn.allow_tf32, b.cudnn.benchmark,
        b.cuda.matmul.allow_bf16_reduced_precision_reduction, repr(sys.excepthook), repr(torch.matmul), repr(torch.sum),
        repr(torch.nn.functional.linear), repr(torch.distributed.all_reduce), repr(torch.Tensor.__add__), sys.path[:],
        torch.tensor(2.0**-149).double().item(),
    ]
"""


def _imported(*used: str) -> dict[str, Any]:
    code = f"import sys\nused = {used!r}\n{_SETTINGS}\n{_IMPORT}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def test_importing_is_cheap_needs_no_triton_and_changes_nothing() -> None:
    told = _imported()
    assert told["spent"] < 0.3, told["spent"]  # of this process's own time: other processes may keep the cores busy
    assert not [name for name in told["new"] if name.split(".")[0] in ("triton", "transformers", "megatron", "mpi4py")]
    assert told["same"], (told["before"], told["after"])
    assert set(told["names"]) <= set(told["dir"])


def test_the_names_of_a_cpu_run_need_no_triton_either_and_change_nothing() -> None:
    told = _imported(
        "Communicator", "Contract", "combine", "dispatch", "combine_rows", "init", "local_world", "PRESETS"
    )
    assert told["named"] < 1.0, told["named"]
    assert not [name for name in told["new"] if name.split(".")[0] == "triton"]
    assert told["same"], (told["before"], told["after"])


def test_every_public_name_is_there_and_an_unknown_one_is_not() -> None:
    import bicomm

    for name in bicomm.__all__:
        assert getattr(bicomm, name) is not None
        # A module of that name would take the name's place as soon as anybody imports it.
        assert importlib.util.find_spec(f"bicomm.{name}") is None or inspect.ismodule(getattr(bicomm, name))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = bicomm.nothing


def _rooms_of_imports(node: ast.AST) -> set[str]:
    if isinstance(node, ast.ImportFrom) and node.module == "bicomm":
        return {alias.name for alias in node.names if not alias.name.startswith("__")}
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("bicomm."):
        return {node.module.split(".")[1]}
    return set()


def test_imports_run_downwards() -> None:
    upwards, seen = [], set()
    for path in sorted((ROOT / "bicomm").rglob("*.py")):
        room = path.relative_to(ROOT / "bicomm").with_suffix("").parts[0]
        if room in ("__init__", "__main__"):
            continue
        seen.add(room)
        for node in ast.parse(path.read_text()).body:
            below = ROOMS[: ROOMS.index(room) + 1]
            upwards += [f"{path.name} imports {other}" for other in _rooms_of_imports(node) if other not in below]
    assert not upwards
    assert seen == set(ROOMS)


def test_no_room_has_modules_that_import_each_other_in_a_circle() -> None:
    """Imports inside functions count here: what two files share belongs into a third one below them."""
    for room in sorted(path.parent for path in (ROOT / "bicomm").glob("*/__init__.py")):
        modules = {path.stem: ast.parse(path.read_text()) for path in room.glob("*.py") if path.stem != "__init__"}
        needs: dict[str, set[str]] = {}
        for name, tree in modules.items():
            froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            named = {alias.name for node in froms if node.module == f"bicomm.{room.name}" for alias in node.names}
            paths = [str(node.module).split(".") for node in froms]
            named |= {path[2] for path in paths if path[:2] == ["bicomm", room.name] and len(path) > 2}
            needs[name] = named & set(modules)
        list(graphlib.TopologicalSorter(needs).static_order())  # a CycleError says which


# What torch makes as the process has it set (set_default_dtype, set_default_device) where nothing is said.
_BY_DEFAULT = {"zeros", "ones", "empty", "full", "tensor", "rand", "randn", "linspace", "eye"}
_ANYWHERE = _BY_DEFAULT | {"arange", "randint", "randperm", "as_tensor", "scalar_tensor"}


def test_no_tensor_is_made_as_the_process_happens_to_be_set() -> None:
    """An engine sets its model's dtype and device for the whole process, and the bits may not follow them."""
    silent = []
    for path in sorted((ROOT / "bicomm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
                continue
            said = {keyword.arg for keyword in node.keywords}
            needed = {"device"} if node.func.attr in _ANYWHERE else set()
            needed |= {"dtype"} if node.func.attr in _BY_DEFAULT else set()
            if needed - said:
                silent.append(f"{path.relative_to(ROOT)}:{node.lineno}: torch.{node.func.attr} without {needed - said}")
    assert not silent, "\n".join(silent)
