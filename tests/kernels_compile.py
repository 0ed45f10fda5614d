"""Compiles every executor without a GPU and prints, as JSON, what its PTX, SASS and cubin say of it.

Run as a script with TRITON_INTERPRET=0, by test_kernels_compile.py. Each kernel has its barriers compiled in.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bicomm.kernels import broadcast, exact, gather, multimem, ordered, owner
from bicomm.kernels.call import Tile
from bicomm.kernels.exact import spread_limit

TARGETS = (90, 100, 103)
BYTES_IN = {"peers", "splits", "rows", "ranks", "control", "mine", "page"}  # pointers to int64
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

Variant = tuple[str, Any, dict[str, str], dict[str, Any], Tile]


def reductions() -> Iterator[Variant]:
    """(name, kernel, types of its tensors, constexprs, tile) as the launchers would choose them."""
    for name, world, tile, more in (
        ("ordered", 8, ordered.tile_for(1 << 24), {"ACC": tl.float32}),
        ("ordered small", 8, ordered.tile_for(1 << 14), {"ACC": tl.float32}),
        ("ordered scalar", 8, ordered.tile_for(1 << 24), {"ACC": tl.float32, "VEC": 1}),
        ("ordered W=72", 72, ordered.tile_for(1 << 24), {"ACC": tl.float32}),
        ("fp64", 8, ordered.tile_for(1 << 24), {"ACC": tl.float64}),
    ):
        constants = {"W": world, "ROTATE": 3, "ON_DEVICE": True, "VEC": 4, **more}
        yield name, ordered._ordered_kernel, {"out": "*fp32"}, constants, tile
    for name, world, elements, out, (g, t, s), vector in (
        ("exact", 8, 1 << 24, "*fp32", (0, 0, 0), 4),
        ("exact small bf16", 8, 1 << 14, "*i16", (0, 0, 0), 4),
        ("exact scalar", 8, 1 << 24, "*fp32", (0, 0, 0), 1),
        ("exact W=16", 16, 1 << 24, "*fp32", (0, 0, 0), 4),
        ("exact W=72", 72, 1 << 24, "*fp32", (0, 0, 0), 4),
        ("window", 8, 1 << 24, "*fp32", (16, 95, 86), 4),
        ("window W=72", 72, 1 << 24, "*fp32", (16, 95, 86), 4),
    ):
        constants = {"W": world, "ROTATE": 3, "ON_DEVICE": True, "VEC": vector, "LIMIT": spread_limit(world)}
        constants |= {"G": g, "T": t, "S": s}
        yield name, exact._exact_kernel, {"out": out}, constants, exact.tile_for(elements, world)


def pulls() -> Iterator[Variant]:
    for name, dtype, slots, weighted, out in (
        ("owner", tl.int16, 8, 0, "*fp32"),
        ("owner fp32", tl.float32, 8, 0, "*i16"),
        ("owner weighted", tl.int16, 8, 1, "*i16"),
        ("owner weighted bf16", tl.int16, 8, 2, "*i16"),
        ("owner K=32", tl.int16, 32, 0, "*fp32"),
    ):
        constants = {"W": 8, "K": slots, "DTYPE": dtype, "WEIGHTED": weighted, "LIMIT": spread_limit(slots, 8)}
        constants |= {"COUNTED": True, "VEC": 8 if dtype == tl.int16 else 4}
        yield name, owner._owner_kernel, {"out": out}, constants, owner.tile_for(4096, 2048, "weighted" in name)
    for name, out, fill, vector in (("gather", "*i32", 0x7FC07FC0, 4), ("gather halves", "*i16", 0x7FC0, 1)):
        constants = {"W": 8, "ROTATE": 3, "VEC": vector, "FILL": fill}
        yield name, gather._gather_kernel, {"out": out}, constants, gather.tile_for(1 << 26)


def switched() -> Iterator[Variant]:
    for name, world, edges, (g, t, s) in (
        ("multimem", 8, False, (0, 0, 0)),
        ("multimem window, edges", 8, True, (16, 95, 86)),
        ("multimem W=72, edges", 72, True, (0, 0, 0)),
    ):
        constants = {"W": world, "ROTATE": 3, "ON_DEVICE": True, "LIMIT": spread_limit(world), "G": g, "T": t, "S": s}
        constants |= {"HARDWARE": True, "EDGES": edges, "VEC": 1 if edges else 4}
        yield name, multimem._reduce_kernel, {"out": "*fp32"}, constants, exact.tile_for(1 << 24, world)
    for name, size, edges in (("broadcast", 4, False), ("broadcast halves", 2, True)):
        constants = {"W": 8, "HARDWARE": True, "EDGES": edges, "SIZE": size, "VEC": 1 if edges else 4}
        yield name, broadcast._broadcast_kernel, {"source": f"*i{8 * size}"}, constants, Tile(1024, 4, 8)


def compile_variant(variant: Variant, capability: int) -> Any:
    _, kernel, types, constants, tile = variant
    constants = {**constants, "SYNC": 1, "LANES": 32 * tile.warps, "BLOCK": tile.block}
    types = {"count": "*i32", "weights": "*fp32", "trusted": "*i32", **types}
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(index,)] = "constexpr", constants[name]
            continue
        integers = name in BYTES_IN and not (name == "rows" and kernel is not owner._owner_kernel)
        signature[name] = types.get(name, "*i64" if integers else "i64")
        if signature[name].startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=tile.options)


def run_tool(tool: str, option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True).stdout


def describe(variant: Variant, capability: int) -> dict[str, Any]:
    compiled = compile_variant(variant, capability)
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    lines = [re.sub(r"^@!?%?p\d*\s+", "", line.strip()) for line in ptx.splitlines()]
    usage = run_tool("cuobjdump", "-res-usage", cubin)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    sass = run_tool("nvdisasm", "-c", cubin)  # empty where the tool does not know the target
    return {
        "name": variant[0],
        "capability": capability,
        "target": re.search(r"\.target (\w+)", ptx)[1],
        "operations": sorted({word for line in lines for word in re.findall(r"^\{?\s*([a-z][\w.:]+)", line)}),
        "registers": int(registers),
        "stack": int(stack),
        "local": int(re.search(r"LOCAL:(\d+)", usage)[1]),
        "sass": sorted(set(re.findall(r"\s((?:LDGMC|STG|LDG|MEMBAR|DFMA|FFMA|DADD|FADD|LDL|STL)\S*)", sass))),
        "narrow_offsets": narrow_offsets(compiled.asm["ttir"]),
    }


def narrow_offsets(ttir: str) -> list[str]:
    """Additions of a 32-bit scalar, that is not a constant, to a pointer: an offset that might not fit."""
    found = []
    for line in ttir.splitlines():
        scalar = re.search(r"tt\.addptr %\w+, %(\w+) : !tt\.ptr<[^>]+>, i32", line)
        if scalar and not re.match(r"c\d|c-", scalar[1]):
            found.append(line.strip())
    return found


# What stands for a kernel on the other targets, where not everything is compiled.
MAIN = ("ordered", "exact", "window", "owner", "gather", "multimem window, edges", "multimem W=72, edges", "broadcast")


def main(everything: bool) -> None:
    for variant in (*reductions(), *pulls(), *switched()):
        for capability in TARGETS if everything or variant[0] in MAIN else TARGETS[:1]:
            print(json.dumps(describe(variant, capability)), flush=True)


if __name__ == "__main__":
    main(everything="--main" not in sys.argv)
