"""What rank 0 shows of the demo: how far it is, two tables, and a verdict."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Protocol

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from bicomm.demo.batches import Batch
from bicomm.demo.layer import TREE, Shape
from bicomm.presets import name_of_partial

_WIDTH = 96  # of everything in a pipe


def on_terminal(launcher: str) -> bool:
    """Whether a person looks at the output. Open MPI's ranks always think so: mpirun gives them pseudo-terminals."""
    return sys.stdout.isatty() and launcher not in ("mpirun", "mpi4py")


class Told(Protocol):
    """Somebody who is told how far the demo is."""

    def step(self, what: str) -> None:
        """The next step begins."""

    def close(self) -> None:
        """The last one is done."""


class Progress:
    """A bar on a terminal, a line for each step in a pipe, nothing where not `shown`."""

    def __init__(self, shown: bool, launcher: str, steps: int) -> None:
        self._shown, self._steps, self._done = shown, steps, 0
        self._bar: Bar | None = None
        if shown and on_terminal(launcher):
            columns = (BarColumn(20), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
            self._bar = Bar(*columns, TextColumn("{task.description}"), transient=True)
            self._task = self._bar.add_task("", total=steps)
            self._bar.start()

    def step(self, what: str) -> None:
        """The next step begins."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=what)
        self._done += 1
        if self._shown and self._bar is None:
            print(f"[{self._done}/{self._steps}] {what}", flush=True)

    def close(self) -> None:
        """The last one is done: a bar goes away."""
        if self._bar is not None:
            self._bar.stop()


@dataclasses.dataclass(frozen=True)
class Line:
    """One mode in the first batch. wrong: for each rank, the elements that differ from the single process's."""

    mode: str
    contract: str
    executor: str
    milliseconds: float
    digest: str
    wrong: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Control:
    """A sum without a contract. changed: elements that differ from `ordered`."""

    name: str
    executor: str
    milliseconds: float | None
    changed: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One more batch. changed, naive: elements of the first batch's tokens that have other bits here, of `elements`."""

    name: str
    tokens: int
    splits: tuple[int, ...]
    changed: dict[str, int]
    naive: int
    elements: int


@dataclasses.dataclass(frozen=True)
class Report:
    """All that was found. dispatched: elements that a dispatch got wrong. switch: why the NVLink switch did not add."""

    ranks: int
    device: str
    launcher: str
    shape: Shape
    batch: Batch
    lines: tuple[Line, ...]
    controls: tuple[Control, ...]
    rows: tuple[Row, ...]
    dispatched: int
    switch: str

    @property
    def failures(self) -> list[str]:
        """What must agree and does not, one sentence each."""
        told = [f"dispatch changed {self.dispatched:,} elements"] if self.dispatched else []
        for line in self.lines:
            wrong = [f"{n:,} elements of rank {rank}" for rank, n in enumerate(line.wrong) if n]
            told += [f"{line.mode}: {', '.join(wrong)} differ from the single process's"] if wrong else []
        for row in self.rows:
            changed = [f"{mode} {n:,}" for mode, n in row.changed.items() if n]
            told += [f"batch {row.name}: {', '.join(changed)} elements changed"] if changed else []
        return told

    def show(self) -> None:
        """Print the tables and the verdict."""
        console = Console(highlight=False)
        if not on_terminal(self.launcher):
            console = Console(highlight=False, width=_WIDTH, force_terminal=False)
        shape = self.shape
        console.print(
            f"\n{_many(self.ranks, 'rank')} ({self.launcher}, {self.device}), {self.batch.tokens} tokens of text, "
            f"hidden {shape.hidden}, intermediate {shape.intermediate}, top-{shape.top_k} of {shape.experts} experts.\n"
            f"The tree within a rank is {name_of_partial(TREE)}: slots in order, fp64, one rounding."
        )
        console.print(self._modes(), self._batches())
        console.print("owner has this SHA-256 with any number of ranks, the others with this number only.")
        console.print("all_reduce and reverse, which have no contract, are compared with ordered.")
        if self.switch:
            console.print(f"multimem ran in software, not in the NVLink switch: {escape(self.switch)}.")
        if self.ranks < 3:
            console.print("The controls differ from three ranks on: two addends have one order.")
        for failure in self.failures:
            console.print(f"[bold red]DIFFERS[/] {escape(failure)}")
        if self.failures:
            console.print("[bold red]FAILED[/]: what must agree bit for bit does not")
        else:
            compared = len(self.lines) * (1 + len(self.rows))
            console.print(f"[bold green]OK[/]: all {compared} results have the bits of their contract")

    def _modes(self) -> Table:
        table = _table("mode", "contract", "executor", ">ms", "SHA-256", "against one process")
        for line in self.lines:
            ranks = sum(map(bool, line.wrong))
            good = f"[green]same bits, {_many(self.ranks, 'rank')}[/]"
            verdict = f"[red]{sum(line.wrong):,} differ, {_many(ranks, 'rank')}[/]" if ranks else good
            executor = re.split(r" \(| on the ", line.executor)[0]
            table.add_row(line.mode, line.contract, executor, f"{line.milliseconds:.1f}", line.digest, verdict)
        for control in self.controls:
            ms = "" if control.milliseconds is None else f"{control.milliseconds:.1f}"
            changed = f"[yellow]{_share(control.changed, self.batch.tokens * self.shape.hidden)}[/]"
            table.add_row(control.name, "none", control.executor, ms, "", changed)
        return table

    def _batches(self) -> Table:
        table = _table("the same tokens", *(row.name for row in self.rows))
        for line in self.lines:
            changed = [row.changed[line.mode] for row in self.rows]
            table.add_row(line.mode, *(f"[red]{n:,} differ[/]" if n else "[green]same bits[/]" for n in changed))
        naive = [f"[yellow]{_share(row.naive, row.elements)}[/]" for row in self.rows]
        table.add_row(self.controls[0].name, *naive)
        return table


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        table.add_column(title.removeprefix(">"), justify="right" if title[0] == ">" else "left")
    return table


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _share(count: int, whole: int) -> str:
    return f"{100 * count / whole:.1f}% differ" if count else "0 differ"
