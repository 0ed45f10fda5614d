"""The training mirror on one GPU: forward and backward beside a loop of index_selects and the copy bandwidth.

python bench/mirror.py           T = 8192, top-k 8, EP 8, bf16 rows, H = 2048 and 7168; writes results/mirror.json
python bench/mirror.py --tune    the kernels at a handful of settings, best first; writes results/mirror_tune.json

The peer is the loop that trainers use today: for each engine rank and each slot, a full-size index_select, added up in
the engine's order. `share` is the copy bandwidth's time for the bytes that must move, over the time taken.
"""

from __future__ import annotations

import argparse
from typing import Any
from unittest import mock

import common
import torch
from torch import Tensor

from bicomm import mirror
from bicomm.contract import Contract, Partial
from bicomm.mirror import backward, forward, kernels

T, K, EP, EXPERTS = 8192, 8, 8, 128
CONTRACTS = {
    "megatron-vllm-swiglu": Contract.parse("megatron-vllm-swiglu"),
    "megatron-vllm-swiglu, fp64 across": Contract.parse("megatron-vllm-swiglu-fp64"),
    "megatron-deepgemm": Contract.parse("megatron-deepgemm"),
    "exact of fp64 partials": Contract("exact", partial=Partial("slot", "fp64")),
    "exact of exact partials": Contract("exact", partial=Partial()),
    "window of fp64 partials": Contract("window", (16, 95, 86), Partial("slot", "fp64")),
    "owner": Contract("owner"),
    "owner, weighted": Contract("owner", partial=Partial("slot", "exact", "combine")),
    "squared ReLU, FMA": Contract.parse("megatron-vllm-squared-relu-fma"),
    "transformers-fp32": Contract.parse("transformers-fp32"),
    "transformers-bf16": Contract.parse("transformers-bf16"),
}


class Layer:
    """One layer's rows and maps: random top-k of 128 experts, rows sorted by expert, as after grouped GEMMs."""

    def __init__(self, hidden: int) -> None:
        torch.manual_seed(0)
        self.ids = torch.rand(T, EXPERTS, device="cuda").topk(K, dim=1).indices
        slots = mirror.inverse_map(self.ids, EXPERTS)
        placement = mirror.Placement.even(EXPERTS, EP)
        self.row_of_slot = slots.row_of_slot
        self.rank_of_slot = mirror.rank_of_slot(self.ids, placement)
        self.order_of_slot = mirror.order_of_slot(self.ids, placement)
        self.rows = torch.randn(slots.num_rows, hidden, device="cuda").bfloat16()
        self.probs = torch.rand(T, K, device="cuda")
        self.grad = torch.randn(T, hidden, device="cuda")

    def options(self, contract: Contract) -> dict[str, Any]:
        tree = contract.partial
        weighted = tree is not None and tree.probability == "combine"
        return {
            "rank_of_slot": self.rank_of_slot, "ep_size": EP, "contract": contract,
            "order_of_slot": self.order_of_slot if tree is not None and tree.order == "expert" else None,
            "probs": self.probs if weighted else None,
        }  # fmt: skip


def index_select_loop(layer: Layer, contract: Contract) -> Tensor:
    """The peer, for trees without weights in slot order: EP x top-k full-size index_selects of a zero-padded buffer."""
    zero = layer.rows.new_zeros(1, layer.rows.shape[1])
    padded = torch.cat([layer.rows, zero])
    nowhere = layer.rows.shape[0]
    chain = torch.float64 if contract.partial == Partial("slot", "fp64") else torch.float32
    out = torch.zeros(T, layer.rows.shape[1], device="cuda")
    for rank in range(EP):
        partial = torch.zeros(T, layer.rows.shape[1], dtype=chain, device="cuda")
        for slot in range(K):
            index = torch.where(layer.rank_of_slot[:, slot] == rank, layer.row_of_slot[:, slot], nowhere)
            partial += padded.index_select(0, index)
        out += partial.float()
    return out


def measure(hidden: int) -> list[dict[str, Any]]:
    layer = Layer(hidden)
    rate = common.copy_bandwidth() * 1e3  # bytes a microsecond
    elements = T * hidden
    forward_bound = elements * (2 * K + 4) / rate
    weighted_bound = elements * (4 * K + 4) / rate  # backward with weights reads the rows as well
    results = []
    for name, contract in CONTRACTS.items():
        options = layer.options(contract)
        weighted = options["probs"] is not None
        with torch.no_grad():
            took = common.time_graph(
                lambda o=options: mirror.unpermute(layer.rows, layer.row_of_slot, **o), calls=5, replays=15
            )
        row: dict[str, Any] = {"H": hidden, "contract": name, "forward us": took, "share": forward_bound / took}
        if contract.rule == "owner":
            places, tags = layer.row_of_slot, None
        else:
            places, tags = kernels.sort_slots(layer.row_of_slot, layer.rank_of_slot, options["order_of_slot"], EP)

        took = common.time_graph(lambda p=places, t=tags, w=weighted: _backward(layer, p, t, w), calls=5, replays=15)
        row |= {"backward us": took, "backward share": (weighted_bound if weighted else forward_bound) / took}
        if name in ("megatron-vllm-swiglu",):
            with torch.no_grad():
                same = torch.equal(
                    index_select_loop(layer, contract).view(torch.int32),
                    mirror.unpermute(layer.rows, layer.row_of_slot, **options).view(torch.int32),
                )
                peer = common.time_graph(lambda c=contract: index_select_loop(layer, c), calls=1, replays=11)
            assert same, "the loop and the kernel do not agree"
            row |= {"loop us": peer, "speed-up": peer / row["forward us"]}
        results.append(row)
    sort = common.time_graph(lambda: kernels.sort_slots(layer.row_of_slot, layer.rank_of_slot, None, EP))
    results.append({"H": hidden, "contract": "(sorting the slots, within each forward)", "forward us": sort})
    # Exponents so wide that every block of columns is summed slice by slice: the price of hard data.
    layer.rows *= torch.exp2(torch.randint(-60, 61, layer.rows.shape, device="cuda", dtype=torch.float32)).bfloat16()
    for name in ("exact of fp64 partials", "exact of exact partials", "owner"):
        options = layer.options(CONTRACTS[name])
        with torch.no_grad():
            took = common.time_graph(
                lambda o=options: mirror.unpermute(layer.rows, layer.row_of_slot, **o), calls=2, replays=9
            )
        results.append({"H": hidden, "contract": f"{name}, all blocks hard", "forward us": took})
    return results


# columns, warps, slots at once, at most so many registers (None: the compiler's choice)
SETTINGS = (
    (1024, 4, 8, None),
    (1024, 4, 8, 96),
    (1024, 4, 8, 80),
    (1024, 4, 8, 64),
    (1024, 4, 4, 64),
    (512, 2, 8, 80),
    (256, 1, 8, 80),
)
BACKWARD_SETTINGS = ((512, 2, 8), (512, 2, 4), (1024, 4, 4), (256, 1, 8))


def tune(hidden: int) -> list[dict[str, Any]]:
    """The kernels at a handful of settings, best first: what `forward_constants` and `weighted_tile` should choose."""
    layer = Layer(hidden)
    rate = common.copy_bandwidth() * 1e3
    element = T * hidden
    chosen = forward.forward_constants
    results: list[dict[str, Any]] = []
    for name in (
        "megatron-vllm-swiglu",
        "exact of fp64 partials",
        "owner, weighted",
        "transformers-bf16",
        "megatron-deepgemm",
    ):
        options = layer.options(CONTRACTS[name])

        def run(o: dict[str, Any] = options) -> Tensor:
            with torch.no_grad():
                return mirror.unpermute(layer.rows, layer.row_of_slot, **o)

        rows = []
        for setting in SETTINGS:

            def with_setting(*args: Any, s: Any = setting) -> Any:
                kernel, constants, options = chosen(*args)
                constants = {**constants, "BLOCK": s[0], "AT_ONCE": s[2], "SUB": min(256, s[0])}
                return kernel, constants, {**options, "num_warps": s[1], "maxnreg": s[3]}

            with mock.patch.object(forward, "forward_constants", with_setting):
                took = common.time_graph(run, calls=3, replays=9)
            rows.append(_setting(hidden, name, setting, took, element * (2 * K + 4) / rate))
        results += sorted(rows, key=lambda r: r["us"])
    places, tags = kernels.sort_slots(layer.row_of_slot, layer.rank_of_slot, None, EP)
    rows = []
    for shape in BACKWARD_SETTINGS:
        with (
            mock.patch.object(backward, "weighted_tile", lambda _, s=shape: s[:2]),
            mock.patch.object(backward, "at_once", lambda _, s=shape: s[2]),
        ):
            took = common.time_graph(lambda: _backward(layer, places, tags, True), calls=3, replays=9)
        rows.append(_setting(hidden, "backward, weighted", (*shape, None), took, element * (4 * K + 4) / rate))
    return results + sorted(rows, key=lambda r: r["us"])


def _setting(
    hidden: int, name: str, setting: tuple[int, int, int, int | None], took: float, bound: float
) -> dict[str, Any]:
    at = dict(zip(("BLOCK", "warps", "slots", "registers"), setting, strict=True))
    return {"H": hidden, "kernel": name, **at, "us": took, "share": bound / took}


def _backward(layer: Layer, places: Tensor, tags: Tensor | None, weighted: bool) -> object:
    return torch.ops.bicomm_mirror.unpermute_backward(
        layer.grad, places, tags, layer.rows if weighted else None, layer.probs if weighted else None, False,
        layer.rows.shape[0], torch.bfloat16, True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--hidden", type=common.positive, nargs="*", default=[2048, 7168])
    arguments = parser.parse_args()
    common.need_gpu()
    results = [row for hidden in arguments.hidden for row in (tune if arguments.tune else measure)(hidden)]
    name = "mirror_tune" if arguments.tune else "mirror"
    copy = common.copy_bandwidth()
    common.save(name, results, copy_gb_per_s=copy, tokens=T, topk=K, ep_size=EP)
    common.table(f"{name}: T = {T}, top-k {K}, EP {EP}, bf16 rows; copy {copy:.0f} GB/s", results)


if __name__ == "__main__":
    main()
