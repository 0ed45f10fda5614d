"""What the GPU runtime costs: barriers, small combines under graph replay, barrier code in a large kernel.

python bench/runtime.py        one GPU: a local world of eight ranks, each on a stream of its own, and one rank alone
"""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before CUDA starts: eight streams must run at once

import common
import torch

import bicomm
from bicomm import exact
from bicomm.call import Reduce
from bicomm.communicator import Communicator
from bicomm.gpu_group import rehearsal

W, HIDDEN = 8, 2048
DEVICE = torch.device("cuda")
CALLS = 20  # in one graph: the time of a replay, over so many calls, hides the launch of the graph


def _capture(comms: list[Communicator], call, calls: int) -> list[torch.cuda.CUDAGraph]:  # type: ignore[no-untyped-def]
    torch.cuda.synchronize()
    with rehearsal(comms):
        for comm in comms:
            with torch.cuda.stream(comm.stream):
                call(comm)
    graphs = []
    for comm in comms:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=comm.stream):
            for _ in range(calls):
                call(comm)
        graphs.append(graph)
    return graphs


def _replay(comms: list[Communicator], graphs: list[torch.cuda.CUDAGraph], calls: int, repeats: int = 30) -> float:
    """Median over replays of the slowest rank's time for one call, in microseconds."""
    times = []
    for _ in range(repeats + 5):
        torch.cuda.synchronize()
        events = []
        for comm, graph in zip(comms, graphs, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(comm.stream):
                # All ranks start together: the first work of each waits a little while the host issues the rest.
                torch.cuda._sleep(400_000)
                begin.record()
                graph.replay()
                end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        for comm in comms:
            comm.check()
        times.append(max(begin.elapsed_time(end) for begin, end in events) * 1e3 / calls)
    return sorted(times[5:])[repeats // 2]


def local_world() -> list[dict[str, object]]:
    rows = []
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
                graphs = _capture(
                    comms, lambda comm, s=source, m=mode: comm.combine(s[comm.rank], m, out=outs[comm.rank]), CALLS
                )
                took = _replay(comms, graphs, CALLS)
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
    rows = [{"what": "an empty kernel under graph replay", "us": common.empty_kernel_time()}]
    for mode in ("ordered", "exact"):
        took = common.time_graph(lambda m=mode: comm.combine(x, m, out=out))
        rows.append({"what": f"{mode}, 8 x {HIDDEN}, one rank", "us": took})
    return rows


def barrier_code() -> list[dict[str, object]]:
    """The same large kernel with and without its barriers compiled in: one rank whose flags are always there."""
    tokens = 4096
    comm = bicomm.local_world(1, device=DEVICE)[0]
    transport = comm.transport
    buffers = torch.randn(W, tokens, HIDDEN, device=DEVICE)
    out = torch.empty(tokens, HIDDEN, device=DEVICE)
    peers = torch.tensor([b.data_ptr() for b in buffers], device=DEVICE)
    rows = []
    control = torch.zeros(4096, dtype=torch.int64, device=DEVICE)
    control[0] = 1 << 40
    control[8 : 8 + 2 * W] = 1 << 62  # every rank has always arrived and left
    addresses = torch.full((W,), control.data_ptr(), dtype=torch.int64, device=DEVICE)
    from bicomm.call import Sync

    scratch = torch.zeros(4096, dtype=torch.int64, device=DEVICE)  # signals to the peers land here
    addresses[1:] = scratch.data_ptr()
    page = torch.zeros(64, dtype=torch.int64).pin_memory()
    sync = Sync(addresses, page, 0, 0, 0, 10**9, W)
    for name, used in (("without", None), ("with", sync)):
        call = Reduce(
            peers=peers, offset=0, rank=0, hidden=HIDDEN, out=out, start=0, count=tokens * HIDDEN, sync=used
        )
        took = common.time_graph(lambda c=call: exact.reduce(c))
        rows.append({"what": f"exact, {tokens} x {HIDDEN}, W = {W}, {name} barrier code", "us": took})
    assert int(page[0]) == 0, "the barrier of this benchmark gave up"
    del transport
    return rows


if __name__ == "__main__":
    measured = one_rank() + barrier_code() + local_world()
    common.save("runtime", measured)
    common.table("GPU runtime", measured)
