"""The dispatch that pulls, in Triton's interpreter: every byte of every peer's rows, and nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from bicomm.errors import CaptureError
from bicomm.kernels import call
from bicomm.kernels.call import Gather, Tile
from bicomm.kernels.gather import gather
from kernel_cases import Bytes

SMALL = Tile(32, 4, 3)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("splits", [[4, 0, 3, 5, 1], [0, 0, 0], [0, 9, 0], [3], [7, 1, 1, 1, 1, 1, 1, 1]], ids=str)
def test_uneven_tokens(splits: Sequence[int], on_device: bool) -> None:
    for rotate in {0, len(splits) // 2, len(splits) - 1}:
        Bytes(splits, 24).check(rotate=rotate, on_device=on_device, tile=SMALL)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64], ids=str
)
@pytest.mark.parametrize("hidden", [1, 7, 20])
def test_any_type_and_hidden_size(dtype: torch.dtype, hidden: int) -> None:
    for lead in (0, 1, 3):
        Bytes([3, 0, 5], hidden * dtype.itemsize, lead * dtype.itemsize).check(dtype=dtype, tile=SMALL)


@pytest.mark.parametrize("hidden", [2050, 2880, 4097])
def test_hidden_sizes_of_real_models(hidden: int) -> None:
    Bytes([2, 1, 0, 3], 2 * hidden).check(dtype=torch.bfloat16, on_device=True)


@pytest.mark.parametrize("capacity", [0, 1, 4, 8])
def test_rows_that_do_not_fit_are_left_out(capacity: int) -> None:
    for rotate in range(3):
        Bytes([3, 2, 3], 16).check(capacity=capacity, rotate=rotate, on_device=True, tile=SMALL)


def test_no_grid_changes_a_byte() -> None:
    for blocks in (1, 2, 5, 64):
        Bytes([5, 0, 9, 2], 100).check(tile=Tile(16, 4, blocks), rotate=2)


def test_splits_on_the_host_are_copied_once() -> None:
    out = torch.empty(4, 4)
    calls = [Gather(torch.zeros(2, dtype=torch.int64), 0, 0, out, (1, 3)) for _ in range(2)]
    assert calls[0].device_splits is calls[1].device_splits
    assert calls[0].device_splits.tolist() == [1, 3]


def test_a_captured_graph_keeps_its_table_and_kernels_in_flight_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing, waits = [False], []
    monkeypatch.setattr(call, "_tables", {})
    monkeypatch.setattr(call, "_captured", {})
    monkeypatch.setattr(torch.Tensor, "to", lambda self, _: self)  # there is no GPU to copy to
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    gpu = torch.device("cuda", 0)
    address = call._on_device((3, 1), gpu).data_ptr()
    freed = weakref.ref(call._on_device((2, 2), gpu))
    capturing[0] = True
    assert call._on_device((3, 1), gpu).data_ptr() == address  # a graph holds this address from now on
    with pytest.raises(CaptureError, match="make this call once before the capture"):
        call._on_device((0, 4), gpu)
    capturing[0] = False
    for n in range(call._MOST_TABLES + 1):
        call._on_device((n, 9), gpu)
    assert waits == [gpu], "before tables are let go that kernels on other streams may read"
    assert freed() is None and len(call._tables) < call._MOST_TABLES
    assert call._captured[address].tolist() == [3, 1]


def test_many_ranks() -> None:
    Bytes([r % 3 for r in range(20)], 12).check(rotate=7, tile=SMALL)


def test_negative_counts_are_none() -> None:
    data = Bytes([2, 2], 8)
    out = torch.full((4, 8), 5, dtype=torch.int8)
    gather(Gather(data.peers, 0, 0, out, torch.tensor([-3, 2])), tile=SMALL)
    assert torch.equal(out[:2], data.rows[1]) and out[2:].eq(5).all()
