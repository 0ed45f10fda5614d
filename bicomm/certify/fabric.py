"""What the measuring needs of a fabric: one call that adds the ranks' fp32 values and says what a rank reads."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

BLOCKS = (8, 1, 32, 108)  # numbers of thread blocks that a reading kernel is started with; the first is the usual one
ALIGNMENTS = (0, 4, 8, 12)  # bytes by which the first element lies past a multiple of 16


class Fabric(Protocol):
    """Something that adds fp32 values of W ranks: the NVLink switch through `multimem.ld_reduce`, or an emulation.

    name        "nvls", or "emulated:" and a name. Only "nvls" is ever trusted.
    world_size  W, the number of addends of a sum.
    device      where addends and results live.
    readers     the ranks that this process can read as: its own one on hardware, all of them in an emulation.
    """

    @property
    def name(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def readers(self) -> tuple[int, ...]: ...

    def reduce(self, addends: Tensor, *, rank: int, call: int, blocks: int, alignment: int) -> Tensor:
        """What `rank` reads, fp32 [N], before any clean-up, for addends fp32 [W, N] that all ranks know.

        call: how many reductions went before. blocks, alignment: how the reading kernel is started and where the
        data lie (an emulation may depend on each, as bad hardware may). Collective on hardware: every rank calls it,
        with the same arguments but for `rank`.
        """
        ...

    def traffic(self) -> AbstractContextManager[None]:
        """While the block runs, other transfers keep the links busy."""
        ...
