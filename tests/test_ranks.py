"""The launcher that all multi-process tests stand on: what ranks return, print and suffer comes back."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from ranks import LAUNCHERS, RanksFailed, run_ranks


def _rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "-1")))


def _say_and_return(factor: int) -> tuple[int, str]:
    print("out of", _rank())
    print("err of", _rank(), file=sys.stderr)
    return _rank() * factor, os.environ["OMP_NUM_THREADS"]


def _sum_over_gloo() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def _one_raises() -> None:
    if _rank() == 1:
        raise ValueError("rank one is unwell")


def _one_hangs() -> int:
    print("started", file=sys.stderr)
    if _rank() == 2:
        time.sleep(600)
    return os.getpid()


def _one_is_killed() -> str:
    if _rank() == 0:
        os.kill(os.getpid(), 9)
    return "alive"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_rank_returns_its_value_and_output(launcher: str) -> None:
    results = run_ranks(3, _say_and_return, 10, launcher=launcher)
    assert [r.value for r in results] == [(0, "1"), (10, "1"), (20, "1")]
    assert [r.stdout for r in results] == [f"out of {r}\n" for r in range(3)]
    assert all(f"err of {r.rank}" in r.stderr for r in results)


@pytest.mark.parametrize("launcher", ["fork", "spawn"])
def test_ranks_find_each_other_through_torchruns_variables(launcher: str) -> None:
    assert [r.value for r in run_ranks(3, _sum_over_gloo, launcher=launcher)] == [3.0, 3.0, 3.0]


def test_a_script_gets_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, os\nprint(sys.argv[1:], os.environ['RANK'])\n")
    results = run_ranks(2, script, "--steps", 3, launcher="fork")
    assert [r.stdout for r in results] == ["['--steps', '3'] 0\n", "['--steps', '3'] 1\n"]


def test_a_rank_that_raises_fails_the_run_with_its_traceback() -> None:
    with pytest.raises(RanksFailed, match="rank one is unwell") as failure:
        run_ranks(2, _one_raises, launcher="fork")
    assert [r.returncode for r in failure.value.results] == [0, 1]


@pytest.mark.parametrize("launcher", ["fork", "mpirun"])
def test_a_hung_rank_is_killed_and_named(launcher: str) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 2 was killed") as failure:
        run_ranks(3, _one_hangs, launcher=launcher, timeout=5.0)
    assert time.monotonic() - start < 20
    assert all("started" in r.stderr for r in failure.value.results)
    assert not any(Path(f"/proc/{r.value}").exists() for r in failure.value.results[:2])


def test_a_killed_rank_is_a_result_without_check() -> None:
    results = run_ranks(2, _one_is_killed, launcher="fork", check=False)
    assert [r.returncode for r in results] == [None, 0]
    assert [r.value for r in results] == [None, "alive"]


def test_what_cannot_be_found_again_is_refused() -> None:
    with pytest.raises(ValueError, match="module-level"):
        run_ranks(1, lambda: None, launcher="fork")
    with pytest.raises(ValueError, match="launcher must be one of"):
        run_ranks(1, _one_raises, launcher="ssh")
