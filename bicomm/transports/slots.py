"""The `owner` combine in plain torch: the sum of a token's top-k expert rows, given the rows of every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bicomm.contract import Contract, round_output
from bicomm.transports.base import Rows

_CHUNK = 1 << 20  # elements of one slot's addend at a time


def weigh(rows: Tensor, weights: Tensor | None, product_dtype: torch.dtype) -> Tensor:
    """The addends weight * row: rows [..., H], weights [...]; rounded to fp32 and, for bf16, once more. fp32."""
    if weights is None:
        return rows.float()
    product = rows.float() * weights.float().unsqueeze(-1)
    return product.to(product_dtype).float()


def check_slots(operands: Rows, rows_of_rank: Sequence[int], rank: int) -> None:
    """Raise IndexError where a slot names a rank or a row that does not exist, with the first such slot."""
    ranks, rows = operands.rank_of_slot, operands.row_of_slot
    counts = torch.tensor([*rows_of_rank, 0], dtype=torch.int64, device=ranks.device)
    limit = counts[ranks.clamp(-1, len(rows_of_rank) - 1).long()]
    wrong = (ranks < -1) | (ranks >= len(rows_of_rank)) | ((ranks >= 0) & ((rows < 0) | (rows >= limit)))
    if bool(wrong.any()):
        token, slot = (int(i) for i in wrong.nonzero()[0])
        raise IndexError(
            f"token {token}, slot {slot} of rank {rank} names row {int(rows[token, slot])} of rank "
            f"{int(ranks[token, slot])}; the ranks have {list(rows_of_rank)} rows (-1 as a rank means not routed)"
        )


def sum_slots(peers: Sequence[Tensor], operands: Rows, contract: Contract, out: Tensor) -> None:
    """out [t, H] = the contract's sum over each token's slots of its rows; peers: every rank's rows [R_r, H].

    A slot that is not routed adds nothing, not even a NaN: its row is not read. A token without slots gives +0.
    """
    tokens, slots = operands.row_of_slot.shape
    step = max(1, _CHUNK // max(1, out.shape[1]))
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        shape = (max(slots, 1), stop - start, out.shape[1])
        addends = torch.zeros(shape, dtype=torch.float32, device=out.device)
        for slot in range(slots):
            ranks, rows = operands.rank_of_slot[start:stop, slot], operands.row_of_slot[start:stop, slot]
            for rank, theirs in enumerate(peers):
                here = (ranks == rank).nonzero()[:, 0]
                if here.numel():
                    weights = None if operands.weights is None else operands.weights[start:stop, slot][here]
                    addends[slot][here] = weigh(theirs[rows[here].long()], weights, operands.product_dtype)
        round_output(contract.sum(addends), out[start:stop], out.dtype)
