"""What the README and the docs say can be done, can be done; what they point to is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT, run_ranks

README = (ROOT / "README.md").read_text()
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def _blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_the_readmes_programs_run_on_three_ranks(tmp_path: Path) -> None:
    script = tmp_path / "combine.py"
    script.write_text("\n".join(_blocks("python")))
    results = run_ranks(3, script, launcher="fork", timeout=60.0)
    for result in results:
        assert f"rank {result.rank}: ({333 + (result.rank == 2)}, 512), torch.float32" in result.stdout
        assert "mode multimem: contract exact/1" in result.stdout


def _names_of_the_docs() -> dict[str, Any]:
    """What the programs of the docs take for granted."""
    import torch

    from bicomm import PRESETS

    pad = torch.zeros(6, 5, dtype=torch.bool)
    pad[0, 0] = True
    return {
        "hidden": torch.randn(6, 5, 32).bfloat16().requires_grad_(), "weight": torch.randn(128, 32).bfloat16(),
        "pad": pad, "a": torch.ones(3), "b": torch.ones(3), "d": torch.ones(3), "x": torch.ones(7, 16).bfloat16(),
        "rollout": {"contract": PRESETS["megatron-vllm-swiglu"].json()}, "experts": lambda rows: rows * 2,
        "topk_ids": torch.stack([torch.randperm(128)[:8] for _ in range(7)]),
    }  # fmt: skip


def test_the_programs_of_the_docs_run() -> None:
    import torch.distributed as dist

    given = _names_of_the_docs()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        given["dp"] = dist.group.WORLD
        told: dict[str, Any] = {}
        for page in sorted((ROOT / "docs").glob("*.md")):
            names = told[page.stem] = dict(given)
            for program in _blocks("python", page.read_text()):
                exec(program, names)
    finally:
        dist.destroy_process_group()
    told["router"]["weights"].sum().backward()
    assert given["hidden"].grad.isfinite().all() and not told["router"]["weights"][0, 0].any()  # padding
    assert told["mirror"]["out"].eq(16.0).all()  # eight slots, each twice its token
    assert told["contracts"]["c"].id == "window(16,95,86)/1"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`?\b((?:tests|launch|bench|bicomm|docs)/[\w./-]*\.[a-z]+)", page.read_text()):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_are_named_without_a_folder_exist(page: Path) -> None:
    there = {path.name for room in ("bicomm", "bench", "tests") for path in (ROOT / room).rglob("*.py")}
    for name in re.findall(r"`(\w+\.py)`", page.read_text()):
        assert name in there, name
