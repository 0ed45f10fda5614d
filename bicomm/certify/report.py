"""From a measurement to a certificate, and to words for people."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import platform
from collections.abc import Sequence

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bicomm import __version__
from bicomm.certify.certificate import SCHEMA, Certificate
from bicomm.certify.verdict import Result


def certify(result: Result, fabric: str, machine: Sequence[dict[str, str]], world_size: int, seed: int) -> Certificate:
    """The certificate of a measurement that was taken just now."""
    measured = dataclasses.asdict(result)
    for name in ("also", "varies", "families"):
        measured[name] = list(measured[name])
    return Certificate(
        {
            "schema": SCHEMA,
            "bicomm": __version__,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "fabric": fabric,
            "machine": list(machine),
            "world_size": world_size,
            "versions": versions(),
            "seed": seed,
            **measured,
        }
    )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or ""}
    try:
        found["triton"] = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        found["triton"] = ""
    return found


def describe(certificate: Certificate) -> Group:
    """What a certificate says, for a terminal."""
    record = certificate.record
    head = Table.grid(padding=(0, 2))
    from bicomm.certify.trust import objection

    against = objection(certificate, record["machine"], record["world_size"])
    gpus = sorted({f"{gpu['name']}, driver {gpu['release'] or gpu['driver']}" for gpu in record["machine"]})
    rows = [
        ("fabric", record["fabric"]),
        ("machine", "; ".join(gpus) or "none: an emulation"),
        ("ranks", str(record["world_size"])),
        ("verdict", f"{record['verdict']}: {record['variant']}"),
        ("contract", record["contract"] or "none"),
        ("may NVLS run under it", f"no: {against}" if against else "yes"),
        ("window search", record["search"]),
        ("before the clean-up", ", ".join(f"{k}: {v}" for k, v in record["observed"].items())),
        ("measured", f"{record['date']}, bicomm {record['bicomm']}, torch {record['versions'].get('torch', '')}"),
    ]
    if record["also"]:
        rows.insert(5, ("the same function here", ", ".join(record["also"])))
    if record["closest"]:
        rows.insert(5, ("closest class", record["closest"]))
    for name, value in rows:
        head.add_row(name, Text(value))
    return Group(head, _families(record["families"]), *_examples(certificate))


def _families(families: Sequence[dict[str, object]]) -> Table:
    table = Table(title="Families", title_justify="left")
    for name, side in (("family", "left"), ("channels", "right"), ("mismatches", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for family in families:
        table.add_row(Text(str(family["name"])), f"{family['channels']:,}", f"{family['mismatches']:,}")
    return table


def _examples(certificate: Certificate) -> list[Table]:
    table = Table(title="First counter-example of each other class", title_justify="left")
    for name in ("class", "addends", "read", "class says"):
        table.add_column(name, overflow="fold")
    for name, example in certificate.record["examples"].items():
        if example is not None:
            label = f"{name} ({example['variant']}; {example['family']}, rank {example['rank']})"
            table.add_row(Text(label), " ".join(example["addends"]), example["got"], example["expected"])
    return [table] if table.row_count else []
