"""The executors compiled, on one GPU with W local buffers: the interpreter's questions, and those of size.

The oracle runs on the CPU. The two multimem instructions do not run here; everything around them does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from bicomm.contract import EXACT, FP64, ORDERED, OWNER, Contract
from bicomm.kernels import exact, gather, multimem, ordered, owner
from bicomm.kernels.call import Gather, Pull, Reduce, Tile
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
    launch_of,
    routing,
)

GPU = "cuda"


def wide(world: int, rows: int, hidden: int, seed: int) -> torch.Tensor:
    """fp32 [world, rows, hidden] on the CPU, exponents over +-60 binades: hardly an element that fp64 could hold."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(world, rows, hidden, generator=generator)
    return data * torch.exp2(torch.randint(-60, 61, data.shape, generator=generator).float())


def needs_memory(gigabytes: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory, there are {free:.0f}")


@pytest.mark.parametrize("contract", REDUCTIONS, ids=str)
@pytest.mark.parametrize("world", [3, 8, 17, 72])
def test_every_family_of_addends(contract: Contract, world: int) -> None:
    data = every_family(world, 1024, seed=world)
    check_reduce(contract, Ranks(data, device=GPU), [*[0] * (world - 1), data.shape[1]], world - 1)


def test_more_than_120_addends_take_narrower_slices() -> None:
    for name in ("straddle", "bin_edges", "tie_dust"):
        data = family(name, 130, [4, 256])
        check_reduce(EXACT, Ranks(data, device=GPU), [*[0] * 129, 4], 129, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("contract", [ORDERED, EXACT], ids=str)
@pytest.mark.parametrize("world", [3, 12])
def test_any_world_size_and_hidden_size(contract: Contract, world: int) -> None:
    splits = [(3 * r + 1) % 4 for r in range(world)]
    for hidden, lead in ((1, 0), (7, 1), (2050, 2), (2880, 0), (4097, 3)):
        ranks = Ranks(family("spread", world, [sum(splits), hidden]), lead, GPU)
        for rank, on_device in itertools.product({0, world - 1}, (False, True)):
            check_reduce(contract, ranks, splits, rank, on_device=on_device)


@pytest.mark.parametrize("splits", [[0, 3, 4], [3, 4, 0], [0, 0, 0], [4096, 1, 1], [1, 1, 4096]], ids=str)
def test_uneven_tokens_and_ranks_without_any(splits: Sequence[int]) -> None:
    ranks = Ranks(family("tie_dust", 3, [sum(splits), 8]), device=GPU)
    for rank in range(3):
        for contract in (ORDERED, EXACT):
            check_reduce(contract, ranks, splits, rank, on_device=True)


@pytest.mark.parametrize("contract", [ORDERED, FP64, EXACT, WINDOWS[0]], ids=str)
def test_at_the_size_of_real_use(contract: Contract) -> None:
    """4096 x 2048 of 8 ranks, normal and hard data in turn through the same launch and the same memory."""
    ranks = Ranks(torch.zeros(8, 4096, 2048), device=GPU)
    out = torch.empty(4096, 2048, device=GPU)
    call = Reduce(ranks.peers, 0, 0, 2048, out, 0, out.numel())
    for turn in range(4):
        data = family("normal", 8, [4096, 2048], turn) if turn % 2 else wide(8, 4096, 2048, turn)
        for buffer, values in zip(ranks.buffers, data, strict=True):
            buffer[: values.numel()].copy_(values.flatten())
        launch_of(contract)(call, None)
        assert_bits(out.cpu(), contract.sum(data), turn)


def test_bits_depend_on_no_tile_grid_or_rotation() -> None:
    ranks = Ranks(torch.cat([wide(5, 20, 256, 1), family("normal", 5, [20, 256])], 1), device=GPU)
    splits = [0, 40, 0, 0, 0]
    for block, warps, blocks, rotate in ((512, 4, 1, 0), (1024, 4, 4, 3), (2048, 8, 2, 1), (256, 4, 64, 4)):
        for contract in (ORDERED, EXACT, WINDOWS[1]):
            check_reduce(contract, ranks, splits, 1, tile=Tile(block, warps, blocks), rotate=rotate)


@pytest.mark.parametrize("kernel", ["ordered", "exact", "multimem"])
def test_a_captured_graph_follows_the_counts(kernel: str) -> None:
    """Counts change between replays; rows beyond them keep what they held."""
    data = family("tie_dust", 3, [64, 128])
    ranks = Ranks(data, device=GPU)
    splits = torch.tensor([8, 8, 8], device=GPU)
    out = torch.empty(64, 128, device=GPU)
    trusted = torch.ones(1, dtype=torch.int32, device=GPU)
    call = Reduce(ranks.peers, 0, 1, 128, out, splits=splits)

    def launch() -> None:
        if kernel == "multimem":
            multimem.reduce(call, multicast=0, trusted=trusted, hardware=False)
        else:
            (ordered if kernel == "ordered" else exact).reduce(call)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for counts in ([8, 8, 8], [0, 64, 0], [10, 0, 54], [63, 1, 0], [1, 2, 3]):
        splits.copy_(torch.tensor(counts))
        out.fill_(7.0)
        graph.replay()
        first, own = counts[0], counts[1]
        assert_bits(out[:own].cpu(), (ORDERED if kernel == "ordered" else EXACT).sum(data[:, first : first + own]))
        assert out[own:].eq(7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slots", [1, 8, 18])
def test_owner(dtype: torch.dtype, slots: int) -> None:
    for hidden, lead, out_dtype in ((2048, 0, torch.float32), (2050, 1, torch.bfloat16), (7, 0, torch.float32)):
        check_owner(routing(8, 9, hidden, 6, slots, dtype=dtype), device=GPU, lead=lead, out_dtype=out_dtype, there=5)


@pytest.mark.parametrize("product", [torch.float32, torch.bfloat16], ids=str)
def test_owner_with_weights(product: torch.dtype) -> None:
    for hidden in (2048, 2880, 4097):
        case = routing(8, 16, hidden, 32, 8, weighted=True, product_dtype=product, integers=torch.int32)
        check_owner(case, device=GPU, out_dtype=torch.bfloat16)


def test_owner_at_the_size_of_real_use() -> None:
    """Half of the tokens normal, half with exponents over +-40 binades, in rows next to each other."""
    case = routing(8, 512, 2048, 512, 8)
    even = torch.arange(512) % 2 == 0
    case.rows[:, even] = torch.randn(8, 256, 2048, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    check_owner(case, device=GPU)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_dispatch(dtype: torch.dtype) -> None:
    for splits, hidden, lead in (([4, 0, 3], 7, 1), ([0, 0, 9], 2050, 0), ([64] * 8, 2048, 0), ([1, 300, 2], 4097, 3)):
        for rotate, on_device in itertools.product({0, len(splits) - 1}, (False, True)):
            Bytes(splits, hidden * dtype.itemsize, lead * dtype.itemsize, GPU).check(
                dtype=dtype, rotate=rotate, on_device=on_device
            )
    Bytes([3, 2, 3], 64, 0, GPU).check(capacity=5, on_device=True)


@pytest.mark.parametrize("contract", [EXACT, WINDOWS[0], WINDOWS[1]], ids=str)
def test_multimem_but_for_its_instruction(contract: Contract) -> None:
    trusted = torch.ones(1, dtype=torch.int32, device=GPU)

    def launch(call: Reduce, tile: Tile | None) -> torch.Tensor:
        return multimem.reduce(call, contract.parameters, multicast=0, trusted=trusted, hardware=False, tile=tile)

    for world in (3, 8, 72):
        data = every_family(world, 1024, seed=world)
        check_reduce(contract, Ranks(data, device=GPU), [*[0] * (world - 1), data.shape[1]], world - 1, launch=launch)
    for hidden, lead in ((1, 1), (7, 2), (2050, 3), (4097, 0)):
        ranks = Ranks(family("cancellation", 3, [6, hidden]), lead, GPU)
        for rank, on_device in itertools.product(range(3), (False, True)):
            check_reduce(contract, ranks, [1, 2, 3], rank, on_device=on_device, launch=launch)


def test_rows_pushed_to_every_rank() -> None:
    for splits, hidden, dtype in (([4, 0, 3, 5], 7, torch.bfloat16), ([8] * 8, 2048, torch.bfloat16)):
        for lead in (0, 1, 2):
            Pushed(splits, hidden, dtype, lead, GPU).check(tile=Tile(1024, 4, 8))
    Pushed([3, 1, 4], 6, torch.float32, device=GPU).check(5)


def test_a_result_of_more_than_2_31_elements() -> None:
    """Two ranks' buffers and the result hold 2**31 + 2**24 elements each; torch adds the same, piece by piece."""
    needs_memory(40)
    hidden, rows = 4096, (1 << 19) + (1 << 12)
    buffers = [torch.empty(rows, hidden, device=GPU).normal_() for _ in range(2)]
    peers = torch.tensor([b.data_ptr() for b in buffers], device=GPU)
    out = torch.full((rows, hidden), torch.nan, device=GPU)
    for splits in (None, torch.tensor([rows, 0], device=GPU)):
        for kernel in (ordered, exact):  # two addends: their rounded sum is the exact sum, rounded
            out.fill_(torch.nan)
            kernel.reduce(Reduce(peers, 0, 0, hidden, out, 0, rows * hidden, splits))
            for start in range(0, rows, 1 << 16):
                piece = slice(start, start + (1 << 16))
                assert torch.equal(out[piece], buffers[0][piece] + buffers[1][piece]), (kernel.__name__, start)


def test_rows_and_dispatch_beyond_2_31_elements() -> None:
    needs_memory(30)
    hidden, rows = 4096, (1 << 19) + 8
    buffers = [torch.empty(rows, hidden, dtype=torch.bfloat16, device=GPU).fill_(float("nan")) for _ in range(2)]
    last = torch.randn(2, 8, hidden, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for buffer, values in zip(buffers, last, strict=True):
        buffer[-8:].copy_(values)
    peers = torch.tensor([b.data_ptr() for b in buffers], device=GPU)
    row_of_slot = torch.tensor([[rows - 8, rows - 1], [rows - 3, rows - 3]], device=GPU)
    rank_of_slot = torch.tensor([[0, 1], [1, 1]], device=GPU)
    out = torch.empty(2, hidden, device=GPU)
    owner.pull(Pull(peers, 0, 0, torch.bfloat16, out, row_of_slot, rank_of_slot, rows=rows))
    want = torch.stack([torch.stack([last[0, 0], last[1, 5]]), torch.stack([last[1, 7], last[1, 5]])]).float()
    assert_bits(out.cpu(), OWNER.sum(want))
    gathered = torch.zeros(2 * rows, hidden, dtype=torch.bfloat16, device=GPU)
    gather.gather(Gather(peers, 0, 0, gathered, (rows, rows)))
    assert_bits(gathered[rows - 8 : rows].cpu(), last[0])
    assert_bits(gathered[-8:].cpu(), last[1])


def test_twin_chains_have_other_bits() -> None:
    data = wide(8, 64, 256, 3)
    got = check_reduce(EXACT, Ranks(data, device=GPU), [64, *[0] * 7], 0).cpu()
    assert not torch.equal(FP64.sum(data), got) and not torch.equal(ORDERED.sum(data), got)
    assert not torch.equal(data.to(GPU).sum(0).cpu(), got)
