"""kernels/copy_in.py in Triton's interpreter: every byte, whatever the type and alignment; nothing after a fault."""

from __future__ import annotations

import pytest
import torch

from bicomm.kernels import barrier
from bicomm.kernels.copy_in import copy_in


def words(lost: int = 0) -> torch.Tensor:
    control = torch.zeros(barrier.control_words(3), dtype=torch.int64)
    control[barrier.EPOCH.value], control[barrier.LOST.value] = 1, lost
    return control


def place_for(x: torch.Tensor) -> torch.Tensor:
    return torch.full(x.shape, 7.0).to(x.dtype)


CASES = {
    "aligned": torch.randn(9, 64),
    "odd columns": torch.randn(5, 7),
    "one element": torch.randn(1, 1),
    "bf16": torch.randn(6, 8).bfloat16(),
    "an odd number of bf16": torch.randn(3, 5).bfloat16(),
    "int64": torch.arange(12).view(3, 4),
    "4 bytes past alignment": torch.randn(65)[1:].view(8, 8),
    "transposed": torch.randn(8, 6).t(),
    "sliced": torch.randn(10, 10)[::2, 1:9],
    "no rows": torch.randn(0, 8),
    "bytes": torch.arange(21, dtype=torch.uint8).view(3, 7),
}


@pytest.mark.parametrize("name", CASES)
def test_every_element_arrives(name: str) -> None:
    x = CASES[name]
    place = place_for(x)
    copy_in(x, place, words())
    assert torch.equal(place, x)


def test_a_rank_that_has_given_up_leaves_its_operand_alone() -> None:
    x = torch.randn(9, 64)
    place = place_for(x)
    copy_in(x, place, words(lost=1))
    assert place.eq(7.0).all()
