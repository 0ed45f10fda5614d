"""The order of additions in the blocked auxiliary loss: what the definition and the kernels have in common."""

from __future__ import annotations

import dataclasses

import torch

BLOCKS = 256
TILE = 2048  # lanes of a block that add in parallel; part of the order, so not to be tuned without a new contract
WIDE_COUNTS = (torch.int32, torch.int64)  # may exceed 2**24, so they enter as a sum of two fp32 values


@dataclasses.dataclass(frozen=True)
class Partition:
    """Who adds what to whom: fixed by rows and cols alone.

    blocks = max(1, min(rows, 256)) blocks of `rows_per_block` neighbouring rows; in a block, lane (i, c) of a tile
    [tile_rows, tile_cols] adds rows i, i + tile_rows, ... in that order; tiles of columns follow each other.
    """

    blocks: int
    rows_per_block: int
    tile_rows: int
    tile_cols: int

    @classmethod
    def of(cls, rows: int, cols: int) -> Partition:
        blocks = max(1, min(rows, BLOCKS))
        per_block = -(-rows // blocks)
        tile_cols = min(1 << max(cols - 1, 0).bit_length(), 1024, TILE)
        tile_rows = max(1, min(1 << max(per_block - 1, 0).bit_length(), TILE // tile_cols))
        return cls(blocks, per_block, tile_rows, tile_cols)

    @property
    def steps(self) -> int:
        """Tiles of rows in a block."""
        return -(-self.rows_per_block // self.tile_rows)
