"""CASES.md 39: what torch's symmetric memory says where it cannot be had, with the cause and the cure beside it."""

from __future__ import annotations

import pytest
import torch

from bicomm.errors import NoRoom, NoSharedMemory
from bicomm.symmem import cuda


@pytest.mark.parametrize(
    ("torch_says", "we_add"),
    [
        ("CUDASymmetricMemory: bind failed: File name too long", "$TMPDIR"),
        ("connect: unix socket /very/long/path", "$TMPDIR"),
        ("pidfd_getfd: Operation not permitted\nException raised from ...", "--cap-add=SYS_PTRACE"),
        ("detected allocations from overlapping devices from different ranks", "ALLOW_OVERLAPPING_DEVICES=1"),
        ("CUDA driver error: out of memory", "1,024 bytes on cuda:0"),
    ],
)
def test_a_failed_allocation_names_cause_and_cure(
    monkeypatch: pytest.MonkeyPatch, torch_says: str, we_add: str
) -> None:
    import torch.distributed._symmetric_memory as symmetric

    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError(torch_says)

    monkeypatch.setattr(symmetric, "empty", fail)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    with pytest.raises(NoSharedMemory) as caught:
        cuda.make_buffer(None, torch.device("cuda", 0), 1000)  # type: ignore[arg-type]
    text = str(caught.value)
    assert torch_says.splitlines()[0] in text and we_add in text
    assert "Exception raised" not in text
    assert isinstance(caught.value, NoRoom) == ("memory" in torch_says and "out of" in torch_says)
