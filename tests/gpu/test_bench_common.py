"""The clock of the benchmarks: it must give times that can be true before anything is claimed with it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def common() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "bench" / "common.py"
    spec = importlib.util.spec_from_file_location("bench_common", path)
    assert spec is not None and spec.loader is not None
    sys.modules["bench_common"] = module = importlib.util.module_from_spec(spec)  # Triton looks its kernels up there
    spec.loader.exec_module(module)
    return module


def test_times_can_be_true(common: ModuleType) -> None:
    empty = common.empty_kernel_time()
    assert 0.1 < empty < 50
    bandwidth = common.copy_bandwidth(1 << 28)
    assert 50 < bandwidth < 30_000  # GB/s: no GPU that this project runs on is outside
    x = torch.randn(1 << 24, device="cuda")
    out = torch.empty_like(x)
    warm = common.time_graph(lambda: torch.mul(x, 2.0, out=out))
    twice = common.time_graph(lambda: (torch.mul(x, 2.0, out=out), torch.mul(x, 2.0, out=out)))
    assert warm > empty and 1.5 < twice / warm < 2.5


def test_a_cold_cache_is_slower(common: ModuleType) -> None:
    x = torch.randn(1 << 21, device="cuda")  # 8 MiB: it fits the L2 cache of any GPU of compute capability 9
    out = torch.empty(1 << 21, device="cuda")
    warm = common.time_graph(lambda: torch.mul(x, 2.0, out=out))
    cold = common.time_graph(lambda: torch.mul(x, 2.0, out=out), cold=True)
    assert cold > warm


def test_the_record_names_the_machine(common: ModuleType) -> None:
    found = common.environment()
    assert found["machine"]["gpus"][0]["name"] == torch.cuda.get_device_name(0)
    assert found["versions"]["nccl"] and found["date"]
