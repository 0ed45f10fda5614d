"""Where the sweep runs, processes with a GPU each, processes on CPUs, or a local world on one GPU, and how it times.

Every stage has `comms`, the communicators that this process drives (all eight in a local world, else its own), and
times a function of one communicator. Times are those of the slowest rank's median, in microseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import common
import torch
import torch.distributed as dist

import bicomm
from bicomm.communicator import Communicator

Call = Callable[[Communicator], object]
MOST_CALLS = 20  # in one graph: the time of a replay, over so many calls, hides the launch of the graph


class Stage:
    """What the stages share. seconds: to spend on timing one series at one size."""

    shared = False  # do all ranks' bytes go through one memory?
    timed = True
    note = ""

    def __init__(self, comms: list[Communicator], device: torch.device, seconds: float) -> None:
        self.comms, self.device, self.seconds = comms, device, seconds
        self.size, self.rank = comms[0].size, comms[0].rank
        self.apart: Communicator | None = None  # of the same ranks, without shared memory

    def agree(self, value: float) -> float:
        """The largest value of any rank."""
        return value

    def sync(self) -> None:
        """Wait for all work of this rank."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def issue(self, call: Call) -> None:
        """The call once, on every communicator of this process. The first call of a kind goes through `first`."""
        for comm in self.comms:
            call(comm)

    def first(self, call: Call, barriers: bool) -> float:
        """Milliseconds of the first call of a kind, compilation included. barriers: does it wait for other ranks?"""
        self.sync()
        begin = time.perf_counter()
        self.issue(call)
        self.sync()
        return self.agree(1e3 * (time.perf_counter() - begin))

    def time(self, call: Call, *, graph: bool = True) -> tuple[float, float]:
        """Microseconds of a call that `first` has made: (median, tenth percentile), of the rank that is slowest.

        graph: may it be captured?
        """
        raise RuntimeError("these ranks are not timed: the stage is for correctness only")

    def summary(self, times: list[float]) -> tuple[float, float]:
        """What `time` returns, from this rank's times."""
        times = sorted(times)
        return self.agree(statistics.median(times)), self.agree(times[len(times) // 10])

    def reserve(self, nbytes: int) -> None:
        """Take so much symmetric memory on every rank now."""
        for comm in self.comms:
            comm.reserve(1, -(-nbytes // 4))

    def check(self) -> None:
        """Raise what went wrong on the device."""
        self.sync()
        for comm in self.comms:
            comm.check()


class CpuRanks(Stage):
    """Processes on one or more hosts without GPUs. Wall-clock time."""

    shared = True

    def __init__(self, comm: Communicator, group: dist.ProcessGroup, seconds: float) -> None:
        super().__init__([comm], torch.device("cpu"), seconds)
        self.group = group

    def agree(self, value: float) -> float:
        held = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(held, dist.ReduceOp.MAX, group=self.group)
        return float(held)

    def time(self, call: Call, *, graph: bool = True) -> tuple[float, float]:
        comm = self.comms[0]
        estimate = self.agree(self._once(call, comm))
        turns = max(7, min(300, int(self.seconds / max(estimate, 1e-6))))
        return self.summary([1e6 * self._once(call, comm) for _ in range(turns)])

    def _once(self, call: Call, comm: Communicator) -> float:
        comm.barrier()
        begin = time.perf_counter()
        call(comm)
        return time.perf_counter() - begin


class GpuRanks(Stage):
    """Processes with a GPU each: CUDA-graph replays, or, where a call cannot be captured, CUDA events around it."""

    def __init__(self, comm: Communicator, group: dist.ProcessGroup, seconds: float) -> None:
        super().__init__([comm], comm.device, seconds)
        self.group = group
        self.stream = torch.cuda.Stream(self.device)

    def agree(self, value: float) -> float:
        held = torch.tensor([value], dtype=torch.float64)  # on the host: through gloo
        dist.all_reduce(held, dist.ReduceOp.MAX, group=self.group)
        return float(held)

    def issue(self, call: Call) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            call(self.comms[0])
        torch.cuda.current_stream().wait_stream(self.stream)

    def time(self, call: Call, *, graph: bool = True) -> tuple[float, float]:
        comm = self.comms[0]
        with torch.cuda.stream(self.stream):
            estimate = self.agree(min(_timed(lambda: call(comm), self.stream) for _ in range(3)))
            calls, turns = _counts(estimate, self.seconds)
            if not graph:
                times = [_timed(lambda: call(comm), self.stream) for _ in range(turns)]
                return self.summary(times)
            captured = torch.cuda.CUDAGraph()
            self.stream.synchronize()
            with torch.cuda.graph(captured, stream=self.stream, capture_error_mode="thread_local"):
                for _ in range(calls):
                    call(comm)
            times = [_timed(captured.replay, self.stream) / calls for _ in range(turns + 3)]
        return self.summary(times[3:])


class SharedGpus(GpuRanks):
    """More ranks than GPUs: they take turns on a GPU, so that times would say nothing. Correctness only."""

    timed = False
    note = "CORRECTNESS ONLY: fewer GPUs than ranks, so ranks share a GPU by time slices and nothing was timed"

    def time(self, call: Call, *, graph: bool = True) -> tuple[float, float]:
        raise RuntimeError(self.note)


class LocalStage(Stage):
    """A local world: all ranks in this process on one GPU, a stream each; one graph with a branch for each rank.

    Separate graphs would be switched between on one GPU: 29 us a barrier of 8 ranks on an H200, where a branch each
    takes 5. Launches are limited so that the grids of all ranks fit the GPU together.
    """

    shared = True

    def __init__(self, size: int, device: torch.device, seconds: float, blocks_per_sm: int) -> None:
        super().__init__(bicomm.local_world(size, device=device, timeout=20.0), device, seconds)
        self.note = (
            f"LOCAL WORLD: {size} ranks on one GPU, which share its memory and its multiprocessors; barriers are real, "
            f"nothing crosses a link. Times are until the last rank is done, for all {size} ranks' work together"
        )
        limit = torch.cuda.get_device_properties(device).multi_processor_count * blocks_per_sm // size
        for comm in self.comms:
            comm.transport.blocks_limit = max(1, limit)  # type: ignore[attr-defined]

    def issue(self, call: Call) -> None:
        self.sync()
        for comm in self.comms:
            with torch.cuda.stream(comm.stream):
                call(comm)
        self.sync()

    def first(self, call: Call, barriers: bool) -> float:
        from bicomm.local_gpu import rehearsal

        self.sync()
        begin = time.perf_counter()
        if barriers:  # kernels are loaded while nobody waits: CUDA loads none while others run
            with rehearsal(self.comms):
                self.issue(call)
        self.issue(call)
        self.check()
        return 1e3 * (time.perf_counter() - begin)

    def time(self, call: Call, *, graph: bool = True) -> tuple[float, float]:
        main = torch.cuda.Stream(self.device)
        one = self._capture(call, 1, main)
        _timed(one.replay, main)
        calls, turns = _counts(_timed(one.replay, main), self.seconds)
        captured = self._capture(call, calls, main)
        times = [_timed(captured.replay, main) / calls for _ in range(turns + 3)]
        self.check()
        return self.summary(times[3:])

    def _capture(self, call: Call, calls: int, main: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        self.sync()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=main, capture_error_mode="thread_local"):
            for comm in self.comms:
                comm.stream.wait_stream(main)
            for _ in range(calls):
                for comm in self.comms:
                    with torch.cuda.stream(comm.stream):
                        call(comm)
            for comm in self.comms:
                main.wait_stream(comm.stream)
        return graph


def _timed(run: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """Microseconds between two events around run(), on a stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        begin.record()
        run()
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _counts(estimate: float, seconds: float) -> tuple[int, int]:
    """(calls in one graph, replays) for a call of about so many microseconds."""
    calls = max(1, min(MOST_CALLS, int(4000 / max(estimate, 1.0))))
    return calls, max(7, min(31, int(1e6 * seconds / max(estimate * calls, 1.0))))


def rates(stage: Stage, nbytes: int) -> dict[str, float]:
    """GB/s of copies on this stage: `local_copy`, read plus written, of one rank, or of all where they share a memory;
    `peer_copy`, one way into one rank while all ranks read from their next one, where there are links."""
    if isinstance(stage, LocalStage):
        return {"local_copy": common.copy_bandwidth(nbytes)}
    if isinstance(stage, CpuRanks):
        return _cpu_rates(stage, nbytes)
    local = -stage.agree(-common.copy_bandwidth(nbytes))
    return {"local_copy": local, **_gpu_peer(stage, nbytes)}


def _cpu_rates(stage: CpuRanks, nbytes: int) -> dict[str, float]:
    comm = stage.comms[0]
    n = nbytes // 4
    target = torch.ones(n)
    sources = {"local_copy": torch.ones(n)}
    place = None
    if comm.transport.name.startswith("shared memory"):
        place = comm.transport.take(nbytes)
        place.view((n,), torch.float32).fill_(1.0)
        sources["peer_copy"] = place.view((n,), torch.float32, (stage.rank + 1) % stage.size)
    found = {}
    for name, source in sources.items():
        took, _ = stage.time(lambda _, source=source: target.copy_(source))
        # All ranks at once in one memory: their bytes add up. A copy reads and writes.
        found[name] = stage.size * nbytes * (2 if name == "local_copy" else 1) / took / 1e3
    if place is not None:
        comm.barrier()
        comm.transport.release(place)
    return found


def _gpu_peer(stage: Stage, nbytes: int) -> dict[str, float]:
    if not stage.comms[0].plan("ordered").executor.startswith("symmetric") or stage.size == 1:
        return {}
    import torch.distributed._symmetric_memory as symm_mem

    assert isinstance(stage, GpuRanks)
    n = nbytes // 4
    buffer = symm_mem.empty(n, dtype=torch.float32, device=stage.device)
    buffer.fill_(1.0)
    handle = symm_mem.rendezvous(buffer, stage.group.group_name)
    source = handle.get_buffer((stage.rank + 1) % stage.size, (n,), torch.float32)
    target = torch.empty(n, device=stage.device)
    stage.sync()
    stage.comms[0].barrier()

    def kernel(_: Communicator) -> None:
        common._copy[(-(-n // 2048),)](source, target, n, BLOCK=2048, num_warps=4)

    best = min(stage.time(call)[0] for call in (kernel, lambda _: target.copy_(source)))
    stage.comms[0].barrier()
    stage.sync()
    return {"peer_copy": nbytes / best / 1e3}
