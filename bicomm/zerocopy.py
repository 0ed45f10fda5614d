"""Buffers that callers hold: experts write their output where the other ranks read it, so that nothing is copied."""

from __future__ import annotations

import torch
from torch import Tensor

from bicomm.symmem.arenas import Place
from bicomm.symmem.buffer import address_of
from bicomm.transports.base import Transport

_POISON = 0xA5


class Acquired:
    """The buffers that one rank's caller has acquired.

    debug: a released buffer is filled with 0xA5 and kept until the next call has seen that nobody wrote to it.
    """

    def __init__(self, transport: Transport, debug: bool) -> None:
        self._transport, self.debug = transport, debug
        self._places: dict[int, tuple[Place, Tensor]] = {}
        self._released: list[tuple[Place, Tensor]] = []

    def __len__(self) -> int:
        return len(self._places)

    def hold(self, place: Place, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """A place that was taken, as a tensor."""
        tensor = place.view(shape, dtype)
        self._places[address_of(tensor)] = (place, tensor.view(-1).view(torch.uint8))
        return tensor

    def give(self, tensor: Tensor) -> None:
        """Take a tensor back."""
        place, data = self._places.pop(address_of(tensor))
        if self.debug:
            data.fill_(_POISON)
            self._released.append((place, data))
        else:
            self._transport.release(place)

    def check_released(self, rank: int) -> None:
        """Raise RuntimeError where a released buffer was written to, and let go of it. Only in debug mode."""
        released, self._released = self._released, []
        for place, _ in released:
            self._transport.release(place)
        for place, data in released:
            if bool((data != _POISON).any()):
                raise RuntimeError(
                    f"rank {rank}: a buffer of {place.nbytes:,} bytes was written after it was released. Write the "
                    f"partials inside the `with comm.acquire(...)` block, and combine them there"
                )

    def forget_released(self) -> None:
        """Let go of released buffers without a look: ranks that a fault parted hold different ones."""
        released, self._released = self._released, []
        for place, _ in released:
            self._transport.release(place)

    def place_of(self, x: Tensor) -> Place | None:
        """Where an operand lies, if it is a whole acquired buffer or its first rows: then nothing is copied."""
        found = self._places.get(address_of(x))
        if found is None or not x.is_contiguous() or x.numel() * x.element_size() > found[0].nbytes:
            return None
        return found[0]

    def check_operand(self, x: Tensor, out: Tensor | None) -> None:
        """Raise ValueError for an operand in memory that was given back, or a result where others read the operand."""
        at = address_of(x)
        inside = any(start <= at < start + max(place.nbytes, 1) for start, (place, _) in self._places.items())
        if not inside and self._transport.find(x):
            raise ValueError(
                "the operand lies in a buffer that was released, where other calls put their data: combine it inside "
                "the `with comm.acquire(...)` block"
            )
        place = self.place_of(x)
        if out is None or place is None:
            return
        first = address_of(out)
        if first < at + place.nbytes and at < first + out.numel() * out.element_size():
            raise ValueError(
                "out lies in the operand's own buffer, which other ranks still read: give it another place"
            )
