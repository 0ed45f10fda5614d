"""Eight ranks in one process on one GPU: every mode, graphs, uneven tokens on the device, zero-copy, faults, delays."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import bicomm
from bicomm.communicator import Communicator
from bicomm.contract import Contract
from bicomm.local_gpu import rehearsal
from bicomm.transports.nvls import Nvls

W = 8
DEVICE = torch.device("cuda")
MODES = ["ordered", "exact", "multimem", "fp64", "window(16,95,86)", "window(8,40,33)"]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def issue(comms: list[Communicator], call: Callable[[Communicator], Any]) -> list[Any]:
    """Make one call on every rank, each on its own stream, from this thread."""
    results = []
    for comm in comms:
        with torch.cuda.stream(comm.stream):
            results.append(call(comm))
    return results


def run(comms: list[Communicator], call: Callable[[Communicator], Any], rehearse: bool = True) -> list[Any]:
    """The call on all ranks, kernels loaded before, and its results once all are there."""
    torch.cuda.synchronize()
    if rehearse:
        with rehearsal(comms):
            issue(comms, call)
    results = issue(comms, call)
    torch.cuda.synchronize()
    for comm in comms:
        comm.check()
    return results


def partials(rows: int, hidden: int, seed: int = 0, kind: str = "wide") -> list[torch.Tensor]:
    """Different data on every rank: exponents spread over +-20 binades, with ties, dust and cancellations planted."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(W, rows, hidden, generator=generator)
    if kind == "wide":
        x *= torch.exp2(torch.randint(-20, 20, (W, rows, hidden), generator=generator).float())
        for column, values in enumerate(
            ([1.0, 2.0**-24, 2.0**-60], [2.0**60, 1.0, -(2.0**60)], [-128.0, 64.0, 64.0, 2.0**-33, 2.0**-60])
        ):
            if column < hidden:
                x[:, ::2, column] = 0.0
                x[: len(values), ::2, column] = torch.tensor(values)[:, None]
    return [t.to(DEVICE) for t in x]


@pytest.fixture
def comms() -> Iterator[list[Communicator]]:
    made = bicomm.local_world(W, device=DEVICE, timeout=4.0)
    yield made
    torch.cuda.synchronize()
    for comm in made:
        comm.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("splits", "hidden"), [((3,) * 8, 2048), ((5, 0, 1, 9, 0, 0, 2, 30), 2050), ((1, 2, 0, 4, 5, 6, 7, 0), 7)]
)
def test_every_mode_gives_its_contracts_bits(
    comms: list[Communicator], mode: str, splits: tuple[int, ...], hidden: int
) -> None:
    x = partials(sum(splits), hidden)
    contract = comms[0].plan(mode).contract
    for dtype in (torch.float32, torch.bfloat16):
        outs = run(comms, lambda comm: comm.combine(x[comm.rank], mode, splits=splits, out_dtype=dtype))
        want = contract.sum([t.cpu() for t in x], out_dtype=dtype)
        assert torch.equal(bits(torch.cat(outs).cpu()), bits(want))


def test_a_sum_in_another_order_differs(comms: list[Communicator]) -> None:
    """The twin: without a contract the bits do depend on the order of the ranks."""
    x = partials(64, 512)
    assert not torch.equal(torch.stack(x).sum(0), torch.stack(x[::-1]).sum(0)) or not torch.equal(
        Contract("ordered").sum(x), Contract("ordered").sum(x[::-1])
    )


@pytest.mark.parametrize("mode", ["ordered", "exact"])
def test_graphs_replay_with_other_data_and_other_token_counts(comms: list[Communicator], mode: str) -> None:
    rows, hidden = 32, 256
    x = partials(rows, hidden)
    counts = [torch.full((W,), rows // W, dtype=torch.int64, device=DEVICE) for _ in range(W)]
    outs = [torch.empty(rows, hidden, device=DEVICE) for _ in range(W)]

    def call(comm: Communicator) -> torch.Tensor:
        return comm.combine(x[comm.rank], mode, splits=counts[comm.rank], out=outs[comm.rank], capacity=rows)

    run(comms, call)
    graphs = []
    for comm in comms:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=comm.stream):
            call(comm)
            call(comm)
        graphs.append(graph)
    contract = Contract.parse(mode)
    generator = torch.Generator().manual_seed(1)
    for replay in range(1000):
        look = replay % 100 == 0 or replay < 5
        if look:
            fresh = partials(rows, hidden, seed=replay)
            cuts = torch.sort(torch.randint(0, rows + 1, (W - 1,), generator=generator))[0].tolist()
            shares = [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
            if replay % 200 == 0:
                shares[3] = 0  # fewer tokens than the capacity: the rest is neither read nor written
            for r in range(W):
                x[r].copy_(fresh[r])
                x[r][sum(shares) :] = float("nan")
                counts[r].copy_(torch.tensor(shares))
                outs[r].fill_(float("nan"))
            torch.cuda.synchronize()
        for comm, graph in zip(comms, graphs, strict=True):
            with torch.cuda.stream(comm.stream):
                graph.replay()
        if look:
            torch.cuda.synchronize()
            start = 0
            for r in range(W):
                comms[r].check()
                want = contract.sum([t[start : start + shares[r]].cpu() for t in x])
                assert torch.equal(bits(outs[r][: shares[r]].cpu()), bits(want)), (replay, r)
                assert outs[r][shares[r] :].isnan().all()
                start += shares[r]
    torch.cuda.synchronize()
    for comm in comms:
        comm.check()


def test_dispatch_and_counts_in_a_graph(comms: list[Communicator]) -> None:
    capacity, hidden = 6, 40
    x = [torch.randn(capacity, hidden, device=DEVICE, dtype=torch.bfloat16) for _ in range(W)]
    own = [torch.tensor([r % 4], device=DEVICE) for r in range(W)]
    outs = [torch.full((capacity * W, hidden), float("nan"), device=DEVICE, dtype=torch.bfloat16) for _ in range(W)]

    def call(comm: Communicator) -> torch.Tensor:
        counts = comm.exchange_counts(own[comm.rank])
        comm.dispatch(x[comm.rank], splits=counts, out=outs[comm.rank], capacity=capacity * W)
        return counts

    run(comms, call)
    graphs = []
    for comm in comms:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=comm.stream):
            call(comm)
        graphs.append(graph)
    for step in range(6):
        sizes = [(r + step) % (capacity + 1) for r in range(W)]
        for r in range(W):
            own[r].fill_(sizes[r])
            x[r].normal_()
            x[r][sizes[r] :] = float("nan")
            outs[r].fill_(float("inf"))
        torch.cuda.synchronize()
        for comm, graph in zip(comms, graphs, strict=True):
            with torch.cuda.stream(comm.stream):
                graph.replay()
        torch.cuda.synchronize()
        want = torch.cat([x[r][: sizes[r]] for r in range(W)])
        for r in range(W):
            comms[r].check()
            assert torch.equal(bits(outs[r][: sum(sizes)]), bits(want))
            assert outs[r][sum(sizes) :].isinf().all()


def test_two_communicators_in_one_graph() -> None:
    first, second = (bicomm.local_world(W, device=DEVICE, timeout=4.0) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        b.stream = a.stream
    x = partials(16, 64)

    def call(a: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        one = a.combine(x[a.rank], "ordered")
        return one, second[a.rank].combine(x[a.rank], "exact")

    torch.cuda.synchronize()
    with rehearsal(first), rehearsal(second):
        issue(first, call)
    graphs, results = [], []
    for comm in first:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=comm.stream):
            results.append(call(comm))
        graphs.append(graph)
    for _ in range(20):
        for comm, graph in zip(first, graphs, strict=True):
            with torch.cuda.stream(comm.stream):
                graph.replay()
    torch.cuda.synchronize()
    for number, mode in enumerate(("ordered", "exact")):
        got = torch.cat([pair[number] for pair in results]).cpu()
        assert torch.equal(bits(got), bits(Contract.parse(mode).sum([t.cpu() for t in x])))


def test_capture_before_the_memory_exists_says_what_to_call() -> None:
    comms = bicomm.local_world(2, device=DEVICE, timeout=2.0)
    x = torch.randn(4, 8, device=DEVICE)
    with pytest.raises(bicomm.CaptureError, match="comm.reserve"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        comms[0].combine(x, "ordered")


def test_zero_copy_reads_the_acquired_buffer_in_place(comms: list[Communicator]) -> None:
    x = partials(16, 64)
    held = [comm.acquire(16, 64) for comm in comms]
    buffers = [context.__enter__() for context in held]
    for buffer, data in zip(buffers, x, strict=True):
        buffer.copy_(data)
    outs = run(comms, lambda comm: comm.combine(buffers[comm.rank], "exact"))
    assert torch.equal(bits(torch.cat(outs).cpu()), bits(Contract("exact").sum([t.cpu() for t in x])))
    out = [torch.empty(2, 64, device=DEVICE) for _ in range(W)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        issue(comms, lambda comm: comm.combine(buffers[comm.rank], "exact", out=out[comm.rank]))
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert names and all("exact" in name for name in names), names
    for context in held:
        context.__exit__(None, None, None)


def test_a_write_after_release_is_caught_in_debug_mode() -> None:
    comm = bicomm.local_world(1, device=DEVICE, debug=True)[0]
    with comm.acquire(4, 8) as buffer:
        buffer.fill_(1.0)
    comm.combine(torch.ones(4, 8, device=DEVICE), "exact")
    with comm.acquire(4, 8) as buffer:
        buffer.fill_(1.0)
    buffer.fill_(2.0)
    with pytest.raises(RuntimeError, match="after it was released"):
        comm.combine(torch.ones(4, 8, device=DEVICE), "exact")


def owner_case(ep: int, experts: int, tokens: int, k: int, hidden: int, seed: int) -> tuple[Any, ...]:
    """Rows of every (expert, token), on `ep` ranks by a seeded permutation of the experts; the same rows for any."""
    generator = torch.Generator().manual_seed(7)
    rows = (torch.randn(experts, tokens, hidden, generator=generator) * 8).bfloat16()
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)])
    chosen[0, -1] = -1  # a slot that is not routed
    weights = torch.rand(tokens, k, generator=generator)
    shuffle = torch.randperm(experts, generator=torch.Generator().manual_seed(seed))
    rank_of_expert = torch.empty(experts, dtype=torch.int64)
    local = torch.empty(experts, dtype=torch.int64)
    blocks: list[list[torch.Tensor]] = [[] for _ in range(ep)]
    for place, expert in enumerate(shuffle.tolist()):
        rank_of_expert[expert] = place % ep
        local[expert] = len(blocks[place % ep])
        blocks[place % ep].append(rows[expert])
    routed = chosen >= 0
    rank = torch.where(routed, rank_of_expert[chosen.clamp(min=0)], -1)
    row = torch.where(routed, local[chosen.clamp(min=0)] * tokens + torch.arange(tokens)[:, None], 10**6)
    return [torch.cat(block).to(DEVICE) for block in blocks], row.to(DEVICE), rank.to(DEVICE), weights.to(DEVICE)


@pytest.mark.parametrize("product", [torch.float32, torch.bfloat16])
def test_owner_has_the_same_bits_for_any_ep_size_and_placement(product: torch.dtype) -> None:
    tokens, results = 24, []
    for ep, seed in ((1, 0), (2, 0), (4, 1), (8, 2), (8, 3)):
        comms = bicomm.local_world(ep, device=DEVICE, timeout=4.0)
        rows, row, rank, weights = owner_case(ep, 16, tokens, 8, 264, seed)
        share = tokens // ep
        held = [comm.acquire(rows[comm.rank].shape[0], 264, torch.bfloat16) for comm in comms]
        buffers = [context.__enter__() for context in held]
        for buffer, data in zip(buffers, rows, strict=True):
            buffer.copy_(data)

        def call(comm: Communicator) -> torch.Tensor:
            mine = slice(comm.rank * share, (comm.rank + 1) * share)
            return comm.combine_rows(buffers[comm.rank], row[mine], rank[mine], weights[mine], product_dtype=product)

        results.append(torch.cat(run(comms, call)).cpu())
    for other in results[1:]:
        assert torch.equal(bits(results[0]), bits(other))
    rows, row, rank, weights = owner_case(1, 16, tokens, 8, 264, 0)
    addends = torch.stack([rows[0].cpu()[row.cpu()[:, s].clamp(max=rows[0].shape[0] - 1)].float() for s in range(8)])
    addends = (addends * weights.cpu().t()[:, :, None]).to(product).float() * (rank.cpu().t() >= 0)[:, :, None]
    assert torch.equal(bits(results[0]), bits(Contract("exact").sum(addends)))


def test_a_missing_rank_is_named_and_recover_mends_it(comms: list[Communicator]) -> None:
    x = partials(16, 64)

    def call(comm: Communicator) -> torch.Tensor:
        return comm.combine(x[comm.rank], "ordered")

    good = torch.cat(run(comms, call))
    lazy = comms[5]
    outs = issue([comm for comm in comms if comm is not lazy], call)
    torch.cuda.synchronize()
    assert all(out.isnan().all() for out in outs)
    for comm in comms:
        if comm is lazy:
            continue
        with pytest.raises(bicomm.PeerTimeout, match="rank") as caught:
            comm.check()
        assert caught.value.missing == (5,)
    with pytest.raises(bicomm.PeerTimeout), torch.cuda.stream(lazy.stream):
        call(lazy)
        torch.cuda.synchronize()
        lazy.check()
    for comm in comms:
        comm.recover()
    assert torch.equal(torch.cat(run(comms, call, rehearse=False)), good)


def test_48_captured_calls_cost_one_time_out(comms: list[Communicator]) -> None:
    x = partials(8, 64)
    outs = [torch.empty(1, 64, device=DEVICE) for _ in range(W)]

    def call(comm: Communicator) -> torch.Tensor:
        return comm.combine(x[comm.rank], "exact", out=outs[comm.rank])

    run(comms, call)
    graphs = []
    for comm in comms:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=comm.stream):
            for _ in range(48):
                call(comm)
        graphs.append(graph)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(comms[0].stream)
    for comm, graph in list(zip(comms, graphs, strict=True))[:-1]:
        with torch.cuda.stream(comm.stream):
            graph.replay()
    end.record(comms[0].stream)
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) < 1.5 * 4000
    for comm in comms:
        comm.recover()
    for comm, graph in zip(comms, graphs, strict=True):  # the same graphs work in the new epoch
        with torch.cuda.stream(comm.stream):
            graph.replay()
    torch.cuda.synchronize()
    for comm in comms:
        comm.check()
    assert torch.equal(bits(torch.cat(outs).cpu()), bits(Contract("exact").sum([t.cpu() for t in x])))


def test_ranks_that_enter_different_calls_learn_both_sides(comms: list[Communicator]) -> None:
    x = partials(16, 64)
    run(comms, lambda comm: comm.combine(x[comm.rank], "ordered"))
    run(comms, lambda comm: comm.combine(x[comm.rank], "exact"))
    outs = issue(comms, lambda comm: comm.combine(x[comm.rank], "exact" if comm.rank == 2 else "ordered"))
    torch.cuda.synchronize()
    assert all(out.isnan().all() for out in outs)
    for comm in comms:
        with pytest.raises(bicomm.CallMismatch, match=r"contract=ordered/1.*rank 2.*contract=exact/1"):
            comm.check()
        comm.recover()
    run(comms, lambda comm: comm.combine(x[comm.rank], "ordered"), rehearse=False)


def test_ranks_that_disagree_on_a_gradient_learn_it_from_the_call(comms: list[Communicator]) -> None:
    """Else some would wait in the backward pass for others that do not run it."""
    x = [t.requires_grad_() for t in partials(16, 64)]

    def all_ask(comm: Communicator) -> torch.Tensor:
        return comm.combine(x[comm.rank], "ordered")

    def one_needs_none(comm: Communicator) -> torch.Tensor:
        return comm.combine(x[comm.rank].detach() if comm.rank == 2 else x[comm.rank], "ordered")

    def one_runs_without(comm: Communicator) -> torch.Tensor:
        with torch.set_grad_enabled(comm.rank != 2):
            return all_ask(comm)

    run(comms, all_ask)
    for differing in (one_needs_none, one_runs_without):
        outs = issue(comms, differing)
        torch.cuda.synchronize()
        assert all(out.isnan().all() for out in outs)
        for comm in comms:
            with pytest.raises(bicomm.CallMismatch, match=r"rank 0 .*gradient=x.*rank 2 .*gradient=none") as caught:
                comm.check()
            assert "requires_grad_()" in str(caught.value)
            comm.recover()
    run(comms, all_ask, rehearse=False)
    with torch.no_grad():
        run(comms, all_ask, rehearse=False)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.uint16, torch.int64, torch.complex64])
def test_a_dispatch_carries_any_type(comms: list[Communicator], dtype: torch.dtype) -> None:
    splits = (2, 0, 1, 3, 0, 0, 1, 1)
    generator = torch.Generator().manual_seed(5)
    raw = [torch.randint(0, 256, (n, 24 * dtype.itemsize), dtype=torch.uint8, generator=generator) for n in splits]
    x = [t.to(DEVICE).view(dtype) for t in raw]
    for out in run(comms, lambda comm: comm.dispatch(x[comm.rank], splits=splits)):
        assert out.dtype == dtype and torch.equal(out.view(torch.uint8).cpu(), torch.cat(raw))


def test_a_dispatch_into_an_out_that_does_not_fit_is_refused(comms: list[Communicator]) -> None:
    splits = (1,) * W
    x = [torch.full((1, 16), float(r), device=DEVICE) for r in range(W)]
    outs = [torch.empty(W, 16, device=DEVICE) for _ in range(W)]
    short = torch.empty(W - 1, 16, device=DEVICE)

    def call(comm: Communicator) -> torch.Tensor:
        return comm.dispatch(x[comm.rank], splits=splits, out=outs[comm.rank])

    run(comms, call)
    run(comms, lambda comm: comm.barrier())
    for comm in comms:
        with torch.cuda.stream(comm.stream):
            if comm.rank == 1:
                with pytest.raises(ValueError, match=r"expected \(8, 16\)"):
                    comm.dispatch(x[1], splits=splits, out=short)
            else:
                call(comm)
    torch.cuda.synchronize()
    for comm in comms:
        with pytest.raises(bicomm.PeerRefused, match="rank 1: ValueError"):
            comm.check()
        comm.recover()
    for out in run(comms, call, rehearse=False):
        assert torch.equal(out, torch.cat(x))


def test_a_refusal_reaches_the_others(comms: list[Communicator]) -> None:
    x = partials(16, 64)
    run(comms, lambda comm: comm.combine(x[comm.rank], "ordered"))
    run(comms, lambda comm: comm.barrier())
    wrong = x[1].bfloat16()  # made before any rank waits: even a cast loads a kernel
    torch.cuda.synchronize()
    for comm in comms:
        with torch.cuda.stream(comm.stream):
            if comm.rank == 1:
                with pytest.raises(TypeError, match="bfloat16"):
                    comm.combine(wrong, "ordered")
            else:
                comm.combine(x[comm.rank], "ordered")
    torch.cuda.synchronize()
    for comm in comms:
        with pytest.raises(bicomm.PeerRefused, match="rank 1: TypeError"):
            comm.check()
        comm.recover()
    run(comms, lambda comm: comm.combine(x[comm.rank], "ordered"), rehearse=False)


def test_abort_reaches_all_and_ends_waiting_kernels(comms: list[Communicator]) -> None:
    x = partials(16, 64)
    run(comms, lambda comm: comm.combine(x[comm.rank], "ordered"))
    comms[0].abort("the engine is shutting down")
    for comm in comms:
        with pytest.raises(bicomm.Aborted, match="shutting down"), torch.cuda.stream(comm.stream):
            comm.combine(x[comm.rank], "ordered")
            torch.cuda.synchronize()
            comm.check()
        comm.recover()
    run(comms, lambda comm: comm.combine(x[comm.rank], "ordered"), rehearse=False)


def test_random_delays_change_nothing(comms: list[Communicator]) -> None:
    rows, hidden = 16, 96
    fresh, other = partials(rows, hidden), partials(rows, hidden, seed=99)
    generator = torch.Generator().manual_seed(3)

    def call(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        results = []
        for source in (fresh, other):
            torch.cuda._sleep(int(torch.randint(0, 400_000, (), generator=generator)))
            results.append(comm.combine(source[comm.rank], "ordered"))
        return results[0], results[1]

    run(comms, call)
    for turn in range(30):
        for x, new in zip(fresh, partials(rows, hidden, seed=turn), strict=True):
            x.copy_(new)
        order = torch.randperm(W, generator=generator).tolist()
        torch.cuda.synchronize()
        outs = dict(zip(order, issue([comms[r] for r in order], call), strict=True))
        torch.cuda.synchronize()
        for comm in comms:
            comm.check()
        for number, source in enumerate((fresh, other)):
            want = Contract("ordered").sum([t.cpu() for t in source])
            assert torch.equal(torch.cat([outs[r][number] for r in range(W)]).cpu(), want)


def test_two_streams_of_one_rank_are_put_in_order(comms: list[Communicator]) -> None:
    x = partials(16, 64)
    run(comms, lambda comm: comm.combine(x[comm.rank], "ordered"))
    others = [torch.cuda.Stream() for _ in comms]
    for _ in range(10):
        for comm, other in zip(comms, others, strict=True):
            with torch.cuda.stream(comm.stream):
                one = comm.combine(x[comm.rank], "ordered")
            with torch.cuda.stream(other):
                two = comm.combine(x[comm.rank], "ordered")
        torch.cuda.synchronize()
        for comm in comms:
            comm.check()
    assert torch.equal(one, two)


def test_memory_is_given_back_and_taken_again(comms: list[Communicator]) -> None:
    x = partials(16, 64)
    before = run(comms, lambda comm: comm.combine(x[comm.rank], "exact"))
    held = comms[0].memory()["held"]
    for comm in comms:
        comm.suspend()
    assert comms[0].memory()["held"] < held
    assert comms[0].memory()["captured"] == 0
    after = run(comms, lambda comm: comm.combine(x[comm.rank], "exact"))
    assert torch.equal(torch.cat(before), torch.cat(after))


def test_communicators_made_and_destroyed_leave_no_gpu_memory() -> None:
    x = partials(16, 64)

    def held(times: int) -> int:
        for _ in range(times):
            made = bicomm.local_world(W, device=DEVICE, mode="exact", timeout=4.0)
            run(made, lambda comm: comm.combine(x[comm.rank]))
            for comm in made:
                comm.close()
        del made
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = held(3)
    assert held(200) <= before


def test_gradients_are_dispatch_and_combine(comms: list[Communicator]) -> None:
    splits = (2, 0, 5, 1, 3, 0, 4, 1)
    x = [t.requires_grad_() for t in partials(16, 64)]
    upstream = [torch.randn(n, 64, device=DEVICE) for n in splits]

    def forward(comm: Communicator) -> torch.Tensor:
        return comm.combine(x[comm.rank], "ordered", splits=splits)

    with torch.no_grad():
        run(comms, lambda comm: comm.dispatch(upstream[comm.rank], splits=splits))
        run(comms, lambda comm: comm.combine(x[comm.rank], "ordered", splits=splits))
    outs = issue(comms, forward)
    torch.cuda.synchronize()
    grads = issue(comms, lambda comm: torch.autograd.grad(outs[comm.rank], x[comm.rank], upstream[comm.rank])[0])
    torch.cuda.synchronize()
    for comm in comms:
        comm.check()
        assert torch.equal(grads[comm.rank], torch.cat(upstream))


@pytest.mark.parametrize("contract", [Contract("exact"), Contract("window", (16, 95, 86))])
def test_the_switchs_whole_path_with_its_load_in_software(comms: list[Communicator], contract: Contract) -> None:
    """multimem.py as it runs under NVLS, but for the instruction: plan, device word, heads and tails, graphs."""
    for comm in comms:
        comm._facts = dataclasses.replace(comm._facts, multicast="", certified=contract, confirmed=contract)
        comm.transport.nvls = Nvls(contract, comm.device, lambda _: "", lambda _: "", hardware=False)
    assert comms[0].plan("multimem").executor.startswith("multimem")
    for splits, hidden in (((3,) * 8, 2048), ((5, 0, 1, 9, 0, 0, 2, 30), 2050), ((1, 2, 0, 4, 5, 6, 7, 0), 7)):
        x = partials(sum(splits), hidden)
        for counts in (splits, torch.tensor(splits, device=DEVICE)):
            outs = run(comms, lambda comm, x=x, c=counts: comm.combine(x[comm.rank], "multimem", splits=c))
            got = torch.cat([out[:n] for out, n in zip(outs, splits, strict=True)])
            assert torch.equal(bits(got.cpu()), bits(contract.sum([t.cpu() for t in x])))
    for comm in comms:
        comm.transport.nvls.distrust("rank 2: the switch gave 0x0")
    assert "rank 2: the switch gave" in str(comms[0].plan("multimem"))
    again = run(comms, lambda comm: comm.combine(x[comm.rank], "multimem", splits=splits))
    assert torch.equal(bits(torch.cat(again)), bits(got))


def test_graphs_stay_valid_while_the_memory_is_suspended(comms: list[Communicator]) -> None:
    x = partials(16, 64)
    run(comms, lambda comm: comm.combine(x[comm.rank], "exact"))
    graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=main):
        for comm in comms:  # a branch for each rank
            comm.stream.wait_stream(main)
        outs = issue(comms, lambda comm: comm.combine(x[comm.rank], "exact"))
        for comm in comms:
            main.wait_stream(comm.stream)
    for comm in comms:
        comm.suspend()
        assert comm.memory()["captured"] > 0
    torch.cuda.empty_cache()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(torch.cat(outs).cpu()), bits(Contract("exact").sum([t.cpu() for t in x])))


def test_compiled_code_keeps_every_collective_and_its_bits() -> None:
    comm = bicomm.local_world(1, device=DEVICE, mode="exact")[0]

    def layer(x: torch.Tensor) -> torch.Tensor:
        comm.combine(x * 3)  # unused
        return comm.combine(x * 2) + comm.dispatch(comm.combine(x * 2), splits=[x.shape[0]])

    x = torch.randn(6, 64, device=DEVICE, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True)
    got, want = compiled(x), layer(x)
    assert torch.equal(bits(got.detach()), bits(want.detach()))
    grads = [torch.autograd.grad(y.sum(), x)[0] for y in (got, want)]
    assert torch.equal(grads[0], grads[1])
    torch._dynamo.reset()
