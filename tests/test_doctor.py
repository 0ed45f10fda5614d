"""The command line, and what the doctor says of this machine and of others."""

from __future__ import annotations

import copy
import importlib
import io
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from rich.console import Console

from bicomm import cli, doctor, machine


def _bicomm(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "80", **variables}
    return subprocess.run(
        [sys.executable, "-m", "bicomm", *arguments], capture_output=True, text=True, timeout=120, env=environment
    )


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    return doctor.examine()


def _many_gpus(found: dict[str, Any], count: int, multicast: str = "") -> dict[str, Any]:
    found = copy.deepcopy(found)
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "memory_gib": 139.8, "multicast": multicast}
    found["gpus"] = [{"index": index, **gpu} for index in range(count)]
    found["peer_access"] = [[True] * count for _ in range(count)]
    found["shared_memory"] |= {"problem": "", "size": 1 << 34}
    found["sockets"]["problem"] = found["file_handles"] = ""
    found["certificate"] = {"contract": "", "reason": "no certificate of these GPUs", "path": ""}
    return found


def _printed(found: dict[str, Any]) -> str:
    text = io.StringIO()
    doctor.show(found, Console(file=text, width=80))
    return text.getvalue()


def test_json_parses_and_holds_every_part() -> None:
    done = _bicomm("doctor", "--json", NCCL_ALGO="Ring", RANK="1")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["versions"]["torch"] == torch.__version__
    assert found["environment"]["NCCL_ALGO"] == "Ring"
    assert [row["mode"] for row in found["executors"]] == list(doctor.MODES)
    assert any("RANK=1, but WORLD_SIZE" in problem for problem in found["problems"])


def test_tables_fit_80_columns_and_lose_nothing(here: dict[str, Any]) -> None:
    for found in (here, _many_gpus(here, 8), _many_gpus(here, 8, "the driver says no: " + "because " * 20)):
        text = _printed(found)
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text
        assert all(title in text for title in ("Machine", "What changes bits", "Executors"))
    assert "Peer access" in text and "H200" in text


def test_what_the_environment_holds_is_no_markup(here: dict[str, Any]) -> None:
    found = copy.deepcopy(here)
    found["environment"]["NCCL_ALGO"] = "[/red]:smile:"
    found["launcher"]["problem"] = "RANK='[bold]' is no number"
    text = _printed(found)
    assert "[/red]:smile:" in text and "RANK='[bold]' is no number" in text


def test_executors_follow_what_the_gpus_can_do(here: dict[str, Any]) -> None:
    found = _many_gpus(here, 4, "TORCH_SYMM_MEM_DISABLE_MULTICAST is set")
    rows = {row["mode"]: row for row in doctor.executors(found)}
    assert "symmetric" in rows["ordered"]["executor"] and "symmetric" in rows["multimem"]["executor"]
    assert any("TORCH_SYMM_MEM_DISABLE_MULTICAST" in reason for reason in rows["multimem"]["not"])
    found["peer_access"][1][3] = False
    rows = {row["mode"]: row for row in doctor.executors(found)}
    assert "all-to-all" in rows["ordered"]["executor"]
    assert any("GPU 1 cannot read the memory of GPU 3" in reason for reason in rows["ordered"]["not"])
    found = _many_gpus(here, 4)
    found["file_handles"] = "pidfd_getfd: Operation not permitted"
    assert "all-to-all" in doctor.executors(found)[0]["executor"]
    assert any("pidfd_getfd" in problem for problem in doctor.problems(found))


def test_problems_are_named(here: dict[str, Any]) -> None:
    found = _many_gpus(here, 1)
    found["numbers"]["flush_denormal"] = True
    found["shared_memory"]["size"] = 64 << 20
    found["environment"] = {"TRITON_INTERPRET": "1"}
    said = " ".join(doctor.problems(found))
    assert all(word in said for word in ("set_flush_denormal", "--shm-size", "TRITON_INTERPRET"))


def test_on_cpus_every_mode_says_first_that_there_is_no_switch(here: dict[str, Any]) -> None:
    found = copy.deepcopy(here)
    found["gpus"] = []
    for row in doctor.executors(found):
        assert row["not"][0].endswith("the ranks work on CPUs"), row


def test_one_rank_of_a_host_speaks() -> None:
    size = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert "Machine" in _bicomm("doctor", RANK="0", LOCAL_RANK="0", **size).stdout
    assert "Machine" in _bicomm("doctor", RANK="2", LOCAL_RANK="0", **size).stdout
    quiet = _bicomm("doctor", RANK="3", LOCAL_RANK="1", **size)
    assert (quiet.returncode, quiet.stdout) == (0, "")


def test_flushed_subnormals_are_seen() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert machine.number_settings()["flush_denormal"]
    finally:
        torch.set_flush_denormal(False)
    assert not machine.number_settings()["flush_denormal"]


def test_a_long_tmpdir_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/var/" + "x" * 100)
    assert "105 bytes" in machine.sockets()["problem"]


def test_missing_shared_memory_is_a_problem(here: dict[str, Any]) -> None:
    found = copy.deepcopy(here)
    found["gpus"], found["shared_memory"] = [], machine.shared_memory("/nowhere")
    assert "/nowhere" in " ".join(doctor.problems(found))
    assert "all-to-all" in doctor.executors(found)[0]["executor"]


def test_a_certificate_lets_the_switch_add(here: dict[str, Any]) -> None:
    found = _many_gpus(here, 8)
    rows = {row["mode"]: row for row in doctor.executors(found)}
    assert any("certif" in reason for reason in rows["multimem"]["not"])
    found["certificate"]["contract"] = "window(16,95,86)/1"
    rows = {row["mode"]: row for row in doctor.executors(found)}
    assert rows["multimem"]["contract"] == "window(16,95,86)/1" and "multimem" in rows["multimem"]["executor"]
    assert rows["multimem"]["not"] == []


def test_every_command_is_there_and_none_is_loaded_before_its_turn() -> None:
    for module, _ in cli.COMMANDS.values():
        assert importlib.import_module(module).app
    code = "import sys, bicomm.cli; print(sorted(m for m in ('torch', 'triton', 'numpy') if m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_help_and_version() -> None:
    told = _bicomm("--help").stdout
    assert all(name in told for name in cli.COMMANDS)
    assert "--json" in _bicomm("doctor", "--help").stdout
    assert _bicomm("--version").stdout.strip() == importlib.import_module("bicomm").__version__
    wrong = _bicomm("doctor", "--nothing")
    assert wrong.returncode == 2 and "--nothing" in wrong.stderr
