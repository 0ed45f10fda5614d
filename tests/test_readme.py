"""What the README and the docs say can be done, can be done; what they point to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import ROOT, run_ranks

README = (ROOT / "README.md").read_text()
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_readmes_programs_run_on_three_ranks(tmp_path: Path) -> None:
    script = tmp_path / "combine.py"
    script.write_text("\n".join(_blocks("python")))
    results = run_ranks(3, script, launcher="fork", timeout=60.0)
    for result in results:
        assert f"rank {result.rank}: ({333 + (result.rank == 2)}, 512), torch.float32" in result.stdout
        assert "mode multimem: contract exact/1" in result.stdout


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
