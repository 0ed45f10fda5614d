"""One symmetric allocation, and the places handed out of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes; a place begins on two cache lines of a GPU, so 16-byte loads are always possible


def align(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def address_of(x: Tensor) -> int:
    """Where a tensor's first element lies or would lie: `data_ptr()` is 0 for a tensor without elements."""
    return x.untyped_storage().data_ptr() + int(x.storage_offset()) * x.element_size()


@dataclasses.dataclass(eq=False)
class SymmetricBuffer:
    """Memory of `capacity` bytes on every rank of a group.

    local      this rank's bytes: uint8 [capacity].
    peers      every rank's bytes where the host can read them (shared memory, local world): W uint8 tensors, or none.
    addresses  int64 [W] on the device: where each rank's bytes begin, as this rank's device sees them; None on a CPU.
    multicast  the multicast address on this rank's device, or 0.
    owner      whatever keeps the mapping alive.

    Places are handed out first fit. All ranks ask for the same sizes in the same order, so a place is the same byte
    offset on all of them; each call's header says the place, so that ranks which went out of step learn it.
    """

    local: Tensor
    peers: list[Tensor] = dataclasses.field(default_factory=list)
    addresses: Tensor | None = None
    multicast: int = 0
    owner: Any = None
    pinned: bool = False
    _used: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def capacity(self) -> int:
        """Bytes on each rank."""
        return self.local.numel()

    @property
    def in_use(self) -> int:
        """Bytes handed out and not given back."""
        return sum(self._used.values())

    @property
    def device_addresses(self) -> Tensor:
        """`addresses`, of a buffer on GPUs."""
        assert self.addresses is not None
        return self.addresses

    def take(self, nbytes: int) -> int | None:
        """Hand out `nbytes` at the first place that fits: its byte offset, or None where nothing fits."""
        need, start = align(max(nbytes, 1)), 0
        for offset in sorted(self._used):
            if offset - start >= need:
                break
            start = offset + self._used[offset]
        if start + need > self.capacity:
            return None
        self._used[start] = need
        return start

    def give(self, offset: int) -> None:
        """Take a place back."""
        del self._used[offset]

    def places(self) -> list[tuple[int, int]]:
        """Offset and bytes of what is handed out."""
        return sorted(self._used.items())

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, rank: int | None = None) -> Tensor:
        """A place as a tensor: this rank's, or a peer's where the host can read it."""
        base = self.local if rank is None else self.peers[rank]
        count = dtype.itemsize
        for extent in shape:
            count *= extent
        return base[offset : offset + count].view(dtype).view(shape)
