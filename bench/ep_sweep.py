"""Combine and dispatch for expert parallelism: every mode at every size, beside what is used today and the bound.

launch/ep_sweep.sh                                 all GPUs of this host, a rank each; 4 ranks on CPUs without a GPU
NPROC=8 launch/ep_sweep.sh --tokens 1,64,4096      eight ranks
sbatch launch/slurm.sbatch bench/ep_sweep.py       under Slurm
python bench/ep_sweep.py                           one GPU alone: a local world of eight ranks

It writes bench/results/ep_sweep_STAGE.json, .md (the table) and .png (the plot). Multicast memory is neither made nor
used, by bicomm, NCCL or NVSHMEM, unless --allow-multicast says that the machine's owner agrees.
"""

from __future__ import annotations

import os
import sys

# Read when these libraries start, so before anything else is imported.
os.environ.update(
    {}
    if "--allow-multicast" in sys.argv
    else {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
)
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # the streams of a local world must run at once
if "--allow-multicast" not in sys.argv:  # torch makes no multicast memory under it
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # fewer GPUs than ranks: correctness

import argparse
import gc
import itertools
import math
import subprocess
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import common
import torch

import bicomm
import ep_bytes
import ep_plot
import ep_stage
from ep_operands import Operands, room
from ep_series import MODES, Series, modes_of, not_run, peers_of
from ep_stage import CpuRanks, GpuRanks, LocalStage, SharedGpus, Stage

ALLOW_MULTICAST = "--allow-multicast"
MULTICAST = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS")
CHECKED_TOKENS = 3
CACHE = Path("/sys/devices/system/cpu/cpu0/cache")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--tokens", type=sizes_of, help="tokens a rank (default 1,4,16,...,16384; fewer without a GPU each)"
    )
    parser.add_argument("--hidden", type=sizes_of, default=[2048, 4096, 7168])
    parser.add_argument("--modes", type=modes_named, default=list(MODES))
    parser.add_argument("--top-k", type=common.positive, default=8)
    parser.add_argument("--no-peers", action="store_true", help="bicomm only")
    parser.add_argument("--seconds", type=above_zero, help="for one series at one size (default 0.3)", default=0.3)
    parser.add_argument("--most-bytes", type=above_zero, help="of operands on one rank; larger sizes are left out")
    parser.add_argument("--local-world", type=common.positive, default=8, help="ranks where one GPU is alone")
    parser.add_argument(
        "--blocks-per-sm", type=common.positive, default=2, help="of a local world's launches, all ranks together"
    )
    parser.add_argument("--device", help="cpu: leave the GPUs alone")
    parser.add_argument("--name", help="of the result files")
    parser.add_argument("--note", default="", help="a sentence for the record, such as what else the machine did")
    parser.add_argument(ALLOW_MULTICAST, action="store_true", help="only where the machine's owner agrees")
    return parser.parse_args()


def sizes_of(text: str) -> list[int]:
    """Whole numbers from 1 on, with commas between them."""
    return [common.positive(word) for word in text.split(",")]


def modes_named(text: str) -> list[str]:
    """Modes, with commas between them."""
    unknown = set(text.split(",")) - set(MODES)
    if unknown:
        raise argparse.ArgumentTypeError(f"no such mode: {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
    return text.split(",")


def above_zero(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def make_stage(given: argparse.Namespace, world: bicomm.World) -> tuple[Stage, str]:
    """The stage that this world allows, and a short name for it."""
    if world.size == 1:
        if world.device.type != "cuda":
            raise SystemExit("one rank on a CPU has nobody to combine with: run launch/ep_sweep.sh, or under torchrun")
        return LocalStage(given.local_world, world.device, given.seconds, given.blocks_per_sm), "local_gpu"
    comm = bicomm.Communicator(timeout=60.0)
    if world.device.type != "cuda":
        return CpuRanks(comm, world.group, given.seconds), "cpu"
    if world.shares_gpu:
        return SharedGpus(comm, world.group, given.seconds), "shared_gpu"
    return GpuRanks(comm, world.group, given.seconds), f"gpu{world.size}"


def sizes(given: argparse.Namespace, stage: Stage) -> tuple[list[tuple[int, int]], list[str]]:
    """(tokens, hidden) to run, and what was left out for want of memory."""
    tokens = [4**i for i in range(8)]
    if isinstance(stage, LocalStage):
        tokens = [1, 8, 64, 512, 2048]
    elif isinstance(stage, CpuRanks):
        tokens = [1, 8, 64, 256]
    elif isinstance(stage, SharedGpus):
        tokens = [1, 8]
    most = given.most_bytes
    if most is None:
        most = 2**29 if stage.device.type == "cpu" else 0.2 * torch.cuda.get_device_properties(0).total_memory
        most = most / len(stage.comms)
    kept, left = [], []
    for hidden, count in itertools.product(given.hidden, given.tokens or tokens):
        needed = room(stage.size, count, hidden, given.top_k)
        if needed > most:
            left.append(f"{count} x {hidden}: {needed:,} bytes a rank, the limit is {int(most):,}")
        else:
            kept.append((count, hidden))
    return kept, left


def check(stage: Stage, given: argparse.Namespace, modes: list[str], hidden: int) -> list[dict[str, Any]]:
    """Every series on data that tell: bicomm's bits against the contract's definition, peers within bf16's accuracy."""
    found = []
    for wide in (True, False):
        with Operands(stage, CHECKED_TOKENS, hidden, given.top_k) as at:
            at.fill_to_check(wide)
            every = modes_of(stage, at, modes) if wide else () if given.no_peers else peers_of(stage, at)
            for series in every:
                took = stage.first(series.call, series.barriers)
                wrong = sum(_wrong(stage, at, series, comm.rank, wide) for comm in stage.comms)
                wrong = int(stage.agree(float(wrong)))
                found.append(
                    {"name": series.name, "hidden": hidden, "data": "wide" if wide else "normal", "wrong": wrong}
                    | {"first_call_ms": took}
                )
    return found


def _wrong(stage: Stage, at: Operands, series: Series, rank: int, wide: bool) -> int:
    """Elements of one rank's result that are not what they must be."""
    got = series.result[rank].cpu()
    if series.of == "dispatch":
        return int((got != torch.cat([at.tokens_of(r) for r in range(stage.size)])).sum())
    contract = stage.comms[0].plan(series.mode or ("owner" if series.of == "owner" else "exact")).contract
    want = at.expected(contract, rank, wide)
    if series.mode is not None:
        return int((got.view(torch.int32) != want.view(torch.int32)).sum())
    return int(((got.float() - want).abs() > 0.1).sum())  # sums of normal data, a few units large


def measure(
    stage: Stage, given: argparse.Namespace, modes: list[str], at: Operands, copy: dict[str, float]
) -> list[dict[str, Any]]:
    """One size: every series, timed."""
    found: list[dict[str, Any]] = []
    own, theirs = modes_of(stage, at, modes), () if given.no_peers else peers_of(stage, at)
    for series in itertools.chain(own, theirs):
        try:
            stage.first(series.call, series.barriers)
            took, quick = stage.time(series.call, graph=series.graph)
        except bicomm.BicommError:
            raise
        except RuntimeError as error:  # a peer that does not run here; the same on every rank
            if series.mode is not None:
                raise
            traceback.print_exc(limit=1)
            found.append({"name": series.name, "tokens": at.tokens, "hidden": at.hidden, "error": str(error)[:200]})
            continue
        amount = ep_bytes.moved(series.how, stage.size, at.tokens, at.hidden, given.top_k)
        row = {
            "name": series.name, "of": series.of, "how": series.how, "tokens": at.tokens, "hidden": at.hidden,
            "us": took, "us_p10": quick, "tokens_per_s": 1e6 * at.tokens * stage.size / took, "link_bytes": amount.link,
            "memory_bytes": amount.memory, "executor": series.executor, "bicomm": series.mode is not None,
            "timing": "graph" if series.graph and stage.device.type == "cuda" else "calls",
        }  # fmt: skip
        if "peer_copy" in copy or stage.shared:
            at_best = ep_bytes.bound(series.how, stage.size, at.tokens, at.hidden, given.top_k, copy, stage.shared)
            row |= {"bound_us": at_best, "share": at_best / took}
        found.append(row)
    return found


def barriers(stage: Stage) -> list[dict[str, Any]]:
    """A barrier without work; in a local world of several sizes, since what a rank more costs shows there."""
    stages = [stage]
    if isinstance(stage, LocalStage):
        others = [n for n in (2, 4, 16) if n != stage.size]
        stages += [LocalStage(n, stage.device, stage.seconds, 1) for n in others]
    found = []
    for each in stages:
        each.first(lambda comm: comm.barrier(), True)
        graph = not each.comms[0].plan("ordered").executor.startswith("all-to-all")
        took, quick = each.time(lambda comm: comm.barrier(), graph=graph)
        found.append({"world": each.size, "us": took, "us_p10": quick})
        if each is not stage:
            for comm in each.comms:
                comm.close()
    return found


def topology(stage: Stage, world: bicomm.World) -> dict[str, Any]:
    """Ranks, hosts, links and caches."""
    hosts = Counter(peer.boot for peer in world.peers)
    found: dict[str, Any] = {
        "ranks": stage.size, "processes": world.size, "launcher": world.launcher, "hosts": len(hosts),
        "ranks_per_host": sorted(hosts.values()), "environment": {name: os.environ.get(name) for name in MULTICAST},
    }  # fmt: skip
    if stage.device.type == "cuda":
        found["cache_bytes"] = torch.cuda.get_device_properties(stage.device).L2_cache_size
        try:
            told = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=True)
            found["links"] = told.stdout.splitlines()
        except (OSError, subprocess.SubprocessError) as error:
            found["links"] = [f"nvidia-smi topo -m: {error}"]
    else:
        sizes = [(int((at / "level").read_text()), (at / "size").read_text().strip()) for at in CACHE.glob("index*")]
        found["caches"] = dict(sorted(sizes))
    return found


def main() -> None:
    given = arguments()
    modes = given.modes
    world = bicomm.init(device=given.device)
    begin = time.perf_counter()
    stage, name = make_stage(given, world)
    made = time.perf_counter()
    if world.size > 1 and stage.comms[0].plan("exact").executor[:10] != "all-to-all":
        stage.apart = bicomm.Communicator(timeout=60.0, share_memory=False)
    wanted, left_out = sizes(given, stage)
    if not wanted:
        raise SystemExit("no size fits the memory: " + "; ".join(left_out))
    gc.freeze()  # every capture collects garbage
    unit = math.lcm(256, *(2 * hidden for _, hidden in wanted))  # so that ranks of a local world lie whole rows apart
    most = max(room(stage.size, count, hidden, given.top_k) for count, hidden in wanted)
    stage.reserve(-(-most // unit) * unit)
    stage.sync()
    setup: dict[str, Any] = {
        "communicator_ms": stage.agree(1e3 * (made - begin)),
        "symmetric_memory_ms": stage.agree(1e3 * (time.perf_counter() - made)),
        "symmetric_memory_bytes": stage.comms[0].memory()["held"],
    }
    checks = [row for hidden in sorted({h for _, h in wanted}) for row in check(stage, given, modes, hidden)]
    rows: list[dict[str, Any]] = []
    copy: dict[str, float] = {}
    if stage.timed:
        copy = ep_stage.rates(stage, 1 << 28 if stage.device.type == "cuda" else 1 << 26)
        setup["barriers"] = barriers(stage)
        for count, hidden in wanted:
            with Operands(stage, count, hidden, given.top_k) as at:
                at.fill()
                rows += measure(stage, given, modes, at, copy)
    stage.check()
    wrong = [row for row in checks if row["wrong"]]
    if world.rank == 0:
        report(given, name, stage, rows, {
            "note": " ".join(filter(None, (stage.note, given.note))), "timed": stage.timed, "shared": stage.shared,
            "world": stage.size, "top_k": given.top_k, "topology": topology(stage, world), "copy_GB_per_s": copy,
            "setup": setup, "not_run": not_run(stage, modes), "left_out": left_out, "checks": checks,
        })  # fmt: skip
    gc.unfreeze()
    bicomm.shutdown()
    if wrong:
        raise SystemExit(f"WRONG: {wrong}")


def report(
    given: argparse.Namespace, name: str, stage: Stage, rows: list[dict[str, Any]], more: dict[str, Any]
) -> None:
    """Print the tables; write the record and the plot."""
    common.table("Right? Elements that differ from the contract's definition (peers: by more than 0.1)", more["checks"])
    shown = ("tokens", "hidden", "of", "name", "us", "bound_us", "share", "error")
    common.table("Time of a call", [{key: row[key] for key in shown if key in row} for row in rows])
    if more["note"]:
        print(more["note"])
    print("copies, GB/s:", {key: round(value, 1) for key, value in more["copy_GB_per_s"].items()})
    print("apart from the calls:", more["setup"])
    for mode, reason in more["not_run"].items():
        print(f"not run: {mode}: {reason}")
    for size in more["left_out"]:
        print(f"left out: {size}")
    path = common.save(f"ep_sweep_{given.name or name}", rows, **more)
    if stage.timed:
        print("wrote", ep_plot.write_table(path), file=sys.stderr)
        try:
            print("wrote", ep_plot.plot(path), file=sys.stderr)
        except ImportError:
            print("no plot: pip install matplotlib, then python bench/ep_plot.py", path, file=sys.stderr)


if __name__ == "__main__":
    with torch.no_grad():
        main()
