"""Plots a sweep from its JSON, time against size and share of the bound against size; and writes its table.

python bench/ep_plot.py bench/results/ep_sweep_cpu.json ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def plot(path: Path) -> Path:
    """Write PATH with .png in place of .json. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    record = json.loads(path.read_text())
    rows = [row for row in record["results"] if "us" in row]
    hidden = sorted({row["hidden"] for row in rows})
    names = list(dict.fromkeys(row["name"] for row in rows))
    own = {row["name"] for row in rows if row["bicomm"]}
    colours = {name: plt.get_cmap("tab20" if len(names) > 10 else "tab10")(i) for i, name in enumerate(names)}
    size = (5.2 * len(hidden), 9.2)
    figure, axes = plt.subplots(2, len(hidden), figsize=size, squeeze=False, sharex="col", sharey="row")
    for column, h in enumerate(hidden):
        for name in names:
            points = sorted((row for row in rows if row["name"] == name and row["hidden"] == h), key=_tokens)
            if not points:
                continue
            style = {"color": colours[name], "label": name, "marker": "o" if name in own else "x", "markersize": 4}
            style |= {"linewidth": 1.8 if name in own else 1.0, "linestyle": "-" if name in own else "--"}
            axes[0][column].plot([p["tokens"] for p in points], [p["us"] for p in points], **style)
            bounded = [p for p in points if "share" in p]
            axes[1][column].plot([p["tokens"] for p in bounded], [100 * p["share"] for p in bounded], **style)
        axes[0][column].set_title(f"hidden {h}")
        axes[0][column].set_xscale("log", base=2)
        axes[0][column].set_yscale("log")
        axes[1][column].set_xlabel("tokens a rank")
        for axis in (axes[0][column], axes[1][column]):
            axis.grid(True, which="major", alpha=0.3)
    axes[0][0].set_ylabel("time of a call, us")
    axes[1][0].set_ylabel("share of the bound by copies, %")
    axes[1][0].set_ylim(bottom=0)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize=9, frameon=False)
    gpus = record["machine"]["gpus"]
    where = gpus[0]["name"] if gpus and "cpu" not in record["benchmark"] else record["machine"]["processor"]
    title = f"{record['world']} ranks, {where}, torch {record['versions']['torch']}, {record['date'][:10]}"
    figure.suptitle(title + (f"\n{_wrapped(record['note'])}" if record["note"] else ""), fontsize=11)
    figure.tight_layout(rect=(0, 0.02 + 0.018 * (-(-len(names) // 3)), 1, 0.985))
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    plt.close(figure)
    return target


def write_table(path: Path) -> Path:
    """Write PATH with .md in place of .json: microseconds and, in brackets, share of the bound, by size and series."""
    record = json.loads(path.read_text())
    rows = record["results"]
    found = {(row["name"], row["hidden"], row["tokens"]): row for row in rows}
    names = list(dict.fromkeys(row["name"] for row in rows))
    lines = [f"# {record['benchmark']}, {record['date'][:10]}", ""]
    lines += [record["note"], ""] if record["note"] else []
    barriers = ", ".join(f"{one['us']:.1f} us ({one['world']} ranks)" for one in record["setup"].get("barriers", []))
    copies = ", ".join(f"{name.replace('_', ' ')} {rate:.0f} GB/s" for name, rate in record["copy_GB_per_s"].items())
    setup = record["setup"]
    lines.append(
        f"{record['world']} ranks, top-k {record['top_k']}, torch {record['versions']['torch']}. {copies}. Barrier "
        f"{barriers}. First touch of {setup['symmetric_memory_bytes']:,} bytes: {setup['symmetric_memory_ms']:.0f} ms. "
        f"Microseconds; in brackets the share of the bound."
    )
    for hidden in sorted({row["hidden"] for row in rows}):
        tokens = sorted({row["tokens"] for row in rows if row["hidden"] == hidden})
        lines += ["", f"## hidden {hidden}", ""]
        lines += ["| tokens a rank | " + " | ".join(map(str, tokens)) + " |", "|---" * (1 + len(tokens)) + "|"]
        for name in names:
            cells = [_cell(found.get((name, hidden, count))) for count in tokens]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    target = path.with_suffix(".md")
    target.write_text("\n".join(lines) + "\n")
    return target


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "us" not in row:
        return "did not run"
    share = f" ({100 * row['share']:.0f}%)" if "share" in row else ""
    return (f"{row['us']:,.0f}" if row["us"] >= 100 else f"{row['us']:.1f}") + share


def _tokens(row: dict[str, int]) -> int:
    return row["tokens"]


def _wrapped(text: str) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, 130))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(write_table(Path(name)), plot(Path(name)))
