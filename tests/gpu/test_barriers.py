"""The barriers around a kernel, compiled, with what the peers would push planted: what compute-sanitizer can watch.

Under it kernels may run one after the other, so ranks that wait for each other cannot be used there.
"""

from __future__ import annotations

import torch

from bicomm.agreement.signature import sign
from bicomm.contract import EXACT, ORDERED, Contract
from bicomm.kernels import barrier, exact, ordered
from bicomm.kernels.call import Reduce, Sync
from kernel_cases import Ranks, assert_bits, check_owner_among_many_ranks, family

GPU = "cuda"
WORLD, ROWS, CALL = 3, 4, 41


def check_three_ranks(contract: Contract, hidden: int) -> None:
    data = family("tie_dust", WORLD, [WORLD * ROWS, hidden])
    ranks = Ranks(data, device=GPU)
    told = sign("combine", torch.float32, contract, hidden, (0, 256), WORLD * ROWS, (ROWS,) * WORLD)
    control = torch.zeros(WORLD, barrier.control_words(WORLD), dtype=torch.int64, device=GPU)
    control[:, barrier.GENERATION.value], control[:, barrier.EPOCH.value] = CALL - 1, 1
    arrivals = barrier.WORDS.value
    for rank in range(WORLD):
        for other in {0, 1, 2} - {rank}:
            control[rank, arrivals + other] = (CALL << 24) + told.mark
            control[rank, arrivals + WORLD + other] = CALL << 24
    addresses = torch.tensor([words.data_ptr() for words in control], device=GPU)
    for rank in range(WORLD):
        page = torch.zeros(barrier.page_words(WORLD), dtype=torch.int64).pin_memory()
        sync = Sync(addresses, control[rank], page, told.what, told.shape, told.tokens, told.mark, patience=10**9)
        out = torch.empty(ROWS, hidden, device=GPU)
        start, count = rank * ROWS * hidden, ROWS * hidden
        call = Reduce(ranks.peers, ranks.offset, rank, hidden, out, start=start, count=count, sync=sync)
        (ordered if contract == ORDERED else exact).reduce(call)
        assert_bits(out.cpu(), contract.sum(data[:, rank * ROWS : (rank + 1) * ROWS]))
        assert control[rank, barrier.GENERATION.value] == CALL
        assert not page.any()


def test_three_ranks_in_turn() -> None:
    for contract in (ORDERED, EXACT):
        for hidden in (40, 7):
            check_three_ranks(contract, hidden)


def test_two_warps_still_reach_more_than_64_ranks() -> None:
    check_owner_among_many_ranks(GPU)
