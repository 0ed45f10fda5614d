"""After a fault every kernel fills its result with NaN and writes nothing to other ranks; without one it works."""

from __future__ import annotations

import pytest
import torch

from bicomm.contract import EXACT, ORDERED, OWNER
from bicomm.kernels import barrier, exact, gather, multimem, ordered, owner
from bicomm.kernels.broadcast import Broadcast, broadcast
from bicomm.kernels.call import Gather, Pull, Reduce, Sync, Tile
from kernel_cases import Ranks, assert_bits, family, quiet, routing

pytestmark = quiet
W, ROWS, HIDDEN, CALL, RANK = 3, 2, 12, 9, 1
TILE = Tile(32, 4, 3)


def sync(lost: bool) -> Sync:
    """The barriers of rank 1 in call 9 of epoch 1: given up before, or with everybody there."""
    control = [torch.zeros(barrier.control_words(W), dtype=torch.int64) for _ in range(W)]
    words = control[RANK]
    for theirs in control:
        theirs[barrier.GENERATION.value], theirs[barrier.EPOCH.value] = CALL - 1, 1
    words[barrier.LOST.value] = int(lost)
    start, shift = barrier.WORDS.value, barrier.MARK_BITS.value
    words[start : start + 2 * W] = CALL << shift  # arrivals and leaves, of a header whose mark is 0
    page = torch.zeros(barrier.page_words(W), dtype=torch.int64)
    addresses = torch.tensor([theirs.data_ptr() for theirs in control])
    made = Sync(addresses, words, page, 0, 0, 0, mark=0, patience=1, soft=True)
    object.__setattr__(made, "kept", control)  # the addresses do not keep their tensors alive
    return made


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["ordered", "exact", "multimem", "owner"])
def test_sums(kernel: str, out_dtype: torch.dtype) -> None:
    data = family("tie_dust", W, [W * ROWS, HIDDEN])
    case = routing(W, 3, HIDDEN, ROWS, 2)
    want = OWNER.sum(case.addends()) if kernel == "owner" else None
    for lost in (False, True):
        spare = torch.full((ROWS + 1, HIDDEN), 7.0, dtype=out_dtype)
        out, given = spare[:ROWS], sync(lost)
        if kernel == "owner":
            ranks = Ranks(case.rows)
            maps = {"row_of_slot": case.row_of_slot, "rank_of_slot": case.rank_of_slot}
            owner.pull(Pull(ranks.peers, 0, RANK, torch.bfloat16, out, **maps, sync=given), tile=TILE)
        else:
            ranks = Ranks(data)
            call = Reduce(ranks.peers, 0, RANK, HIDDEN, out, RANK * out.numel(), out.numel(), sync=given)
            if kernel == "multimem":
                word = torch.ones(1, dtype=torch.int32)
                multimem.reduce(call, multicast=0, trusted=word, hardware=False, tile=TILE)
            else:
                (ordered if kernel == "ordered" else exact).reduce(call, tile=TILE)
            want = (ORDERED if kernel == "ordered" else EXACT).sum(data[:, ROWS : 2 * ROWS])
        assert want is not None
        assert_bits(out, torch.full_like(out, torch.nan) if lost else want.to(out_dtype))
        assert spare[ROWS].eq(7).all()
        assert int(given.mine[barrier.GENERATION.value]) == (CALL - 1 if lost else CALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_dispatch(dtype: torch.dtype) -> None:
    rows = [torch.full((2, HIDDEN), float(rank + 1)).to(dtype) for rank in range(W)]
    peers = torch.tensor([x.data_ptr() for x in rows])
    for lost in (False, True):
        out = torch.full((7, HIDDEN), 7.0).to(dtype)
        gather.gather(Gather(peers, 0, RANK, out, (2, 2, 2), sync=sync(lost)), tile=TILE)
        assert out[:6].float().isnan().all() if lost else torch.equal(out[:6].float(), torch.cat(rows).float())
        assert out[6].float().eq(7).all()


def test_pushed_rows_stay_at_home() -> None:
    results = [torch.full((6, HIDDEN), 7.0) for _ in range(W)]
    peers = torch.tensor([x.data_ptr() for x in results])
    word, counts = torch.ones(1, dtype=torch.int32), torch.tensor([2, 2, 2])
    for lost in (True, False):
        call = Broadcast(peers, 0, 0, RANK, torch.ones(2, HIDDEN), counts, 6, word, sync(lost))
        broadcast(call, hardware=False, tile=TILE)
        for result in results:
            assert result[2:4].eq(7.0 if lost else 1.0).all()
            assert result[:2].eq(7).all() and result[4:].eq(7).all()
