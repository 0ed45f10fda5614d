"""Set-up for every test session: Triton's interpreter where there is no GPU, and which tests are long."""

from __future__ import annotations

import os

# Children inherit it: eight ranks with a thread pool each would fight for the same few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

# Triton reads it when a kernel is defined, so it must be set before any kernel module is imported; torch's own import
# does not touch Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadline for one example: a busy machine would fail tests that say nothing about time. In CI the examples are the
# same at every run, so that a change is never blamed for what it did not do.
hypothesis.settings.register_profile("bicomm", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
hypothesis.settings.load_profile("bicomm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long (make test-all)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long") or "long" in (config.getoption("-m") or ""):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]
