"""A cost model of combine and dispatch: which mode for which domain, hidden size and batch.

python bench/model.py                                             fits, and the error on every measured point
python bench/model.py --domain 8 --hidden 7168 --tokens 64        which mode, on eight GPUs of one NVLink domain
python bench/model.py --domain 72 --machine gb200 --hidden 7168 --tokens 128
python bench/model.py --domain 8 --nodes 4 --hidden 7168 --tokens 128
python bench/model.py --table --hidden 7168 --tokens 64           EP 2 to 72 in one domain, and over 2 to 8 nodes

It reads bench/results/ep_sweep_*.json and bench/model_data.json. Every figure it uses is marked: measured, fitted, the
vendor's, or assumed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import common

import model_machine
from model_fit import Fitted, fit_all, pair_points, points_of

RESULTS = Path(__file__).parent / "results"
DOMAINS = (2, 4, 8, 16, 32, 64, 72)
NODES = (2, 4, 8)


def fitted(paths: list[Path], statistic: str) -> list[tuple[Fitted, dict[str, Any]]]:
    """The fits of the sweeps at `paths`, each with its record; and that of the two-H200 table, with that."""
    found = []
    for path in paths:
        record = json.loads(path.read_text())
        points = points_of(record, statistic)
        if points:
            found.append((fit_all(f"{path.stem}, {record['date'][:10]}, {record['world']} ranks", points), record))
    table = model_machine.DATA["two_h200"]
    return [*found, (fit_all(table["source"].split(":")[0], pair_points()), {"benchmark": "two_h200"})]


def print_fits(sets: list[tuple[Fitted, dict[str, Any]]]) -> None:
    """Parameters, then the error of every point."""
    for one, record in sets:
        print()
        common.table(one.source, [
            {"series": name, "latency us": fit.latency, "GB/s": fit.rate,
             "GB/s below the knee": 1e-3 / fit.slope if fit.slope and fit.knee != float("inf") else None,
             "knee MB": fit.knee / 1e6 if fit.knee != float("inf") else None}
            for name, fit in one.fits.items()
        ])  # fmt: skip
        common.table("error on every point", [
            {"series": p.series, "tokens": p.tokens, "hidden": p.hidden, "measured us": p.us, "model us": told,
             "error %": 100 * error}
            for p, told, error in one.points
        ])  # fmt: skip
        if record.get("note"):
            print(record["note"])
        print(
            f"{one.source}: median error {100 * one.median_error:.1f}% of {len(one.points)} points, "
            f"{100 * one.median_held_out:.1f}% of points left out of their fit"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domain", type=common.positive, help="ranks of one NVLink domain")
    parser.add_argument(
        "--nodes", type=common.positive, default=1, help="domains; more than one are joined by a network"
    )
    parser.add_argument("--hidden", type=common.positive, default=7168)
    parser.add_argument("--tokens", type=common.positive, default=64, help="tokens a rank")
    parser.add_argument("--top-k", type=common.positive, default=8)
    parser.add_argument("--machine", choices=["h200", "b200", "gb200"], help="default h200; gb200 beyond 8 ranks")
    parser.add_argument("--table", action="store_true", help="EP 2 to 72, and over several nodes")
    parser.add_argument("--sweep", type=Path, nargs="*", help="JSON of sweeps (default: all in bench/results)")
    parser.add_argument("--statistic", choices=["us", "us_p10"], default="us", help="medians, or tenth percentiles")
    given = parser.parse_args()
    if given.domain == 1 and given.nodes == 1:
        parser.error("one rank combines with nobody: --domain 2 or more, or more --nodes")
    paths = given.sweep if given.sweep is not None else sorted(RESULTS.glob("ep_sweep_*.json"))
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        parser.error(f"there is no such file: {', '.join(missing)}")
    sets = fitted(paths, given.statistic)
    if given.domain is None and not given.table:
        print_fits(sets)
        return
    size = {"hidden": given.hidden, "tokens": given.tokens, "top_k": given.top_k}
    if given.table:
        rows = []
        for domain, nodes in [(d, 1) for d in DOMAINS] + [(8, n) for n in NODES]:
            machine = model_machine.machine(given.machine or ("h200" if domain <= 8 else "gb200"), sets)
            times = machine.predict(domain, nodes, **size)
            rows.append({"EP": domain * nodes, "nodes": nodes, "machine": machine.key, **times})
            rows[-1]["fastest"] = min(times, key=lambda mode: times[mode] if mode != "dispatch" else float("inf"))
        title = f"predicted us of a call, {given.tokens} tokens a rank x {given.hidden}, top-k {given.top_k}"
        common.table(title, rows)
        used = [model_machine.machine(key, sets) for key in dict.fromkeys(row["machine"] for row in rows)]
    else:
        used = [model_machine.machine(given.machine or ("h200" if given.domain <= 8 else "gb200"), sets)]
        times = used[0].predict(given.domain, given.nodes, **size)
        changes = model_machine.CHANGES
        common.table(
            f"predicted, EP {given.domain * given.nodes} on {used[0].key}, {given.nodes} domain(s), {given.tokens} "
            f"tokens a rank x {given.hidden}, top-k {given.top_k}",
            [{"mode": mode, "us": us, "the bits change with": changes[mode]} for mode, us in times.items()],
        )
        print(model_machine.advice(times))
    for machine in used:
        machine.print_sources()
    errors = "; ".join(f"{one.source}: median {100 * one.median_error:.1f}%" for one, _ in sets)
    print(f"error on what was measured: {errors}")


if __name__ == "__main__":
    main()
