"""Ranks and GPUs: which device each rank gets, and which back-end follows. One GPU is enough."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from ranks import run_ranks

import bicomm.world as world


def _shared() -> tuple[str, str, bool, int, str]:
    w = world.init(timeout=60.0)
    total = torch.tensor([w.rank + 1])
    dist.all_reduce(total)
    there = str(torch.zeros(1, device="cuda").device)
    told = str(w.device), dist.get_backend(), w.shares_gpu, int(total), there
    world.shutdown()
    return told


def test_ranks_that_share_the_gpu_use_gloo() -> None:
    # Each process sees one GPU, the same one.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    values = [
        r.value for r in run_ranks(3, _shared, launcher="spawn", timeout=180, env={"CUDA_VISIBLE_DEVICES": first})
    ]
    assert values == [("cuda:0", "gloo", True, 6, "cuda:0")] * 3


def test_each_rank_has_a_gpu_of_its_own_where_there_are_enough() -> None:
    count = min(torch.cuda.device_count(), 4)
    if count < 2:
        values = [r.value for r in run_ranks(1, _shared, launcher="spawn", timeout=180)]
        assert values == [("cuda:0", "gloo", False, 1, "cuda:0")]
        return
    values = [r.value for r in run_ranks(count, _shared, launcher="spawn", timeout=180)]
    assert [value[0] for value in values] == [f"cuda:{rank}" for rank in range(count)]
    assert [value[0] == value[4] for value in values] == [True] * count
    assert {value[1] for value in values} == {"cpu:gloo,cuda:nccl"}


def test_the_cpu_on_request() -> None:
    values = [r.value for r in run_ranks(2, _on_cpu, launcher="spawn", timeout=180)]
    assert values == [("cpu", "gloo", False)] * 2


def _on_cpu() -> tuple[str, str, bool]:
    w = world.init(device="cpu", timeout=60.0)
    told = str(w.device), dist.get_backend(), w.shares_gpu
    world.shutdown()
    return told
