"""Machines that were not measured, from what was: latencies, link and memory rates, and where each figure comes from.

In one NVLink domain:   us = latency + peer_us * (W - 2) + max(link bytes / link rate, memory bytes / memory rate)
Over several domains:   us = agreement + network_us + max(link bytes / link rate, network bytes / network rate)
                             + memory bytes / memory rate

It assumes that a switch gives every GPU its full link rate to all others at once, that what crosses links and what
stays in memory overlap inside a kernel, that experts are spread evenly, that a rank's barrier costs the same for each
peer more, and that over several domains all-to-all overlaps links and network but not the local sum after it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ep_bytes
from model_fit import Fitted

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "model_data.json").read_text())
HOW = {"ordered": ep_bytes.PULL, "exact": ep_bytes.PULL, "owner": ep_bytes.OWNER, "dispatch": ep_bytes.DISPATCH}
TRAVELS = {"ordered": ep_bytes.TRAVEL, "exact": ep_bytes.TRAVEL, "owner": ep_bytes.ROWS, "dispatch": ep_bytes.GATHER}
CHANGES = {
    "ordered": "expert placement, rank numbers",
    "exact": "expert placement",
    "owner": "nothing",
    "dispatch": "nothing: it copies",
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """latency: us by mode, two ranks. peer_us: for each rank more. link: GB/s into one GPU. memory: GB/s by mode."""

    key: str
    latency: dict[str, float]
    peer_us: float
    link: float
    memory: dict[str, float]
    network: float
    network_us: float
    agreement: float
    sources: tuple[str, ...]

    def predict(self, domain: int, nodes: int, *, hidden: int, tokens: int, top_k: int) -> dict[str, float]:
        """Microseconds of a call by mode. domain: ranks of one NVLink domain; nodes: such domains."""
        world = domain * nodes
        found = {}
        for mode, how in HOW.items():
            if nodes == 1:
                amount = ep_bytes.moved(how, world, tokens, hidden, top_k)
                busy = max(amount.link / self.link, amount.memory / self.memory[mode]) / 1e3
                found[mode] = self.latency[mode] + self.peer_us * (world - 2) + busy
                continue
            amount = ep_bytes.moved(TRAVELS[mode], world, tokens, hidden, top_k)
            outside = (world - domain) / (world - 1)
            crossing = max((1 - outside) * amount.link / self.link, outside * amount.link / self.network) / 1e3
            found[mode] = self.agreement + self.network_us + crossing + amount.memory / self.memory[mode] / 1e3
        return found

    def print_sources(self) -> None:
        """Where every figure comes from."""
        print(f"figures used for {self.key} ({DATA['vendor'][self.key]['name']}):")
        for line in self.sources:
            print("  " + line)


def machine(key: str, sets: list[tuple[Fitted, dict[str, Any]]]) -> Machine:
    """A machine of model_data.json, with everything that the fits say of it."""
    vendor, assumed = DATA["vendor"], DATA["assumed"]
    pair = next(one for one, record in sets if record["benchmark"] == "two_h200")
    local = next(((one, rec) for one, rec in sets if rec["benchmark"].startswith("ep_sweep_local_gpu")), None)
    base = pair.fits["ordered"]
    share = base.rate / vendor["h200"]["link_GB_per_s"]
    link = share * vendor[key]["link_GB_per_s"]
    sources = [f"latency of ordered between two ranks {base.latency:.1f} us: fitted to two H200"]
    if key == "h200":
        sources.append(f"link {link:.0f} GB/s each way: fitted to two H200 (copy there: 373)")
    else:
        sources.append(
            f"link {link:.0f} GB/s each way: the vendor's {vendor[key]['link_GB_per_s']} times the {100 * share:.0f}% "
            f"that two H200 reach of theirs; not measured"
        )
    latency = dict.fromkeys(HOW, base.latency)
    peer_us = assumed["peer_us"]
    per_vendor = vendor[key]["memory_GB_per_s"] / vendor["h200"]["memory_GB_per_s"]
    memory = dict.fromkeys(HOW, assumed["memory_share"] * vendor[key]["memory_GB_per_s"])
    if local is None:
        sources.append(f"latency of the other modes: assumed to be that of ordered; {peer_us} us a peer more: assumed")
        sources.append(
            f"memory {memory['ordered']:.0f} GB/s: {assumed['memory_share']:.0%} of the vendor's "
            f"{vendor[key]['memory_GB_per_s']}; not measured"
        )
    else:
        one, record = local
        for mode in HOW:
            if mode in one.fits and "ordered" in one.fits:
                latency[mode] = max(base.latency + one.fits[mode].latency - one.fits["ordered"].latency, 0.0)
                memory[mode] = one.fits[mode].rate * per_vendor
        told = ", ".join(f"{mode} {latency[mode]:.1f}" for mode in HOW if mode != "ordered")
        sources.append(f"latencies, us: {told}: that of ordered and the difference in the local world, measured")
        points = sorted((b["world"], b["us"]) for b in record["setup"]["barriers"])
        if len(points) > 1:
            peer_us = max((points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]), 0.0)
            sources.append(f"{peer_us:.3f} us a peer more: from barriers of local worlds, measured")
        else:
            sources.append(f"{peer_us} us a peer more: assumed")
        told = ", ".join(f"{mode} {memory[mode]:.0f}" for mode in HOW)
        scaled = "" if key == "h200" else f", times the vendor's ratio {per_vendor:.2f}; not measured on this machine"
        sources.append(f"memory, GB/s: {told}: fitted to the local world{scaled}")
    network = assumed["network_share"] * vendor["network_GB_per_s"]
    sources.append(
        f"network {network:.0f} GB/s a GPU: {assumed['network_share']:.0%} of the vendor's "
        f"{vendor['network_GB_per_s']}; {assumed['network_us']:.0f} us for its all-to-all and "
        f"{assumed['hosts_agree_us']:.0f} us in which hosts agree on a call: assumed; not measured (for more than "
        f"one domain only)"
    )
    return Machine(
        key, latency, peer_us, link, memory, network, assumed["network_us"], assumed["hosts_agree_us"], tuple(sources)
    )


def advice(times: dict[str, float]) -> str:
    """Which mode, in words."""
    sums = {mode: us for mode, us in times.items() if mode != "dispatch"}
    fastest = min(sums, key=lambda mode: sums[mode])
    words = [f"fastest: {fastest} ({sums[fastest]:.1f} us)"]
    if fastest != "owner":
        extra = sums["owner"] / sums[fastest] - 1
        words.append(f"owner, whose bits change with nothing, takes {100 * extra:.0f}% more")
    if fastest == "ordered":
        words.append(f"exact takes {100 * (sums['exact'] / sums['ordered'] - 1):.0f}% more")
    return "; ".join(words)
