"""From what each rank found to one verdict for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bicomm.certify.candidates import VERDICTS


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured; equal on all ranks.

    verdict   the class; variant: which member of it; contract: an id, or None.
    also      other classes that no input can tell from the verdict's at this world size.
    varies    what changed the bits of one and the same sum: "call", "rank", "blocks", "alignment", "repeat".
    search    what the search for a window's parameters found, in words.
    closest   of verdict unknown: the class that was right for longest.
    families  name, channels, and mismatches of the class that was right for longest (summed over the ranks).
    examples  for every other class its first wrong column: variant, family, rank, and fp32 bits in hex.
    observed  facts that no contract depends on: what it makes of negative zeros and NaN before the clean-up.
    """

    verdict: str
    variant: str
    contract: str | None
    also: tuple[str, ...]
    varies: tuple[str, ...]
    search: str
    closest: str | None
    families: tuple[dict[str, Any], ...]
    examples: dict[str, dict[str, Any] | None]
    observed: dict[str, str]


def merge(reports: Sequence[dict[str, Any]]) -> Result:
    """One result from all ranks: a class is left only where it is left on every rank.

    Raises RuntimeError, on every rank, where they did not make the same addends.
    """
    odd = next((r for r, report in enumerate(reports) if report["inputs"] != reports[0]["inputs"]), None)
    if odd is not None:
        raise RuntimeError(f"rank {odd} made other addends than rank 0 from one seed: are their GPUs of one kind?")
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for report in reports:
        for track in report["tracks"]:
            known = merged.setdefault((track["verdict"], track["variant"]), {**track, "wrong": 0, "seen": 0})
            known["wrong"] += track["wrong"]
            known["seen"] += 1
            known["example"] = known["example"] or track["example"]
    for track in merged.values():
        if track["seen"] < len(reports):  # a window that was found on some ranks only
            track["wrong"] += 1
    varies = sorted({what for report in reports for what in report["varies"]})
    if "call" in varies:  # every other read was another call too: nothing else can be told
        varies = ["call"]
    flaky = next((report["flaky"] for report in reports if report["flaky"]), None)
    left = sorted((t for t in merged.values() if not t["wrong"]), key=lambda t: VERDICTS.index(t["verdict"]))
    if flaky is not None:
        verdict, variant, contract = "flaky", f"bits differ by {', '.join(v for v in varies if v != 'rank')}", None
    elif left:
        verdict, variant, contract = left[0]["verdict"], left[0]["variant"], left[0]["contract"]
    else:
        verdict, variant, contract = "unknown", "no class predicts its bits", None
    examples: dict[str, dict[str, Any] | None] = {}
    for name in VERDICTS[:-1]:
        if name != verdict and name != "flaky":
            dead = [t for t in merged.values() if t["verdict"] == name and t["wrong"]]
            best = min(dead, key=lambda t: t["wrong"], default=None)
            examples[name] = best["example"] if best else None
    if verdict != "flaky":
        examples["flaky"] = None  # none was seen in all the repeated reads
    else:
        examples["repeatable"] = flaky
    closest = reports[0]["closest"] if verdict == "unknown" else None
    return Result(
        verdict=verdict,
        variant=variant,
        contract=contract,
        also=tuple(dict.fromkeys(t["verdict"] for t in left if verdict != "flaky" and t["verdict"] != verdict)),
        varies=tuple(varies),
        search=reports[0]["search"],
        closest=closest,
        families=tuple(
            {
                "name": name,
                "channels": counts[0],
                "mismatches": sum(report["families"][name][1] for report in reports),
            }
            for name, counts in reports[0]["families"].items()
        ),
        examples=examples,
        observed=reports[0]["observed"],
    )
