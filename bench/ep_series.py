"""What the sweep compares: bicomm's modes and what people use in their place, each a function of a communicator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import ep_bytes
from bicomm.communicator import Communicator
from ep_operands import Operands
from ep_stage import Call, CpuRanks, GpuRanks, LocalStage, Stage

# torch 2.13 renamed two collectives.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

MODES = ("ordered", "exact", "owner", "multimem", "dispatch")


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of the plots.

    of        "combine" (of partials), "owner" (of rows) or "dispatch": what it is a peer of.
    how       which formula of ep_bytes it follows.
    call      writes its result into `result[rank]`.
    mode      for bicomm's own: what `plan` is asked.
    barriers  does the call wait for other ranks inside a kernel of bicomm?
    graph     can it be captured?
    """

    name: str
    of: str
    how: str
    call: Call
    result: dict[int, Tensor]
    mode: str | None = None
    executor: str = ""
    barriers: bool = False
    graph: bool = True


def not_run(stage: Stage, modes: list[str]) -> dict[str, str]:
    """Modes that this stage does not run, and why."""
    if "multimem" not in modes:
        return {}
    plan = stage.comms[0].plan("multimem")
    return {} if plan.executor.startswith("multimem") else {"multimem": plan.candidates[0].reason}


def modes_of(stage: Stage, at: Operands, modes: list[str]) -> Iterator[Series]:
    """bicomm's own series, of partials and rows that lie in symmetric memory."""
    skipped = not_run(stage, modes)
    splits = (at.tokens,) * stage.size

    def series(name: str, of: str, how: str, call: Call, result: dict[int, Tensor], mode: str) -> Series:
        executor = stage.comms[0].plan(mode).executor
        graph = not executor.startswith("all-to-all")
        return Series(name, of, how, call, result, mode, executor, barriers=True, graph=graph)

    for mode in modes:
        if mode in skipped:
            continue
        if mode == "owner":

            def rows(comm: Communicator) -> object:
                r = comm.rank
                return comm.combine_rows(at.rows[r], at.row_of_slot[r], at.rank_of_slot[r], out=at.out[r])

            yield series("owner", "owner", ep_bytes.OWNER, rows, at.out, "owner")
        elif mode == "dispatch":

            def spread(comm: Communicator) -> object:
                r = comm.rank
                return comm.dispatch(at.x[r], splits=splits, out=at.gathered[r])

            yield series("dispatch", "dispatch", ep_bytes.DISPATCH, spread, at.gathered, "exact")
        else:
            how = ep_bytes.SWITCH if mode == "multimem" else ep_bytes.PULL

            def reduce(comm: Communicator, mode: str = mode) -> object:
                return comm.combine(at.partials[comm.rank], mode, out=at.out[comm.rank])

            yield series(mode, "combine", how, reduce, at.out, mode)
    if stage.apart is not None:
        yield from _apart(stage.apart, at, modes)


def _apart(comm: Communicator, at: Operands, modes: list[str]) -> Iterator[Series]:
    """The executor that several hosts use, on these ranks: everything travels by all-to-all, and hosts agree on it."""
    r, executor = comm.rank, comm.plan("exact").executor
    if "exact" in modes:
        yield Series(
            "exact, by all-to-all", "combine", ep_bytes.TRAVEL,
            lambda _: comm.combine(at.partials[r], "exact", out=at.out[r]), at.out, "exact", executor, graph=False,
        )  # fmt: skip
    if "owner" in modes:
        maps = (at.row_of_slot[r], at.rank_of_slot[r])
        yield Series(
            "owner, by all-to-all", "owner", ep_bytes.ROWS,
            lambda _: comm.combine_rows(at.rows[r], *maps, out=at.out[r]), at.out, "owner", executor, graph=False,
        )  # fmt: skip


def peers_of(stage: Stage, at: Operands) -> Iterator[Series]:
    """What is used today, on this stage."""
    if isinstance(stage, LocalStage):
        yield from _local_peers(stage, at)
    elif isinstance(stage, CpuRanks):
        yield from _gloo_peers(stage, at)
    elif isinstance(stage, GpuRanks) and stage.timed:
        yield from _nccl_peers(stage, at)
        if stage.comms[0].plan("ordered").executor.startswith("symmetric"):
            yield from _symm_mem_peers(stage, at)


def _travel(stage: CpuRanks | GpuRanks, at: Operands, name: str) -> Iterator[Series]:
    """All-to-all, then a local sum: of partials, and of the rows of `owner`."""
    group, rank, world = stage.group, stage.rank, stage.size
    device, hidden = stage.device, at.hidden
    received = torch.empty(world, at.tokens, hidden, device=device)
    slots = at.tokens * at.top_k
    arrived = torch.empty(slots, hidden, dtype=torch.bfloat16, device=device)
    sorted_by_slot = torch.empty_like(arrived)
    out = {rank: torch.empty(at.tokens, hidden, device=device)}
    give, get = at.routing.sent[rank].tolist(), at.routing.sent[:, rank].tolist()
    arrival = at.routing.arrival(rank).view(-1).to(device)

    def partials(_: Communicator) -> object:
        dist.all_to_all_single(received, at.partials[rank], group=group)
        return torch.sum(received, 0, out=out[rank])

    def rows(_: Communicator) -> object:
        dist.all_to_all_single(arrived, at.rows[rank][: sum(give)], get, give, group=group)
        torch.index_select(arrived, 0, arrival, out=sorted_by_slot)
        return torch.sum(sorted_by_slot.view(at.tokens, at.top_k, hidden), 1, dtype=torch.float32, out=out[rank])

    yield Series(f"{name} all-to-all of partials + sum", "combine", ep_bytes.TRAVEL, partials, out)
    yield Series(f"{name} all-to-all of rows + sum", "owner", ep_bytes.ROWS, rows, out)


def _nccl_peers(stage: GpuRanks, at: Operands) -> Iterator[Series]:
    group, rank = stage.group, stage.rank
    out = {rank: torch.empty_like(at.out[rank])}
    short = {rank: out[rank].bfloat16()}
    partials16 = at.partials[rank].bfloat16()
    yield Series(
        "NCCL reduce-scatter fp32", "combine", ep_bytes.RING32,
        lambda _: _scatter(out[rank], at.partials[rank], group=group), out,
    )  # fmt: skip
    yield Series(
        "NCCL reduce-scatter bf16", "combine", ep_bytes.RING16,
        lambda _: _scatter(short[rank], partials16, group=group), short,
    )  # fmt: skip
    yield from _travel(stage, at, "NCCL")
    gathered = {rank: torch.empty_like(at.gathered[rank])}
    yield Series(
        "NCCL all-gather bf16", "dispatch", ep_bytes.GATHER,
        lambda _: _gather(gathered[rank], at.x[rank], group=group), gathered,
    )  # fmt: skip


def _symm_mem_peers(stage: GpuRanks, at: Operands) -> Iterator[Series]:
    """torch's own collectives over symmetric memory, on buffers of their own that hold this size's partials."""
    import torch.distributed._symmetric_memory as symm_mem

    name, rank = stage.group.group_name, stage.rank
    count = at.partials[rank].numel()
    buffer = symm_mem.empty(count, dtype=torch.float32, device=stage.device)
    symm_mem.rendezvous(buffer, name)
    buffer.copy_(at.partials[rank].view(-1))
    out = {rank: torch.empty_like(at.out[rank])}
    flat = out[rank].view(-1)
    ops = torch.ops.symm_mem
    yield Series(
        "torch reduce_scatter_out", "combine", ep_bytes.RING32,
        lambda _: ops.reduce_scatter_out(buffer, name, False, flat), out,
    )  # fmt: skip
    whole = torch.empty_like(buffer)
    mine = {rank: whole.view(at.partials[rank].shape)[rank * at.tokens : (rank + 1) * at.tokens]}
    yield Series(
        "torch two-shot all-reduce", "combine", ep_bytes.TWO_SHOT,
        lambda _: ops.two_shot_all_reduce_out(buffer, "sum", name, whole), mine,
    )  # fmt: skip


def _gloo_peers(stage: CpuRanks, at: Operands) -> Iterator[Series]:
    """gloo reduces in place, so its operand is copied first; that copy is part of the time."""
    group, rank = stage.group, stage.rank
    whole = torch.empty_like(at.partials[rank])
    partials16 = at.partials[rank].bfloat16()
    whole16 = torch.empty_like(partials16)
    own = slice(rank * at.tokens, (rank + 1) * at.tokens)

    def reduce(_: Communicator) -> None:
        whole.copy_(at.partials[rank])
        dist.all_reduce(whole, group=group)

    def reduce16(_: Communicator) -> None:
        whole16.copy_(partials16)
        dist.all_reduce(whole16, group=group)

    yield Series("gloo all-reduce fp32", "combine", ep_bytes.TWO_SHOT, reduce, {rank: whole[own]})
    yield Series("gloo all-reduce bf16", "combine", ep_bytes.TWO_SHOT16, reduce16, {rank: whole16[own]})
    yield from _travel(stage, at, "gloo")
    gathered = {rank: torch.empty_like(at.gathered[rank])}
    yield Series(
        "gloo all-gather bf16", "dispatch", ep_bytes.GATHER,
        lambda _: _gather(gathered[rank], at.x[rank], group=group), gathered,
    )  # fmt: skip


def _local_peers(stage: LocalStage, at: Operands) -> Iterator[Series]:
    """torch operators on the same data, without any barrier: what the sums alone cost."""
    ranks = [comm.rank for comm in stage.comms]
    out = {r: torch.empty_like(at.out[r]) for r in ranks}
    distance = (at.partials[1].data_ptr() - at.partials[0].data_ptr()) // 4
    gap = (at.rows[1].data_ptr() - at.rows[0].data_ptr()) // 2
    first, rows = at.partials[0], at.rows[0]
    within = first.untyped_storage().data_ptr() == at.partials[1].untyped_storage().data_ptr()
    if within:  # the ranks' buffers are one allocation: a stacked view costs nothing
        stacked = first.as_strided((stage.size, *first.shape), (distance, at.hidden, 1))
        own = {r: stacked[:, r * at.tokens : (r + 1) * at.tokens] for r in ranks}
        yield Series(
            "torch.sum of the ranks' slices, no barrier", "combine", ep_bytes.PULL,
            lambda comm: torch.sum(own[comm.rank], 0, out=out[comm.rank]), out,
        )  # fmt: skip
    if within and gap % at.hidden == 0:
        every = rows.as_strided(((stage.size - 1) * (gap // at.hidden) + rows.shape[0], at.hidden), (at.hidden, 1))
        index = {r: (at.rank_of_slot[r] * (gap // at.hidden) + at.row_of_slot[r]).view(-1) for r in ranks}
        picked = {r: torch.empty(index[r].numel(), at.hidden, dtype=rows.dtype, device=stage.device) for r in ranks}

        def select(comm: Communicator) -> object:
            r = comm.rank
            torch.index_select(every, 0, index[r], out=picked[r])
            return torch.sum(picked[r].view(at.tokens, at.top_k, at.hidden), 1, dtype=torch.float32, out=out[r])

        yield Series("index_select + torch.sum, no barrier", "owner", ep_bytes.ROWS, select, out)
    gathered = {r: torch.empty_like(at.gathered[r]) for r in ranks}
    parts = [at.x[r] for r in ranks]
    yield Series(
        "torch.cat, no barrier", "dispatch", ep_bytes.GATHER,
        lambda comm: torch.cat(parts, out=gathered[comm.rank]), gathered,
    )  # fmt: skip
