"""Rows times hidden past 2**31, in the interpreter: bases are moved back as far as offsets go forward.

A kernel that computed any of these offsets in 32 bits would read somewhere else, most likely outside of its process.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from bicomm.contract import EXACT, ORDERED, OWNER
from bicomm.kernels import exact, gather, multimem, ordered, owner
from bicomm.kernels.call import Gather, Pull, Reduce, Tile
from kernel_cases import Ranks, assert_bits, family, quiet, routing

pytestmark = quiet
SMALL = Tile(64, 4, 3)
HIDDEN = 4096
FAR_ROWS = 1 << 21  # rows of HIDDEN fp32: 2**33 elements, 2**35 bytes


def far(ranks: Ranks, rows: int = FAR_ROWS) -> torch.Tensor:
    """Addresses from which row `rows` is where the data are."""
    return ranks.peers - rows * ranks.data.shape[2] * ranks.data.element_size()


@pytest.mark.parametrize("kernel", ["ordered", "exact", "multimem"])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_slice_far_into_the_buffers(kernel: str, on_device: bool) -> None:
    ranks = Ranks(family("normal", 3, [1, HIDDEN]))
    out = torch.empty(1, HIDDEN)
    call = Reduce(
        peers=far(ranks),
        offset=0,
        rank=1,
        hidden=HIDDEN,
        out=out,
        start=FAR_ROWS * HIDDEN,
        count=HIDDEN,
        splits=torch.tensor([FAR_ROWS, 1, 0]) if on_device else None,
    )
    if kernel == "multimem":
        multimem.reduce(call, multicast=0, trusted=torch.ones(1, dtype=torch.int32), hardware=False)
    else:
        (ordered if kernel == "ordered" else exact).reduce(call)
    assert_bits(out, (ORDERED if kernel == "ordered" else EXACT).sum(ranks.data[:, :1]))


def test_an_offset_far_into_the_buffers() -> None:
    ranks = Ranks(family("normal", 3, [1, HIDDEN]))
    out = torch.empty(1, HIDDEN)
    ordered.reduce(Reduce(far(ranks), FAR_ROWS * HIDDEN * 4, 0, HIDDEN, out, 0, HIDDEN))
    assert_bits(out, ORDERED.sum(ranks.data[:, :1]))


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_rows_far_into_the_buffers(integers: torch.dtype) -> None:
    case = routing(3, 2, HIDDEN, 2, 2, integers=integers)
    ranks = Ranks(case.rows)
    out = torch.empty(2, HIDDEN)
    rows = torch.where(case.row_of_slot >= 0, case.row_of_slot + FAR_ROWS, -1).to(integers)
    owner.pull(Pull(far(ranks), 0, 0, torch.bfloat16, out, rows, case.rank_of_slot))
    assert_bits(out, OWNER.sum(case.addends()))


def test_a_dispatch_far_into_the_buffers() -> None:
    rows = [torch.full((1, HIDDEN), float(rank)) for rank in range(3)]
    peers = torch.tensor([x.data_ptr() for x in rows])
    out = torch.empty(3, HIDDEN)
    gather.gather(
        Gather(peers - FAR_ROWS * HIDDEN * 4, FAR_ROWS * HIDDEN * 4, 0, out, (1, 1, 1)), tile=Tile(2048, 4, 3)
    )
    assert torch.equal(out, torch.cat(rows))


def test_narrow_and_wide_integers_make_one_kernel() -> None:
    """Small and large arguments of a launch are the same kernel: an engine never waits for a compilation in mid-run."""
    for kernel, name in itertools.product(
        (ordered._ordered_kernel, exact._exact_kernel, owner._owner_kernel, gather._gather_kernel),
        ("offset", "start", "units", "hidden", "rows", "rank", "capacity", "columns", "most", "what", "patience"),
    ):
        annotation = kernel.fn.__annotations__.get(name)
        assert annotation in (None, "tl.int64") and (annotation or name not in kernel.arg_names or name == "rows")
