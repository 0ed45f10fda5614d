"""The executors' kernels, compiled for a GPU, against the contracts on the CPU, bit for bit: W buffers on one GPU."""

from __future__ import annotations

import pytest
import torch

from bicomm import barrier, exact, multimem, ordered
from bicomm.call import Reduce, Sync, Tile
from bicomm.contract import EXACT, ORDERED, Contract
from bicomm.signature import sign
from kernel_cases import (
    REDUCTIONS,
    WINDOWS,
    Bytes,
    Pushed,
    Ranks,
    assert_bits,
    check_owner,
    check_reduce,
    every_family,
    family,
    routing,
)

GPU = "cuda"


def check_all_on_last_rank(contract: Contract, data: torch.Tensor, **options: object) -> None:
    """All rows of data [W, rows, columns] belong to the last rank."""
    splits = [*[0] * (len(data) - 1), data.shape[1]]
    check_reduce(contract, Ranks(data, device=GPU), splits, len(data) - 1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("contract", REDUCTIONS, ids=str)
def test_every_family_of_addends_memcheck(contract: Contract) -> None:
    check_all_on_last_rank(contract, every_family(8, 512))
    check_all_on_last_rank(contract, every_family(8, 512, seed=1), out_dtype=torch.bfloat16)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 6, 12, 17, 72])
def test_any_number_of_ranks(world: int) -> None:
    for contract in (ORDERED, EXACT):
        check_all_on_last_rank(contract, every_family(world, 256), rotate=world // 2 if world <= 8 else 0)


@pytest.mark.parametrize("hidden", [1, 7, 2050, 2880, 4097])
def test_any_hidden_size_and_uneven_tokens_memcheck(hidden: int) -> None:
    splits = [3, 0, 1, 5, 0]
    for contract in (ORDERED, EXACT, WINDOWS[0]):
        data = family("split_cancellation", 5, [sum(splits), hidden])
        for rank in range(5):
            check_reduce(contract, Ranks(data, device=GPU), splits, rank, on_device=rank % 2 == 0)


def test_operands_and_results_that_are_not_aligned() -> None:
    data = family("tie_dust", 5, [9, 36])
    for lead, shift in ((1, 0), (2, 0), (3, 1), (4, 2)):
        check_reduce(EXACT, Ranks(data, lead, GPU), [2, 3, 1, 0, 3], 1, shift=shift)
        check_reduce(ORDERED, Ranks(data, lead, GPU), [2, 3, 1, 0, 3], 4, on_device=True, shift=shift)


@pytest.mark.parametrize("weighted", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_owner_memcheck(dtype: torch.dtype, weighted: torch.dtype | None) -> None:
    product = weighted or torch.float32
    for hidden, slots, integers in ((2048, 8, torch.int64), (7, 3, torch.int32), (1, 1, torch.int64)):
        case = routing(
            5,
            11,
            hidden,
            13,
            slots,
            dtype=dtype,
            weighted=weighted is not None,
            product_dtype=product,
            integers=integers,
        )
        check_owner(case, device=GPU, out_dtype=torch.bfloat16 if hidden == 7 else torch.float32, there=9)


def test_dispatch_memcheck() -> None:
    for row_bytes, dtype in ((4096, torch.bfloat16), (28, torch.float32), (7, torch.int8), (24, torch.int64)):
        Bytes([3, 0, 5, 1], row_bytes, device=GPU).check(dtype=dtype, on_device=row_bytes == 28)
        Bytes([3, 0, 5, 1], row_bytes, lead=64, device=GPU).check(dtype=dtype, capacity=6)


def test_the_switchs_kernels_with_their_instructions_left_out() -> None:
    word = torch.ones(1, dtype=torch.int32, device=GPU)

    def launch(call: Reduce, tile: Tile | None) -> torch.Tensor:
        return multimem.reduce(call, multicast=0, trusted=word, hardware=False, tile=tile)

    for hidden in (2048, 2050, 7):
        data = family("split_cancellation", 8, [24, hidden])
        for rank in (0, 3, 7):
            check_reduce(
                EXACT, Ranks(data, device=GPU), [2, 0, 5, 4, 1, 6, 3, 3], rank, launch=launch, on_device=rank == 3
            )
    Pushed([3, 0, 2], 40, torch.bfloat16, device=GPU).check()


@pytest.mark.parametrize("module", [ordered, exact])
def test_more_than_two_to_the_31_elements(module: object) -> None:
    """One buffer of 8.6 GB stands for all ranks; the slice lies beyond 2**31 elements."""
    hidden, rows = 7168, 300_000
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip(f"needs 12 GiB of free GPU memory, there are {torch.cuda.mem_get_info()[0] >> 30}")
    buffer = torch.empty(rows, hidden, device=GPU)
    tail = torch.randn(4, hidden)
    buffer[-4:] = tail.to(GPU)
    out = torch.empty(4, hidden, device=GPU)
    call = Reduce(
        peers=torch.tensor([buffer.data_ptr()] * 3, device=GPU),
        offset=0,
        rank=2,
        hidden=hidden,
        out=out,
        start=(rows - 4) * hidden,
        count=4 * hidden,
    )
    module.reduce(call)  # type: ignore[attr-defined]
    contract = ORDERED if module is ordered else EXACT
    assert_bits(out.cpu(), contract.sum([tail] * 3))


def test_barriers_around_a_kernel_memcheck() -> None:
    """Three ranks, one after the other: what the peers would have pushed is planted, so that no kernel waits."""
    world, rows, hidden, call_number = 3, 4, 40, 41
    data = family("tie_dust", world, [world * rows, hidden])
    ranks = Ranks(data, device=GPU)
    told = sign("combine", torch.float32, ORDERED, hidden, (0, 256), world * rows, (rows,) * world)
    control = torch.zeros(world, barrier.control_words(world), dtype=torch.int64, device=GPU)
    control[:, barrier.GENERATION.value], control[:, barrier.EPOCH.value] = call_number - 1, 1
    arrivals = barrier.WORDS.value
    for rank in range(world):
        for other in {0, 1, 2} - {rank}:
            control[rank, arrivals + other] = (call_number << 24) + told.mark
            control[rank, arrivals + world + other] = call_number << 24
    addresses = torch.tensor([words.data_ptr() for words in control], device=GPU)
    for rank in range(world):
        page = torch.zeros(barrier.page_words(world), dtype=torch.int64).pin_memory()
        sync = Sync(addresses, control[rank], page, told.what, told.shape, told.tokens, told.mark, patience=10**9)
        out = torch.empty(rows, hidden, device=GPU)
        call = Reduce(ranks.peers, 0, rank, hidden, out, start=rank * rows * hidden, count=rows * hidden, sync=sync)
        ordered.reduce(call)
        assert_bits(out.cpu(), ORDERED.sum(data[:, rank * rows : (rank + 1) * rows]))
        assert control[rank, barrier.GENERATION.value] == call_number
        assert not page.any()
