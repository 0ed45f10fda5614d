"""The gradients of combine_rows: deterministic, and the same for every world size and placement of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bicomm.contract import EXACT

if TYPE_CHECKING:
    from bicomm.communicator import Communicator

_CHUNK = 1 << 22  # elements of addends at a time


def of_rows(
    comm: Communicator, grad: Tensor, rows: Tensor, row_of_slot: Tensor, rank_of_slot: Tensor, weights: Tensor | None
) -> Tensor:
    """To a row: the exact sum, over the slots that used it, of weight * the gradient of the slot's token.

    grad [t, H], the maps and weights [t, K] are of this rank's tokens; rows [R, H] of its experts. Returns [R, H] in
    the dtype of rows.
    """
    if row_of_slot.shape[1] == 0:  # on all ranks
        return torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)

    def spread(x: Tensor) -> Tensor:
        return comm._dispatch(x.contiguous(), None, None, None)

    everywhere = spread(grad)
    row_of_slot, rank_of_slot = spread(row_of_slot), spread(rank_of_slot)
    weights = None if weights is None else spread(weights)
    here = rank_of_slot == comm.rank
    token, _ = here.nonzero(as_tuple=True)
    row = row_of_slot[here].long()
    scale = None if weights is None else weights[here]

    order = torch.argsort(row, stable=True)
    token, scale = token[order], None if scale is None else scale[order]
    uses = torch.bincount(row, minlength=rows.shape[0])
    first = uses.cumsum(0) - uses
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for count in uses.unique().tolist():
        if count == 0:
            continue
        used = (uses == count).nonzero()[:, 0]
        for some in used.split(max(1, _CHUNK // (count * rows.shape[1]))):
            slot = first[some].unsqueeze(0) + torch.arange(count, device=some.device).unsqueeze(1)
            addends = everywhere[token[slot]].float()
            if scale is not None:
                addends = addends * scale[slot].unsqueeze(-1)
            total[some] = EXACT.sum(addends)
    return total.to(rows.dtype)


def of_weights(
    comm: Communicator, grad: Tensor, rows: Tensor, row_of_slot: Tensor, rank_of_slot: Tensor, weights: Tensor | None
) -> Tensor:
    """To a weight: the exact sum of the fp32 products of its row and the gradient of its token; 0 if not routed.

    Returns fp32 [t, K]. The rounding of a product to bf16 in the forward pass is taken for the identity.
    """
    result = torch.zeros(row_of_slot.shape, dtype=torch.float32, device=rows.device)
    for slot in range(row_of_slot.shape[1]):  # one at a time: K times the memory otherwise
        ranks = rank_of_slot[:, slot : slot + 1]
        fetched = comm._combine_rows(rows, row_of_slot[:, slot : slot + 1], ranks, None, torch.float32, None, None)
        if grad.shape[0]:
            products = EXACT.sum((fetched * grad.float()).t())
            result[:, slot] = torch.where(ranks[:, 0] < 0, 0.0, products)
    return result
