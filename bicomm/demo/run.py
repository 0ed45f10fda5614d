"""The demo itself: one layer, every mode, several batches; each result is held to one process's, bit for bit."""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

import bicomm
from bicomm.contract import ORDERED, OWNER, Contract
from bicomm.demo import batches, text
from bicomm.demo.batches import Batch
from bicomm.demo.layer import Experts, Router, Shape, addends, partial, row_maps
from bicomm.demo.table import Control, Line, Progress, Report, Row, Told
from bicomm.front import default_communicator
from bicomm.world import World

MODES = ("ordered", "exact", "multimem", "fp64", "owner")


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What one rank has of one batch: its own rows by mode, the naive sum of all rows, and times in ms."""

    own: dict[str, Tensor]
    all_reduced: Tensor
    dispatched: int  # elements that dispatch got wrong
    milliseconds: dict[str, float]


class Layer:
    """One rank's part of the layer, and the way of a batch through it."""

    def __init__(self, world: World, shape: Shape, seed: int) -> None:
        self.world, self.shape = world, shape
        self.router = Router(shape, seed, world.device)
        self.experts = Experts(shape, shape.experts_of(world.rank, world.size), seed, world.device)

    def __call__(self, text_tokens: Tensor, batch: Batch, repeats: int = 0, fault: int | None = None) -> Outcome:
        """text_tokens: [N, H], of which this rank brings only those that it owns in this batch.

        repeats: how often each combine is timed. fault: the rank whose partials are made one ulp too large.
        """
        world, k = self.world, self.shape.top_k
        tokens = text_tokens[batch.ids.to(world.device)]
        own = batch.owned(world.rank)
        hidden = bicomm.dispatch(tokens[own].contiguous(), splits=batch.splits)
        routing = self.router(hidden)
        rows, slots = self.experts.rows(hidden, routing)
        sums = partial(rows, slots, batch.tokens, k)
        if fault == world.rank:
            rows, sums = _one_ulp_up(rows), _one_ulp_up(sums)
        row_of_slot, rank_of_slot = (maps[own].contiguous() for maps in row_maps(routing, self.shape, world.size))

        def combine(mode: str) -> Tensor:
            if mode == "owner":
                return bicomm.combine_rows(rows, row_of_slot, rank_of_slot)
            return bicomm.combine(sums, mode, splits=batch.splits)

        def all_reduce() -> Tensor:
            total = sums.clone()
            dist.all_reduce(total, group=world.group)
            return total

        return Outcome(
            {mode: combine(mode) for mode in MODES},
            all_reduce(),
            differing(hidden, tokens),
            {mode: _median(lambda mode=mode: combine(mode), world, repeats) for mode in MODES}  # type: ignore[misc]
            | {"all_reduce": _median(all_reduce, world, repeats)},
        )


def one_process(
    shape: Shape, seed: int, tokens: Tensor, size: int, contracts: dict[str, Contract]
) -> dict[str, Tensor]:
    """What every mode must give, [T, H] each: all ranks' work and the contract's sum in this process alone.

    "reversed" is the control: the same partials, added by the rule of `ordered` from the last rank to the first.
    """
    routing = Router(shape, seed, tokens.device)(tokens)
    partials, rows, slots = [], [], []
    for rank in range(size):
        made = Experts(shape, shape.experts_of(rank, size), seed, tokens.device).rows(tokens, routing)
        partials.append(partial(*made, tokens.shape[0], shape.top_k))
        rows.append(made[0])
        slots.append(made[1])
    by_slot, _ = addends(torch.cat(rows), torch.cat(slots), tokens.shape[0], shape.top_k)
    results = {mode: contract.sum(by_slot if contract == OWNER else partials) for mode, contract in contracts.items()}
    return results | {"reversed": ORDERED.sum(partials[::-1])}


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements of two fp32 tensors of one shape have other bits."""
    return int((a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)).sum())


def demo(
    world: World,
    shape: Shape,
    tokens: int,
    repeats: int = 5,
    seed: int = 0,
    fault: int | None = None,
    told: Told | None = None,
) -> Report | None:
    """Run it; collective. Rank 0 gets the report, the others None. fault: see `Layer`, in the first batch only."""
    with _one_thread(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mode='multimem' runs in software")  # the report says it
        return _demo(world, shape, tokens, repeats, seed, fault, told or Progress(world.rank == 0, world.launcher, 7))


def _demo(
    world: World, shape: Shape, tokens: int, repeats: int, seed: int, fault: int | None, told: Told
) -> Report | None:
    group = default_communicator()
    plans = {mode: group.plan(mode) for mode in MODES}
    contracts = {mode: plan.contract for mode, plan in plans.items()}
    batch = batches.first(tokens, world.size)
    others = batches.others(tokens, tokens // 2, world.size, seed)

    told.step(f"draw the weights, about {shape.experts / world.size:.3g} of {shape.experts} experts on each rank")
    layer = Layer(world, shape, seed)
    embedded = text.embed(text.licence(), tokens + tokens // 2, shape.hidden, seed + 10_000, world.device)
    told.step(f"route {tokens} tokens, run the experts, combine in {len(MODES)} modes")
    outcome = layer(embedded, batch, repeats, fault)
    told.step("do all ranks' work once more in one process: the oracle")
    oracle = one_process(shape, seed, embedded[:tokens], world.size, contracts) if world.rank == 0 else {}
    told.step("compare bits")
    ranks = _gather(world, outcome)
    lines: list[Line] = []
    whole: dict[str, Tensor] = {}
    if world.rank == 0:
        whole = {mode: torch.cat([one.own[mode] for one in ranks]) for mode in MODES}
        for mode in MODES:
            wrong = [differing(one.own[mode], oracle[mode].cpu()[batch.owned(r)]) for r, one in enumerate(ranks)]
            ms = outcome.milliseconds[mode]
            lines.append(Line(mode, contracts[mode].id, plans[mode].executor, ms, _digest(whole[mode]), tuple(wrong)))
    strays = [one.dispatched for one in ranks]

    rows: list[Row] = []
    for other in others:
        told.step(f"the same tokens: {other.name}")
        theirs = _gather(world, layer(embedded, other))
        strays += [one.dispatched for one in theirs]
        if world.rank == 0:
            rows.append(_compare(other, tokens, theirs, whole, outcome.all_reduced.cpu()))
    told.close()
    if world.rank:
        return None
    naive, backwards = (differing(x, oracle["ordered"]) for x in (outcome.all_reduced, oracle["reversed"]))
    controls = (
        Control("all_reduce", _backend(world), outcome.milliseconds["all_reduce"], naive),
        Control("reverse", "last rank first", None, backwards),
    )
    return Report(
        ranks=world.size,
        device=str(world.device.type),
        launcher=world.launcher,
        shape=shape,
        batch=batch,
        lines=tuple(lines),
        controls=controls,
        rows=tuple(rows),
        dispatched=sum(strays),
        switch=next((c.reason for c in plans["multimem"].candidates if c.executor.startswith("multimem")), ""),
    )


def _compare(batch: Batch, tokens: int, ranks: list[Outcome], whole: dict[str, Tensor], all_reduced: Tensor) -> Row:
    """How many elements of the first batch's tokens have other bits in this one."""
    known = batch.ids < tokens  # the rest was not in the first batch
    ids = batch.ids[known]
    changed = {mode: differing(torch.cat([one.own[mode] for one in ranks])[known], whole[mode][ids]) for mode in MODES}
    naive = differing(ranks[0].all_reduced[known], all_reduced[ids])
    return Row(batch.name, batch.tokens, batch.splits, changed, naive, ids.numel() * all_reduced.shape[1])


def _gather(world: World, outcome: Outcome) -> list[Outcome]:
    """Every rank's outcome, on the CPU of rank 0; an empty list elsewhere."""
    mine: dict[str, Any] = dataclasses.asdict(outcome)
    mine["own"] = {mode: x.cpu() for mode, x in outcome.own.items()}
    mine["all_reduced"] = outcome.all_reduced.cpu() if world.rank == 0 else None  # rank 0's is enough
    received: list[Any] | None = [None] * world.size if world.rank == 0 else None
    dist.gather_object(mine, received, group=world.group, group_dst=0)
    return [Outcome(**one) for one in received or []]


def _median(call: Callable[[], Tensor], world: World, repeats: int) -> float:
    """Milliseconds of a call, as this rank sees it; 0 where it is not timed."""
    times = []
    for _ in range(repeats):
        dist.barrier(group=world.group)
        _finish(world)
        start = time.perf_counter()
        call()
        _finish(world)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times) if times else 0.0


def _finish(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


@contextmanager
def _one_thread() -> Iterator[None]:
    """CPU GEMMs give other bits with another number of threads: 22,370 of 24,576 elements of [64, 1024] x [1024, 384]
    in fp32, two threads against one. With one thread, runs of different world sizes can be compared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _one_ulp_up(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, float("inf")))


def _digest(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:8]


def _backend(world: World) -> str:
    return "nccl" if world.device.type == "cuda" and "nccl" in str(dist.get_backend_config(world.group)) else "gloo"


def _command(
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the first batch.")] = 512,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = Shape.hidden,
    intermediate: Annotated[int, typer.Option(min=1, help="Intermediate size of an expert.")] = Shape.intermediate,
    experts: Annotated[int, typer.Option(min=1, help="Experts, shared by the ranks.")] = Shape.experts,
    top_k: Annotated[int, typer.Option(min=1, help="Experts of a token.")] = Shape.top_k,
    repeats: Annotated[int, typer.Option(min=1, help="How often each combine is timed.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights.")] = 0,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run on CPUs, whatever else is there.")] = False,
    perturb_rank: Annotated[int | None, typer.Option(hidden=True, min=0)] = None,
) -> None:
    """Combine an MoE layer's output on every rank in every mode, and count the bits that differ.

    Exits with 1 where anything differs that must not.
    """
    if top_k > experts:
        raise typer.BadParameter(f"a token cannot choose {top_k} of {experts} experts")
    world = bicomm.init(device="cpu" if cpu else None)
    shape = Shape(hidden, intermediate, experts, top_k)
    report = demo(world, shape, tokens, repeats, seed, perturb_rank)
    if report is not None:
        report.show()
    agreed = [report is None or not report.failures]
    dist.broadcast_object_list(agreed, group=world.group, group_src=0)
    bicomm.shutdown()
    raise typer.Exit(0 if agreed[0] else 1)


def main() -> None:
    """The command line of `python -m bicomm.demo`."""
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(_command)
    app()
