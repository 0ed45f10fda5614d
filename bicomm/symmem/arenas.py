"""The symmetric buffers of one communicator: sized once, grown collectively, handed out by size."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bicomm.errors import CaptureError, NoRoom
from bicomm.symmem.buffer import SymmetricBuffer, address_of, align

_HEADROOM = 256 << 20  # bytes that an arena may be larger than what was asked for


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """A piece of one arena, at the same (arena, offset) on every rank."""

    arena: int
    offset: int
    nbytes: int
    buffer: SymmetricBuffer

    @property
    def mark(self) -> tuple[int, int]:
        """What a header says of it."""
        return (self.arena, self.offset)

    def view(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int | None = None) -> Tensor:
        """This place as a tensor, on this rank or on a peer that the host can read."""
        return self.buffer.view(self.offset, shape, dtype, rank)


class Arenas:
    """allocate(nbytes): makes a buffer on all ranks together, or raises on all of them."""

    def __init__(self, allocate: Callable[[int], SymmetricBuffer]) -> None:
        self._allocate = allocate
        self._buffers: dict[int, SymmetricBuffer] = {}
        self._retired: list[SymmetricBuffer] = []
        self.made = 0  # how many arenas there ever were: the next one's number

    def take(self, nbytes: int) -> Place | None:
        """A place that fits, newest arena first; None where the arenas must grow. Not collective."""
        for number in sorted(self._buffers, reverse=True):
            offset = self._buffers[number].take(nbytes)
            if offset is not None:
                return Place(number, offset, nbytes, self._buffers[number])
        return None

    def grow(self, nbytes: int) -> None:
        """Make room for `nbytes` more, on all ranks together. An arena that nobody uses is given back first.

        Nothing that is in use moves: a captured graph or an acquired buffer keeps its address.
        """
        largest = max((b.capacity for b in self._buffers.values()), default=0)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"this call needs {nbytes:,} bytes of symmetric memory and the communicator has {largest:,}, and a "
                f"CUDA graph cannot hold an allocation: before capturing, make the communicator with max_tokens and "
                f"hidden large enough, call comm.reserve(tokens, hidden), or run this call once outside the graph"
            )
        self._buffers = {n: b for n, b in self._buffers.items() if b.in_use or b.pinned}
        enough = align(max(nbytes, 1))
        ample = align(max(enough, min(2 * largest, enough + _HEADROOM)))
        try:
            made = self._allocate(ample)
        except NoRoom:  # on all ranks
            if ample == enough:
                raise
            made = self._allocate(enough)
        self._buffers[self.made] = made
        self.made += 1

    def release(self, place: Place) -> None:
        """Take a place back."""
        place.buffer.give(place.offset)

    def layout(self) -> tuple[int, int]:
        """Bytes handed out, and a check sum of where: equal on ranks whose next place will be the same."""
        places = [(number, buffer.capacity, buffer.places()) for number, buffer in sorted(self._buffers.items())]
        in_use = sum(buffer.in_use for buffer in self._buffers.values())
        return in_use, zlib.crc32(repr((self.made, places)).encode())

    def restart(self, made: int) -> None:
        """Go on without the arenas there are, and count on from `made`. Who holds a place in one may still use it: some
        ranks may hold places that others do not, so nothing new is put beside them."""
        self._retire(list(self._buffers))
        self.made = made

    def layouts(self) -> dict[int, int]:
        """Of every arena, by number, a check sum of what is handed out."""
        return {number: zlib.crc32(repr(buffer.places()).encode()) for number, buffer in self._buffers.items()}

    def realign(self, everyones: Sequence[dict[int, int]], made: int) -> None:
        """Go on with those arenas alone that all ranks have, with the same handed out, and count on from `made`.

        everyones: the `layouts` of every rank. A fault may have caught some ranks before and some after a growth.
        """
        shared = set.intersection(*(set(layouts.items()) for layouts in everyones))
        common = {number for number, _ in shared}
        self._retire([number for number in self._buffers if number not in common])
        self.made = made

    def _retire(self, numbers: Sequence[int]) -> None:
        """Hand out no more of these arenas. What is in use there, or in a captured graph, stays."""
        gone = [self._buffers.pop(number) for number in numbers]
        self._retired = [b for b in [*self._retired, *gone] if b.in_use or b.pinned]

    def find(self, x: Tensor) -> SymmetricBuffer | None:
        """The arena that a tensor's memory lies in."""
        address = address_of(x)
        for buffer in [*self._buffers.values(), *self._retired]:
            start = buffer.local.data_ptr()
            if start <= address < start + buffer.capacity:
                return buffer
        return None

    def clear(self) -> None:
        """Give the memory back, except what captured graphs hold: their addresses stay, and so they stay valid.

        Places that are still out keep their own memory until they are dropped.
        """
        self._buffers = {number: buffer for number, buffer in self._buffers.items() if buffer.pinned}
        self._retired = [buffer for buffer in self._retired if buffer.pinned]

    @property
    def captured(self) -> int:
        """Bytes that captured graphs hold on this rank."""
        return sum(buffer.capacity for buffer in self._held() if buffer.pinned)

    @property
    def capacity(self) -> int:
        """Bytes held on this rank."""
        return sum(buffer.capacity for buffer in self._held())

    @property
    def in_use(self) -> int:
        """Bytes handed out."""
        return sum(buffer.in_use for buffer in self._held())

    def _held(self) -> list[SymmetricBuffer]:
        self._retired = [buffer for buffer in self._retired if buffer.in_use or buffer.pinned]
        return [*self._buffers.values(), *self._retired]
