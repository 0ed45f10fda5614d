"""Eight processes that share one GPU (or have one each): the same bits through real symmetric memory, and real faults.

On one GPU the processes take turns of some 20 ms at each barrier, so calls are few.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks

import bicomm
from bicomm.contract import Contract
from engine_ranks import engine_and_mirror

W = 8
ENVIRONMENT = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def data(rank: int, rows: int, hidden: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(rows, hidden, generator=generator)
    x = x * torch.exp2(torch.randint(-20, 20, (rows, hidden), generator=generator).float())
    x[::2, 0] = [1.0, 2.0**-24, 2.0**-60, 0.0, 0.0, 0.0, 0.0, 0.0][rank]
    x[1::2, 0] = [-128.0, 64.0, 64.0, 2.0**-33, 2.0**-60, 0.0, 0.0, 0.0][rank]
    return x


def everything() -> dict[str, Any]:
    world = bicomm.init()
    rank, size = world.rank, world.size
    comm = bicomm.Communicator(max_tokens=64, hidden=320, mode="exact", timeout=60.0)
    verdicts: dict[str, Any] = {"plan": str(comm.plan()), "device": str(comm.device)}
    splits = (5, 0, 1, 9, 0, 2, 3, 20)[:size]
    rows, mine = sum(splits), slice(sum(splits[:rank]), sum(splits[: rank + 1]))
    for mode in ("ordered", "exact", "fp64", "multimem", "window(16,95,86)"):
        got = comm.combine(data(rank, rows, 320).cuda(), mode, splits=splits)
        want = comm.plan(mode).contract.sum([data(r, rows, 320)[mine] for r in range(size)])
        verdicts[mode] = torch.equal(bits(got.cpu()), bits(want))
    got = comm.dispatch(data(rank, splits[rank], 7).cuda())
    verdicts["dispatch"] = torch.equal(got.cpu(), torch.cat([data(r, splits[r], 7) for r in range(size)]))
    # owner: rows in an acquired buffer, each token's slots on different ranks
    with comm.acquire(6, 320, torch.bfloat16) as buffer:
        buffer.copy_(data(rank, 6, 320, seed=1))
        ranks = (torch.arange(12).view(4, 3) + rank) % size
        slots = (torch.arange(12).view(4, 3) * 5) % 6
        ranks[1, 2] = -1
        got = comm.combine_rows(buffer, slots.cuda(), ranks.cuda())
    table = torch.stack([data(r, 6, 320, seed=1).bfloat16().float() for r in range(size)])
    addends = table[ranks.clamp(min=0), slots] * (ranks >= 0)[:, :, None]
    verdicts["owner"] = torch.equal(bits(got.cpu()), bits(Contract("owner").sum(addends.transpose(0, 1))))
    # a graph with token counts on the device
    x = data(rank, 24, 320, seed=2).cuda()
    counts = torch.full((size,), 24 // size, dtype=torch.int64, device="cuda")
    out = torch.full((24, 320), float("nan"), device="cuda")
    comm.combine(x, splits=counts, out=out, capacity=24)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.combine(x, splits=counts, out=out, capacity=24)
    uneven = torch.tensor([1, 0, 7, 2, 3, 0, 4, 2][:size])
    counts.copy_(uneven)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    comm.check()
    begin = int(uneven[:rank].sum())
    want = Contract("exact").sum([data(r, 24, 320, seed=2)[begin : begin + int(uneven[rank])] for r in range(size)])
    verdicts["graph"] = torch.equal(bits(out[: int(uneven[rank])].cpu()), bits(want))
    verdicts["untouched"] = bool(out[int(uneven[rank]) :].isnan().all())
    # CUDA sets the GPU for each thread, and a new thread begins with GPU 0
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(lambda: comm.combine(x, "ordered")).result()
    share = 24 // size
    own = slice(rank * share, (rank + 1) * share)
    want = Contract("ordered").sum([data(r, 24, 320, seed=2)[own] for r in range(size)])
    verdicts["thread"] = torch.equal(bits(got.cpu()), bits(want))
    comm.close()
    return verdicts


def other_ways() -> dict[str, Any]:
    """Rows by all-to-all (NCCL where each rank has a GPU of its own, else gloo), and communicators of parts."""
    world = bicomm.init()
    rank, size = world.rank, world.size
    comm = bicomm.Communicator(mode="exact", share_memory=False, timeout=60.0)
    verdicts: dict[str, Any] = {"plan": str(comm.plan())}
    splits = (5, 0, 1, 9, 0, 2, 3, 20)[:size]
    rows, mine = sum(splits), slice(sum(splits[:rank]), sum(splits[: rank + 1]))
    for shares in (splits, (0,) * size):
        own = mine if any(shares) else slice(0)
        for mode in ("ordered", "exact", "fp64", "window(16,95,86)"):
            x = data(rank, rows, 320)[: sum(shares)]
            got = comm.combine(x.to(comm.device), mode, splits=shares)
            want = comm.plan(mode).contract.sum([data(r, rows, 320)[own] for r in range(size)])
            verdicts[f"{mode} {any(shares)}"] = torch.equal(bits(got.cpu()), bits(want))
    got = comm.dispatch(data(rank, splits[rank] + 2, 7)[2:].to(comm.device).bfloat16())
    verdicts["dispatch"] = torch.equal(
        got.cpu(), torch.cat([data(r, splits[r] + 2, 7)[2:] for r in range(size)]).bfloat16()
    )
    verdicts["counts"] = comm.exchange_counts(rank).tolist() == list(range(size))
    ranks = (torch.arange(12).view(4, 3) + rank) % size
    slots = (torch.arange(12).view(4, 3) * 5) % 6
    ranks[1, 2] = -1
    weights = data(rank, 4, 3, seed=3)
    some = slice(0 if rank == 1 else 4)  # rank 1 has no tokens
    held = data(rank, 6, 320, seed=1).bfloat16().to(comm.device)
    maps = [t[some].to(comm.device) for t in (slots, ranks, weights)]
    got = comm.combine_rows(held, *maps)
    table = torch.stack([data(r, 6, 320, seed=1).bfloat16().float() for r in range(size)])
    addends = table[ranks.clamp(min=0), slots] * weights[:, :, None] * (ranks >= 0)[:, :, None]
    verdicts["owner"] = torch.equal(bits(got.cpu()), bits(Contract("owner").sum(addends[some].transpose(0, 1))))
    x = data(rank, 16, 8).to(comm.device).requires_grad_(rank != 1)  # rank 1 joins the others' backward pass
    (comm.combine(x) * (rank + 1)).sum().backward()
    want = torch.arange(1.0, size + 1).repeat_interleave(16 // size)[:, None].expand(16, 8)
    verdicts["gradient"] = x.grad is None if rank == 1 else x.grad is not None and torch.equal(x.grad.cpu(), want)
    comm.close()
    halves = [dist.new_group(list(part)) for part in (range(size // 2), range(size // 2, size))]
    mine_is = int(rank >= size // 2)
    with_me = range(mine_is * (size // 2), size if mine_is else size // 2)
    for share_memory in (True, False):
        part = bicomm.Communicator(halves[mine_is], mode="ordered", timeout=60.0, share_memory=share_memory)
        got = part.combine(data(rank, 16, 40).to(part.device))
        share = 16 // part.size
        own = slice(share * part.rank, share * (part.rank + 1))
        want = Contract("ordered").sum([data(r, 16, 40)[own] for r in with_me])
        verdicts[f"half, share_memory={share_memory}"] = torch.equal(bits(got.cpu()), bits(want))
        part.close()
    return verdicts


def late() -> dict[str, Any]:
    world = bicomm.init()
    comm = bicomm.Communicator(max_tokens=16, hidden=64, mode="ordered", timeout=4.0)
    x = data(world.rank, 16, 64).cuda()
    comm.combine(x)
    torch.cuda.synchronize()
    if world.rank == 3:
        time.sleep(6.0)
    begin = time.monotonic()
    error = ""
    out = torch.zeros(())
    try:
        out = comm.combine(x)
        torch.cuda.synchronize()
        comm.check()
    except bicomm.PeerTimeout as caught:
        error = str(caught)
    waited = time.monotonic() - begin
    nan = bool(out.isnan().all())
    comm.recover()
    again = comm.combine(x)
    torch.cuda.synchronize()
    comm.check()
    share = 16 // world.size
    mine = slice(share * world.rank, share * (world.rank + 1))
    want = Contract("ordered").sum([data(r, 16, 64)[mine] for r in range(world.size)])
    return {"error": error, "nan": nan, "waited": waited, "again": torch.equal(bits(again.cpu()), bits(want))}


def test_every_mode_graphs_uneven_tokens_and_owner() -> None:
    for result in run_ranks(W, everything, launcher="spawn", timeout=400, env=ENVIRONMENT):
        verdicts = result.value
        assert verdicts.pop("device").startswith("cuda")
        assert "symmetric memory" in verdicts.pop("plan")
        assert all(verdicts.values()), (result.rank, verdicts)


def test_all_to_all_and_communicators_of_parts() -> None:
    for result in run_ranks(W, other_ways, launcher="spawn", timeout=400, env=ENVIRONMENT):
        verdicts = result.value
        assert "all-to-all" in verdicts.pop("plan")
        assert all(verdicts.values()), (result.rank, verdicts)


def test_a_late_rank_is_named_gets_the_error_too_and_recovers() -> None:
    for result in run_ranks(W, late, launcher="spawn", timeout=300, env=ENVIRONMENT):
        told = result.value
        assert "rank 3 did not enter" in told["error"], told
        assert told["again"]
        if result.rank != 3:
            assert told["nan"] and told["waited"] < 12


def test_the_executors_and_the_mirror_agree() -> None:
    for result in run_ranks(W, engine_and_mirror, True, launcher="spawn", timeout=300, env=ENVIRONMENT):
        assert result.value["wrong"] == [], (result.rank, result.value)
