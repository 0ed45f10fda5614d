"""What the GPU runtime costs: barriers, small combines under graph replay, barrier code in a large kernel.

python bench/runtime.py        one GPU: a local world of eight ranks, each on a stream of its own, and one rank alone
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before CUDA starts: eight streams must run at once

import common
import torch
import triton
import triton.language as tl

import bicomm
from bicomm.communicator import Communicator
from bicomm.kernels import exact
from bicomm.kernels.call import Reduce, Sync
from bicomm.local_gpu import rehearsal

W, HIDDEN = 8, 2048
DEVICE = torch.device("cuda")
CALLS = 20  # in one graph: the time of a replay, over so many calls, hides the launch of the graph


Call = Callable[[Communicator], object]
Tensors = list[torch.Tensor]


def _capture(comms: list[Communicator], call: Call, calls: int) -> torch.cuda.CUDAGraph:
    """One graph with a branch for each rank. Separate graphs would be switched between on one GPU: 29 us a barrier of 8
    ranks on an H200, where a branch each takes 5."""
    torch.cuda.synchronize()
    with rehearsal(comms):
        for comm in comms:
            with torch.cuda.stream(comm.stream):
                call(comm)
    graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=main):
        for comm in comms:
            comm.stream.wait_stream(main)
        for _ in range(calls):
            for comm in comms:
                with torch.cuda.stream(comm.stream):
                    call(comm)
        for comm in comms:
            main.wait_stream(comm.stream)
    return graph


def _replay(comms: list[Communicator], graph: torch.cuda.CUDAGraph, calls: int, repeats: int = 31) -> float:
    """Median over replays of the time of one call, in microseconds: until the last rank is done."""
    times = []
    for _ in range(repeats + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    for comm in comms:
        comm.check()
    return sorted(times[5:])[repeats // 2]


def local_world() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    comms = bicomm.local_world(W, device=DEVICE, timeout=10.0)
    barriers = _capture(comms, lambda comm: comm.barrier(), CALLS)
    alone = _replay(comms, barriers, CALLS)
    rows.append({"what": f"barrier kernel (enter and leave), local world of {W}", "us": alone})
    for tokens in (1, 8, 64):
        x = [torch.randn(tokens * W, HIDDEN, device=DEVICE) for _ in range(W)]
        outs = [torch.empty(tokens, HIDDEN, device=DEVICE) for _ in range(W)]
        held = [comm.acquire(tokens * W, HIDDEN) for comm in comms]
        buffers = [context.__enter__() for context in held]
        for buffer, data in zip(buffers, x, strict=True):
            buffer.copy_(data)
        for mode in ("ordered", "exact"):
            for name, source in (("zero-copy", buffers), ("with its copy in", x)):

                def call(comm: Communicator, mode: str = mode, source: Tensors = source, out: Tensors = outs) -> None:
                    comm.combine(source[comm.rank], mode, out=out[comm.rank])

                graph = _capture(comms, call, CALLS)
                took = _replay(comms, graph, CALLS)
                rows.append(
                    {
                        "what": f"{mode}, {tokens} tokens a rank x {HIDDEN}, {name}, local world of {W}",
                        "us": took,
                        "barrier share": alone / took,
                    }
                )
        for context in held:
            context.__exit__(None, None, None)
    return rows


def one_rank() -> list[dict[str, object]]:
    comm = bicomm.local_world(1, device=DEVICE)[0]
    x = torch.randn(8, HIDDEN, device=DEVICE)
    out = torch.empty_like(x)
    rows: list[dict[str, object]] = [{"what": "an empty kernel under graph replay", "us": common.empty_kernel_time()}]
    for mode in ("ordered", "exact"):
        took = common.time_graph(lambda m=mode: comm.combine(x, m, out=out))
        rows.append({"what": f"{mode}, 8 x {HIDDEN}, one rank", "us": took})
    return rows


@triton.jit
def _all_arrived(control, mark, W: tl.constexpr):
    """What the peers of the next call would have written by now: their arrivals and leaves."""
    lanes = tl.arange(0, W)
    word = (tl.load(control + 0) + 1) << 24
    tl.store(control + 8 + lanes, word + mark)
    tl.store(control + 8 + W + lanes, word)


def barrier_code() -> list[dict[str, object]]:
    """The same large kernel with and without its barriers compiled in; the peers' flags are there before it starts."""
    tokens = 4096
    buffers = torch.randn(W, tokens, HIDDEN, device=DEVICE)
    out = torch.empty(tokens, HIDDEN, device=DEVICE)
    peers = torch.tensor([b.data_ptr() for b in buffers], device=DEVICE)
    control, elsewhere = (torch.zeros(4096, dtype=torch.int64, device=DEVICE) for _ in range(2))
    control[3] = 1  # the epoch
    addresses = torch.full((W,), elsewhere.data_ptr(), dtype=torch.int64, device=DEVICE)
    page = torch.zeros(64, dtype=torch.int64).pin_memory()
    sync = Sync(addresses, control, page, 0, 0, 0, 0, 10**9)
    rows: list[dict[str, object]] = []
    for name, used in (("without", None), ("with", sync)):
        call = Reduce(peers=peers, offset=0, rank=0, hidden=HIDDEN, out=out, start=0, count=tokens * HIDDEN, sync=used)

        def both(call: Reduce = call) -> None:
            _all_arrived[(1,)](control, 0, W=W)
            exact.reduce(call)

        took = common.time_graph(both) - common.time_graph(lambda: _all_arrived[(1,)](control, 0, W=W))
        rows.append({"what": f"exact, {tokens} x {HIDDEN}, W = {W}, {name} barrier code", "us": took})
    assert int(page[0]) == 0, "the barrier of this benchmark gave up"
    return rows


if __name__ == "__main__":
    common.need_gpu()
    measured = one_rank() + barrier_code() + local_world()
    common.save("runtime", measured)
    common.table("GPU runtime", measured)
