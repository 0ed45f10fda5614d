"""The demo on a GPU: one rank, and four ranks that share one."""

from __future__ import annotations

from ranks import run_ranks

import bicomm
from bicomm.demo import run
from bicomm.demo.layer import Shape
from bicomm.demo.table import Report

SHAPE = Shape(hidden=256, intermediate=64, experts=16, top_k=4)
SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def _report() -> Report | None:
    world = bicomm.init(device="cuda:0")
    return run.demo(world, SHAPE, 130, repeats=1)


def test_one_rank() -> None:
    report = run_ranks(1, _report, launcher="spawn", timeout=280.0)[0].value
    assert report.device == "cuda"
    assert report.failures == []


def test_four_ranks_that_share_a_gpu() -> None:
    report = run_ranks(4, _report, launcher="spawn", timeout=280.0, env=SHARED)[0].value
    assert report.failures == []
    assert all(line.executor.startswith("symmetric memory") for line in report.lines)
    assert all(control.changed > 0 for control in report.controls)
