"""kernels/barrier.py in Triton's interpreter, around a real executor: what it writes, and what it makes of a fault.

The interpreter runs one rank after the other, so the peers' flags are planted; waiting itself runs on GPUs only.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from bicomm.agreement.signature import Signature, describe, hint, sign
from bicomm.contract import EXACT, ORDERED, OWNER, Contract
from bicomm.kernels import barrier
from bicomm.kernels.call import Reduce, Sync
from kernel_cases import check_owner_among_many_ranks

W, ROWS, HIDDEN = 3, 5, 24
GENERATION, FINISHED, LOST, EPOCH, OWN_HEAD, WORDS, RECORD = (
    c.value
    for c in (
        barrier.GENERATION,
        barrier.FINISHED,
        barrier.LOST,
        barrier.EPOCH,
        barrier.OWN_HEAD,
        barrier.WORDS,
        barrier.RECORD,
    )
)
RECORDS, CALL = WORDS + 2 * W, 41


class World:
    """Three ranks' operands and control words in one process, in epoch 1, about to make call 41."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.operands = [torch.randn(W * ROWS, HIDDEN, generator=generator) * 10.0**r for r in range(W)]
        self.control = [torch.zeros(barrier.control_words(W), dtype=torch.int64) for _ in range(W)]
        self.pages = [torch.zeros(barrier.page_words(W), dtype=torch.int64) for _ in range(W)]
        for words in self.control:
            words[GENERATION], words[EPOCH] = CALL - 1, 1
        self.addresses = torch.tensor([words.data_ptr() for words in self.control])
        self.told = sign("combine", torch.float32, ORDERED, HIDDEN, (0, 256), W * ROWS, (ROWS,) * W)

    def plant(self, rank: int, others: list[int], told: Signature | None = None) -> None:
        """Let `others` have arrived at `rank` with this header, and have left."""
        told = told or self.told
        for other in others:
            self.control[rank][WORDS + other] = self.arrival(told)
            self.control[rank][WORDS + W + other] = CALL << 24
            self.control[other][OWN_HEAD : OWN_HEAD + 3] = torch.tensor([told.what, told.shape, told.tokens])

    def arrival(self, told: Signature | None = None) -> int:
        return (CALL << 24) + (told or self.told).mark

    def reduce(self, rank: int, module: str = "ordered") -> torch.Tensor:
        from bicomm.kernels import exact, ordered

        told = self.told
        words = (told.what, told.shape, told.tokens, told.mark)
        sync = Sync(self.addresses, self.control[rank], self.pages[rank], *words, patience=1, soft=True)
        out = torch.full((ROWS, HIDDEN), 7.0)
        call = Reduce(
            peers=torch.tensor([x.data_ptr() for x in self.operands]),
            offset=0,
            rank=rank,
            hidden=HIDDEN,
            out=out,
            start=rank * ROWS * HIDDEN,
            count=ROWS * HIDDEN,
            sync=sync,
        )
        return ordered.reduce(call) if module == "ordered" else exact.reduce(call)

    def want(self, rank: int, contract: Contract = ORDERED) -> torch.Tensor:
        return contract.sum([x[rank * ROWS : (rank + 1) * ROWS] for x in self.operands])


def test_a_call_tells_all_peers_and_counts_on() -> None:
    world = World()
    for rank in range(W):
        world.plant(rank, [r for r in range(W) if r != rank])
        assert torch.equal(world.reduce(rank).view(torch.int32), world.want(rank).view(torch.int32))
        assert world.control[rank][GENERATION] == CALL
        assert world.control[rank][FINISHED] == 0
        assert world.pages[rank].eq(0).all()
        for peer in range(W):
            assert world.control[peer][WORDS + rank] == world.arrival()
            assert world.control[peer][WORDS + W + rank] == CALL << 24


def test_the_exact_executor_has_the_same_frame() -> None:
    world = World()
    world.plant(1, [0, 2])
    assert torch.equal(world.reduce(1, "exact").view(torch.int32), world.want(1, EXACT).view(torch.int32))


def test_a_missing_rank_costs_one_wait_and_leaves_a_record_everywhere() -> None:
    world = World()
    world.plant(0, [1])
    assert world.reduce(0).isnan().all()
    for peer in range(W):
        assert world.control[peer][LOST] == 1
        assert world.control[peer][RECORDS : RECORDS + RECORD].tolist() == [1, 1 << 2, 0, CALL << 2]
    assert world.pages[0][barrier.PAGE_LOST.value] == 1
    assert world.control[0][GENERATION] == CALL - 1, "a lost call does not count"


def test_after_a_fault_a_late_rank_gets_nan_and_does_not_leave() -> None:
    world = World()
    world.plant(0, [1])
    world.reduce(0)
    world.plant(2, [0, 1])  # all flags are there, but the group has given up
    assert world.reduce(2).isnan().all()
    assert world.control[0][WORDS + W + 2] == 0
    assert world.pages[2][barrier.PAGE_LOST.value] == 1


def test_a_new_epoch_does_not_take_old_flags_for_new() -> None:
    world = World()
    world.plant(0, [1, 2])
    world.control[0][GENERATION], world.control[0][EPOCH] = CALL, 2  # recovered: the flags of call 41 are behind now
    assert world.reduce(0).isnan().all()


def test_leaving_waits_too() -> None:
    world = World()
    world.plant(0, [1, 2])
    world.control[0][WORDS + W + 2] = 0  # rank 2 arrived and has not left
    assert torch.equal(world.reduce(0), world.want(0))
    assert world.control[1][RECORDS : RECORDS + RECORD].tolist() == [1, 1 << 2, 0, CALL << 2 | 1]


def test_two_warps_still_reach_more_than_64_ranks() -> None:
    check_owner_among_many_ranks("cpu")


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("contract", sign("combine", torch.float32, EXACT, HIDDEN, (0, 256), W * ROWS, (ROWS,) * W)),
        ("dtype", sign("combine", torch.bfloat16, ORDERED, HIDDEN, (0, 256), W * ROWS, (ROWS,) * W)),
        ("hidden", sign("combine", torch.float32, ORDERED, HIDDEN + 1, (0, 256), W * ROWS, (ROWS,) * W)),
        ("rows", sign("combine", torch.float32, ORDERED, HIDDEN, (0, 256), W * ROWS + 1, (ROWS,) * W)),
        ("splits", sign("combine", torch.float32, ORDERED, HIDDEN, (0, 256), W * ROWS, (ROWS + 1, ROWS - 1, ROWS))),
        ("place", sign("combine", torch.float32, ORDERED, HIDDEN, (0, 512), W * ROWS, (ROWS,) * W)),
        ("dispatch", sign("dispatch", torch.float32, None, HIDDEN, (0, 256), ROWS, (ROWS,) * W)),
        ("gradient=x", sign("combine", torch.float32, ORDERED, HIDDEN, (0, 256), W * ROWS, (ROWS,) * W, gradient="x")),
    ],
)
def test_headers_that_differ_reach_the_host(field: str, other: Signature) -> None:
    world = World()
    world.plant(0, [1])
    world.plant(0, [2], other)
    assert world.reduce(0).isnan().all()
    page = world.pages[0]
    assert page[barrier.PAGE_LOST.value] == 1 and page[barrier.PAGE_DIFFERENT.value] == CALL
    start = barrier.PAGE_HEADS.value
    heads = page[start : start + 3 * W].view(W, 3).tolist()
    assert heads[0] == [world.told.what, world.told.shape, world.told.tokens]
    assert describe(*heads[0]) == describe(*heads[1])
    assert describe(*heads[0]) != describe(*heads[2])
    assert field in describe(*heads[2])
    assert ("requires_grad_()" in hint(heads[0], heads[2])) == field.startswith("gradient")
    assert not hint(heads[0], heads[1])


def test_every_part_of_a_header_is_told_apart_and_read_back() -> None:
    gradients = ("", "x", "rows", "weights", "rows+weights")
    told = {
        (g, p, s): sign("combine_rows", torch.bfloat16, OWNER, 8, (1, 512), None, gradient=g, slots=s, product=p)
        for g, p, s in itertools.product(gradients, (None, torch.float32, torch.bfloat16), (1, 8))
    }
    assert len({each.mark for each in told.values()}) == len(told) == 30
    for (gradient, product, slots), each in told.items():
        text = describe(each.what, each.shape, each.tokens)
        named = "no weights" if product is None else f"product {str(product).removeprefix('torch.')}"
        assert text == (
            f"combine_rows(contract=owner/1, dtype=bfloat16, hidden=8, slots={slots}, {named}, "
            f"gradient={gradient or 'none'}, place=arena 1, 512 bytes in)"
        )
    widest = sign("combine", torch.float32, Contract("window", (128, 512, 512)), 2**31 - 1, (255, 0), 2**31, (1, 2))
    assert max(widest.what, widest.shape, widest.tokens) < 2**63, "they are int64 words"
    with pytest.raises(TypeError, match="dispatch does not carry qint8"):
        sign("dispatch", torch.qint8, None, 8, (0, 0), 4)


def test_a_window_is_told_apart_by_its_parameters() -> None:
    windows = [Contract("window", p) for p in ((16, 95, 86), (16, 95, 85))]
    told = [sign("combine", torch.float32, window, 8, (0, 0), 4, (2, 2)) for window in windows]
    assert told[0] != told[1]
    assert "window(16,95,86)/1" in describe(told[0].what, told[0].shape, told[0].tokens)
