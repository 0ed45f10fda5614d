"""Bytes that a combine or dispatch must move, by mode and by peer: the bounds of the sweep, and what the model counts.

T tokens a rank, W ranks, H hidden, K top-k. All counts are of one rank, in bytes; ranks are alike. `link` is the larger
direction of what crosses to or from the other ranks; `memory` is what is read and written in this rank's own memory, by
whomever.
"""

from __future__ import annotations

import dataclasses

FP32, BF16 = 4, 2


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes of one rank: over its links, and in its memory."""

    link: float
    memory: float


# Which of the formulas below a series of the sweep follows.
PULL, SWITCH, OWNER, DISPATCH = "partials pulled", "switch", "rows pulled", "dispatch"
RING32, RING16, TRAVEL, ROWS, GATHER, TWO_SHOT = (
    "reduce-scatter fp32",
    "reduce-scatter bf16",
    "partials travel",
    "rows travel",
    "all-gather",
    "all-reduce",
)
TWO_SHOT16 = "all-reduce bf16"


def moved(how: str, world: int, tokens: int, hidden: int, top_k: int) -> Bytes:
    """The bytes of one call. how: one of the names above. Raises KeyError for another."""
    w, one = world, tokens * hidden
    rows = top_k * one * BF16
    away = (w - 1) / w  # of rows, where experts are spread evenly
    return {
        # The own buffer is read by all; every slice comes from all others; the result is written.
        PULL: Bytes((w - 1) * one * FP32, (w + 1) * one * FP32),
        # Every GPU sends its whole buffer into the switch, which sends one sum back.
        SWITCH: Bytes(w * one * FP32, (w + 1) * one * FP32),
        OWNER: Bytes(rows * away, rows + one * FP32),
        # The tokens are copied in, read by all, and all are written.
        DISPATCH: Bytes((w - 1) * one * BF16, (2 + 2 * w) * one * BF16),
        RING32: Bytes((w - 1) * one * FP32, (w + 1) * one * FP32),
        RING16: Bytes((w - 1) * one * BF16, (w + 1) * one * BF16),
        # Sent, received, read again by the local sum.
        TRAVEL: Bytes((w - 1) * one * FP32, (3 * w + 1) * one * FP32),
        # Sent, received, gathered into slot order (read and written), read by the sum.
        ROWS: Bytes(rows * away, 5 * rows + one * FP32),
        GATHER: Bytes((w - 1) * one * BF16, (1 + w) * one * BF16),
        # A reduce-scatter and an all-gather of its result.
        TWO_SHOT: Bytes(2 * (w - 1) * one * FP32, (2 * w + 1) * one * FP32),
        TWO_SHOT16: Bytes(2 * (w - 1) * one * BF16, (2 * w + 1) * one * BF16),
    }[how]


def bound(how: str, world: int, tokens: int, hidden: int, top_k: int, rates: dict[str, float], shared: bool) -> float:
    """Microseconds that these bytes take at the measured copy rates, whichever takes longer.

    rates: GB/s, `local_copy` (read plus written) and `peer_copy` (one way, all ranks at once). shared: all ranks live
    in one memory, whose rate `local_copy` is, so that their bytes add up and no link is crossed.
    """
    amount = moved(how, world, tokens, hidden, top_k)
    if shared:
        return world * amount.memory / rates["local_copy"] / 1e3
    return max(amount.memory / rates["local_copy"], amount.link / rates["peer_copy"]) / 1e3
