"""What torch's symmetric memory says where it cannot be had, with the cause and the cure beside it."""

from __future__ import annotations

from types import SimpleNamespace

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


@pytest.mark.parametrize("multicast", [0, 1 << 40])
def test_addresses_lead_to_the_tensor_wherever_it_lies_in_its_allocation(
    monkeypatch: pytest.MonkeyPatch, multicast: int
) -> None:
    """torch counts an allocation's offset into the multicast address, and not into the peers' (read in 2.13)."""
    import torch.distributed._symmetric_memory as symmetric

    local, inside = torch.zeros(1024, dtype=torch.uint8), 4096
    base = local.data_ptr() - inside
    handle = SimpleNamespace(
        rank=1, buffer_ptrs=[7 << 20, base], offset=inside, multicast_ptr=multicast and multicast + inside
    )
    monkeypatch.setattr(symmetric, "rendezvous", lambda *_: handle)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    buffer = cuda.share(SimpleNamespace(group_name="0"), torch.device("cpu"), local)  # type: ignore[arg-type]
    assert buffer.device_addresses.tolist() == [(7 << 20) + inside, local.data_ptr()]
    assert buffer.multicast == (multicast and multicast + inside)
