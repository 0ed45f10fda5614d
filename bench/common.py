"""What every benchmark shares: where it ran, how it is timed, and where its numbers go.

A benchmark runs as a plain script, `python bench/NAME.py`, with or without bicomm installed. Times are in microseconds.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def environment() -> dict[str, Any]:
    """The machine, the versions, the date and the commit, for the record of a run."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "numpy"):
        versions[name] = importlib.metadata.version(name)
    gpus = []
    if torch.cuda.is_available():
        versions["driver"] = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        for index in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(index)
            gpus.append(
                {
                    "name": of.name,
                    "capability": f"{of.major}.{of.minor}",
                    "memory_bytes": of.total_memory,
                    "multiprocessors": of.multi_processor_count,
                    "l2_bytes": of.L2_cache_size,
                }
            )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform(), "gpus": gpus},
        "versions": versions,
    }


def save(name: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> Path:
    """Write rows, with `environment()` and what else is given, to bench/results/NAME.json, or to $BICOMM_BENCH_OUT."""
    folder = Path(os.environ.get("BICOMM_BENCH_OUT") or ROOT / "bench" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    record = {"benchmark": name, **environment(), **more, "results": list(rows)}
    path.write_text(json.dumps(record, indent=1, default=str) + "\n")
    print(f"wrote {path}", file=sys.stderr)
    return path


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table: a column for every key, in the order in which the keys first come."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    printed = Table(title=title)
    for column in columns:
        number = all(isinstance(row.get(column, 0), int | float) for row in rows)
        printed.add_column(column, justify="right" if number else "left")
    for row in rows:
        printed.add_row(*(Text(_cell(row.get(column))) for column in columns))  # an error's [words] are no markup
    Console(width=None if sys.stdout.isatty() else 160).print(printed)


def positive(text: str) -> int:
    """A whole number from 1 on, for a command line."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def need_gpu() -> None:
    """End the program with a sentence where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU, and torch sees none")


def time_graph(
    fn: Callable[[], object], *, cold: bool = False, calls: int | None = None, replays: int = 31, warmup: int = 3
) -> float:
    """Microseconds of one call of fn on the GPU: the median over replays of a CUDA graph that holds `calls` calls.

    One graph of many calls hides the launch of the graph (default 20 calls; 5 cold ones). cold: before each call the L2
    cache is filled with other data by reading it, which leaves nothing to be written back; that alone is timed as well,
    and taken off. fn must be fit for capture, and runs `warmup` times before it, on the stream of the capture.
    """
    calls = calls or (5 if cold else 20)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    flush = _flush() if cold else None

    def both() -> None:
        if flush is not None:
            flush()
        fn()

    with torch.cuda.stream(stream):
        for _ in range(warmup):
            both()
        stream.synchronize()
        graphs = [_capture(both, calls, stream)]
        if flush is not None:
            graphs.append(_capture(flush, calls, stream))
        times = []
        for turn in range(warmup + replays):
            took, *taken_off = (_replay(graph, stream) for graph in graphs)
            if turn >= warmup:
                times.append(took - sum(taken_off))
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(times) / calls


def _capture(fn: Callable[[], object], calls: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            fn()
    return graph


def _replay(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    graph.replay()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _flush() -> Callable[[], object]:
    """A function that reads four times the L2 cache."""
    of = torch.cuda.get_device_properties(torch.cuda.current_device())
    filler = torch.zeros(max(4 * of.L2_cache_size, 1 << 28) // 4, device="cuda")
    result = torch.zeros((), device="cuda")
    return lambda: torch.amax(filler, dim=0, out=result)


@triton.jit
def _copy(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n), mask=at < n)


def copy_bandwidth(nbytes: int = 1 << 30) -> float:
    """GB/s (10^9 bytes, read plus written) of a device-to-device copy: the bound of a kernel that moves bytes.

    The better of a copy kernel and the driver's own copy, which a graph may give to a slower copy engine. Random data.
    """
    source = torch.randint(0, 1 << 30, (nbytes // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    n = source.numel()
    kernel = time_graph(lambda: _copy[(triton.cdiv(n, 2048),)](source, target, n, BLOCK=2048, num_warps=4), calls=5)
    driver = time_graph(lambda: target.copy_(source), calls=5)
    return 2 * nbytes / min(kernel, driver) / 1e3


@triton.jit
def _empty() -> None:
    pass


def empty_kernel_time(calls: int = 100) -> float:
    """Microseconds of a kernel that does nothing, timed as everything else is: the floor of any launch."""
    return time_graph(lambda: _empty[(1,)](), calls=calls)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit that is checked out, with `+` after it where files differ from it; None outside a repository."""
    commit = _first_line("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _first_line("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return commit + ("+" if changed else "")


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(done.stdout.splitlines()), "").strip()
