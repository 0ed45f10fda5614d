"""`bicomm certify fabric` and `bicomm certify show`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bicomm.certify.certificate import Certificate

# The names of emulate.EMULATIONS, whose import costs that of torch.
NAMES = ("exact", "window", "window2", "fp64", "chain", "rotated", "tree", "truncating", "ftz", "flaky")

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def _certify() -> None:
    """Measure what this machine's fabric computes, and look at what was measured."""


@app.command()
def fabric(
    emulate: Annotated[
        str | None, typer.Option(help=f"Measure an emulation instead of the NVLink switch: {', '.join(NAMES)}.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
    channels: Annotated[
        int | None, typer.Option(min=1, help="Channels per family; below 16,777,216 (2^24) no switch is trusted.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="50 million channels per family instead of 16.8.")] = False,
    world_size: Annotated[int, typer.Option(min=2, help="Ranks of an emulation.")] = 8,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the inputs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the certificate to this file.")] = None,
) -> None:
    """Find out how the NVLink switch adds. Exit code 0: under a contract that NVLS may run under.

    Run it under torchrun, one process a GPU. The certificate of a switch is kept where bicomm looks for it; that of
    an emulation is only printed (and written to --out), by one process, whoever started others beside it.
    """
    from bicomm.certify.measure import CHANNELS, FULL_CHANNELS

    if channels is not None and full:
        raise typer.BadParameter("--full says how many channels there are: leave out --channels")
    count = channels or (FULL_CHANNELS if full else CHANNELS)
    if emulate is None:
        _measure_switch(count, seed, as_json, out)
    else:
        _measure_emulation(emulate, world_size, count, seed, as_json, out)


def _measure_emulation(name: str, world: int, channels: int, seed: int, as_json: bool, out: Path | None) -> None:
    from bicomm.certify.emulate import emulated
    from bicomm.certify.measure import measure
    from bicomm.certify.report import certify

    try:
        chosen = emulated(name, world)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--emulate") from error
    if not _is_first():
        return
    with progress(channels, True) as advance:
        result = measure(chosen, channels=channels, seed=seed, progress=advance)
    certificate = certify(result, chosen.name, [], world, seed)
    kept = _tell(certificate, as_json, [out] if out else [])
    raise typer.Exit(0 if kept and certificate.trusted_class else 1)


def _is_first() -> bool:
    """Is this rank 0 of its launcher, or a process that no launcher started?"""
    from bicomm.errors import LaunchError
    from bicomm.ranks.launchers import detect

    try:
        return detect(os.environ).rank == 0
    except LaunchError:  # some variables of a launcher are left over
        return True


def _measure_switch(channels: int, seed: int, as_json: bool, out: Path | None) -> None:
    import bicomm
    from bicomm.certify.certificate import path_for
    from bicomm.certify.hardware import Refused, open_switch
    from bicomm.certify.measure import measure
    from bicomm.certify.report import certify

    try:
        switch = open_switch()
    except Refused as refusal:
        _say_once(f"there is no switch to measure: {refusal}")
        raise typer.Exit(2) from refusal
    first = switch.rank == 0
    with progress(channels, first) as advance:
        result = measure(switch, channels=channels, seed=seed, progress=advance, gather=switch.gather)
    certificate = certify(result, switch.name, switch.machine, switch.world_size, seed)
    keep = switch.local_rank == 0  # every host keeps one
    paths = [path_for(switch.machine, switch.world_size)] if keep else []
    if out and first:
        paths.append(out)
    # A launcher ends every rank when the first one fails, so none leaves before all have printed and written.
    kept = all(switch.gather(_tell(certificate, as_json, paths, quiet=not first)))
    bicomm.shutdown()
    raise typer.Exit(0 if kept and certificate.trusted_class else 1)


def _say_once(text: str) -> None:
    """Print it on rank 0. The others wait for that: a launcher ends every rank when the first one fails."""
    import bicomm
    from bicomm.errors import LaunchError

    try:
        world = bicomm.init()
    except LaunchError as error:
        print(f"{text}; {error}", file=sys.stderr)
        return
    if world.rank == 0:
        print(text, file=sys.stderr, flush=True)
        world.store.set("said", "1")
    world.store.wait(["said"])
    bicomm.shutdown()


def _tell(certificate: Certificate, as_json: bool, paths: list[Path], quiet: bool = False) -> bool:
    """Print it, then write it; False where it could not be written, which must not lose what was measured."""
    from bicomm.certify.certificate import write

    if not quiet:
        _print(certificate, as_json)
        sys.stdout.flush()
    kept = True
    for path in paths:
        try:
            write(certificate, path)
        except OSError as error:
            kept = False
            print(f"the certificate cannot be written to {path}: {error.strerror or error}", file=sys.stderr)
        else:
            print(f"certificate: {path}", file=sys.stderr)
    return kept


def _print(certificate: Certificate, as_json: bool) -> None:
    from rich.console import Console

    from bicomm.certify.report import describe

    if as_json:
        print(json.dumps(certificate.record, indent=1))
    else:
        Console().print(describe(certificate))


@contextmanager
def progress(channels: int, shown: bool) -> Iterator[Callable[[str, int], None]]:
    """A bar on a terminal, a line for each family in a pipe, nothing on other ranks; all on standard error."""
    from bicomm.certify.families import FAMILIES

    done = dict.fromkeys(FAMILIES, 0)
    if not shown:
        yield lambda family, n: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description:10s}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("first look", total=channels * len(done))
            yield lambda family, n: bar.update(task, advance=n, description=family)
    else:

        def line(family: str, n: int) -> None:
            done[family] += n
            if done[family] >= channels:
                print(f"{family}: {done[family]:,} channels", file=sys.stderr, flush=True)

        yield line


@app.command()
def show(
    path: Annotated[Path | None, typer.Argument(help="A certificate; without it, all that are kept here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show certificates. Exit code 1 where there is none, or one cannot be read."""
    from bicomm.certify.certificate import directory, read

    try:
        paths = [path] if path else sorted(directory().glob("fabric-*.json"))
    except OSError as error:
        print(f"{directory()}: {error.strerror or error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if not paths:
        print(f"no certificates in {directory()}", file=sys.stderr)
        raise typer.Exit(1)
    failed, records = False, []
    for one in paths:
        try:
            certificate = read(one)
        except FileNotFoundError:
            failed = True
            print(f"{one}: there is no such file", file=sys.stderr)
            continue
        except ValueError as error:
            failed = True
            print(error, file=sys.stderr)
            continue
        if as_json:
            records.append({"path": str(one), **certificate.record})
        else:
            print(one)
            _print(certificate, False)
    if as_json:
        print(json.dumps(records, indent=1))
    if failed:
        raise typer.Exit(1)
