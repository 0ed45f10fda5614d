"""`bicomm doctor`: what this machine has, what changes bits on it, and which executor each mode would get."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

MODES = ("ordered", "exact", "multimem", "fp64", "owner")

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what this machine is and has, what changes bits on it, and which executor each mode would get.

    Under a launcher, one rank of each host does.
    """
    if not _speaks():
        return
    found = examine()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        show(found, Console())


def examine() -> dict[str, Any]:
    """All that the doctor finds, fit for JSON."""
    from bicomm import machine

    found: dict[str, Any] = {
        "versions": machine.versions(),
        "host": machine.host(),
        "gpus": machine.gpus(),
        "peer_access": machine.peer_access(),
        "shared_memory": machine.shared_memory(),
        "sockets": machine.sockets(),
        "file_handles": machine.file_handles(),
        "environment": machine.variables(),
        "numbers": machine.number_settings(),
        "launcher": launcher(),
    }
    found["certificate"] = certificate(len(found["gpus"]))
    found["executors"] = executors(found)
    found["problems"] = problems(found)
    return found


def launcher() -> dict[str, Any]:
    """Who started this process, or what is wrong with what the environment says."""
    from bicomm.errors import LaunchError
    from bicomm.ranks.launchers import detect

    try:
        launch = detect(os.environ)
    except LaunchError as error:
        return {"name": "", "rank": -1, "size": 0, "problem": str(error)}
    return {"name": launch.launcher, "rank": launch.rank, "size": launch.size, "problem": ""}


def _speaks() -> bool:
    from bicomm.errors import LaunchError
    from bicomm.ranks.launchers import detect

    try:
        launch = detect(os.environ)
    except LaunchError:  # which this process shows among the problems
        return True
    return launch.rank == 0 or launch.local_rank == 0


def certificate(count: int) -> dict[str, str]:
    """The contract that the NVLink switch of all GPUs of this machine is certified for, or the reason why it is not."""
    if count < 2:
        return {"contract": "", "reason": "a certificate is for several GPUs", "path": ""}
    from bicomm import capability
    from bicomm.certify import trust

    known = trust.find([capability.identity(index) for index in range(count)], count)
    return {"contract": known.contract.id if known.contract else "", "reason": known.reason, "path": str(known.path)}


def executors(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What each mode would run for a group of all GPUs of this machine, or, without any, of eight ranks on its CPU.

    A group finds out more when it is made: whether the ranks share a container, and what the fabric grants.
    """
    from bicomm.contract import Contract
    from bicomm.plan import Facts, plan

    count = len(found["gpus"])
    if count:
        apart = [(i, j) for i, row in enumerate(found["peer_access"]) for j, can in enumerate(row) if not can]
        memory = f"GPU {apart[0][0]} cannot read the memory of GPU {apart[0][1]}" if apart else ""
        if count > 1 and not memory:
            memory = found["file_handles"] or found["sockets"]["problem"]
        multicast = next((gpu["multicast"] for gpu in found["gpus"] if gpu["multicast"]), "")
        certified = found["certificate"]["contract"]
        known = Contract.parse(certified) if certified else None
        facts = Facts("cuda", count, memory, memory or multicast, known, known, found["certificate"]["reason"])
    else:
        facts = Facts("cpu", 8, found["shared_memory"]["problem"], "the ranks work on CPUs")
    rows = []
    for mode in MODES:
        chosen = plan(mode, facts)
        against = [f"{way.executor}: {way.reason}" for way in chosen.candidates if way.reason]
        rows.append({"mode": mode, "contract": chosen.contract.id, "executor": chosen.executor, "not": against})
    return rows


def problems(found: dict[str, Any]) -> list[str]:
    """What somebody should mend before a combine runs here."""
    said = [found["launcher"]["problem"], found["shared_memory"]["problem"], found["sockets"]["problem"]]
    if found["numbers"]["flush_denormal"]:
        said.append("subnormals are flushed to zero in this process: torch.set_flush_denormal(False)")
    if found["gpus"] and found["file_handles"]:
        said.append(f"torch's symmetric memory cannot pass its handles: {found['file_handles']}")
    shared = found["shared_memory"]
    if 0 < shared["size"] <= 64 << 20:
        said.append(f"{shared['path']} has {shared['size'] >> 20} MiB, a container's default: docker run --shm-size=8g")
    if found["environment"].get("TRITON_INTERPRET", "0") not in ("", "0") and found["gpus"]:
        said.append("TRITON_INTERPRET is set: Triton kernels run in Python although there is a GPU")
    return [text for text in said if text]


def show(found: dict[str, Any], console: Console) -> None:
    """Print what `examine` found."""
    console.print(_machine(found))
    if len(found["peer_access"]) > 1:
        console.print(_peers(found["peer_access"]))
    console.print(_bits(found))
    console.print(_executors(found["executors"]))
    for problem in found["problems"]:
        console.print(Text(f"problem: {problem}", style="bold red"))


def _grid(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", expand=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _row(table: Table, *cells: str) -> None:
    """A row of plain text: what an environment holds is no markup."""
    table.add_row(*map(Text, cells))


def _machine(found: dict[str, Any]) -> Table:
    table = _grid("Machine", "what", "is")
    host, told, shared, sockets = found["host"], found["versions"], found["shared_memory"], found["sockets"]
    _row(table, "system", host["system"])
    _row(table, "processor", f"{host['processor']}, {host['cores']} cores")
    for gpu in found["gpus"]:
        _row(table, f"GPU {gpu['index']}", f"{gpu['name']}, {gpu['memory_gib']} GiB, sm {gpu['capability']}")
        _row(table, "  multicast", gpu["multicast"] or "supported; a group learns what the fabric grants")
    if len(found["gpus"]) > 1:
        known = found["certificate"]
        _row(table, "certificate", known["contract"] or known["reason"])
    if not found["gpus"]:
        _row(table, "GPU", "none that torch sees")
    names = {"python": "Python", "mpi": "MPI", "nccl": "NCCL", "cuda": "CUDA of torch", "driver": "GPU driver"}
    for name, version in told.items():
        _row(table, names.get(name, name), version or "-")
    _row(table, shared["path"], shared["problem"] or f"{_gib(shared['free'])} free of {_gib(shared['size'])}")
    _row(table, "TMPDIR", sockets["problem"] or f"{sockets['tmpdir']}, short enough for unix sockets")
    _row(table, "file handles", found["file_handles"] or "can be passed between processes (pidfd_getfd)")
    start = found["launcher"]
    _row(table, "started by", start["problem"] or f"{start['name']}, rank {start['rank']} of {start['size']}")
    return table


def _peers(matrix: list[list[bool]]) -> Table:
    table = _grid("Peer access: can the GPU of the row read that of the column?", "", *map(str, range(len(matrix))))
    for index, row in enumerate(matrix):
        _row(table, str(index), *("yes" if can else "no" for can in row))
    return table


def _bits(found: dict[str, Any]) -> Table:
    from bicomm.machine import VARIABLES

    table = _grid("What changes bits", "setting", "value", "effect")
    numbers = found["numbers"]
    flushed = "flushed to zero" if numbers["flush_denormal"] else "kept"
    _row(table, "subnormals", flushed, "contracts keep them")
    _row(table, "fp32 products", numbers["float32_matmul_precision"], "other than highest: TF32 or bf16 inside")
    reduced = "allowed" if numbers["bf16_reduced_precision_reduction"] else "no"
    _row(table, "bf16 split-K sums", reduced, "cuBLAS may add its parts in bf16")
    _row(table, "threads", str(numbers["threads"]), "CPU sums and products split by thread")
    for name, effect in VARIABLES.items():
        if name in found["environment"]:
            _row(table, name, found["environment"][name], effect)
    unset = [name for name in VARIABLES if name not in found["environment"]]
    if unset:
        _row(table, "not set", "", ", ".join(unset))
    return table


def _executors(rows: list[dict[str, Any]]) -> Table:
    table = _grid("Executors", "mode", "contract", "executor, and why not a faster one")
    for row in rows:
        lines = [row["executor"], *(f"not {reason}" for reason in row["not"])]
        _row(table, row["mode"], row["contract"], "\n".join(lines))
    return table


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
