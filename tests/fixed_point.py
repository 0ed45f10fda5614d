"""A prototype of the integer route: fp32 partials as 64-bit fixed point with a shared exponent, added as integers.

What the NVLink switch would do with `multimem.ld_reduce.add.u64` is here a wrapping torch int64 sum. Run as a script it
prints the tables of docs/fixed-point.md.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

SMALLEST = -149  # exponent of the smallest fp32 number: no addend has bits below it


def headroom(world: int, bits: int = 64) -> int:
    """F: a block whose largest exponent is E is counted in units of 2**(E - F), and W addends never overflow."""
    return bits - 2 - (world - 1).bit_length()


def span(world: int, bits: int = 64) -> int:
    """Binades below the block's largest exponent in which every fp32 number is a whole number of units."""
    return headroom(world, bits) - 23


@dataclasses.dataclass(frozen=True)
class Encoded:
    """words int64 [W, n, B]; unit int32 [n]: the exponent of a unit; lost bool [n]: some addend is not represented."""

    words: Tensor
    unit: Tensor
    lost: Tensor


def agree(blocks: Tensor) -> Tensor:
    """Step 1, on fp32 [W, n, B]: the largest exponent of each block over all ranks, int32 [n]; 128 if not finite.

    In hardware each rank writes its own, one word a block, and reads `multimem.ld_reduce.max.u32` after a barrier.
    """
    field = (blocks.view(torch.int32) >> 23) & 0xFF
    return (field.amax(dim=(0, 2)).clamp(min=1) - 127).to(torch.int32)


def encode(blocks: Tensor, exponents: Tensor, bits: int = 64) -> Encoded:
    """Step 2: whole units, truncated toward zero; blocks that hold something else than whole units are marked lost."""
    world = blocks.shape[0]
    unit = (exponents - headroom(world, bits)).clamp(min=SMALLEST)
    scaled = torch.ldexp(blocks.double(), -unit[:, None])  # exact: an fp64 has the range and the bits
    finite = exponents < 128
    words = torch.where(finite[:, None], scaled, 0.0).trunc()
    lost = ~finite | (words != scaled).any(dim=2).any(dim=0)
    return Encoded(words.to(torch.int64), unit, lost)


def add(words: Tensor) -> Tensor:
    """Step 3, the switch: a sum of 64-bit integers that wraps, in whatever order."""
    total = words[0].clone()
    for rank in range(1, words.shape[0]):
        total += words[rank]
    return total


def decode(total: Tensor, unit: Tensor) -> Tensor:
    """Step 4: one rounding to fp32 (an integer conversion to nearest even), then a power of two, which is exact.

    Exact, because units below 2**-149 do not exist, and a result below 2**-126 has fewer than 24 bits.
    """
    return torch.ldexp(_to_fp32(total).double(), unit[:, None]).float() + 0.0


def _to_fp32(total: Tensor) -> Tensor:
    """int64 to the nearest fp32, ties to even, as `cvt.rn.f32.s64` does: 11 low bits fold into one sticky bit first."""
    sticky = total & 0x7FF
    folded = torch.where(total.abs() >= 1 << 53, (total - sticky) | (sticky != 0).to(torch.int64) << 10, total)
    return folded.double().float()


def fixed_point(addends: Tensor, block: int, bits: int = 64) -> tuple[Tensor, Tensor]:
    """Sums of fp32 [W, T, H] in blocks of a row, fp32 [T, H], and which are lost, bool [T, H]. block divides H."""
    world, tokens, hidden = addends.shape
    blocks = addends.reshape(world, tokens * hidden // block, block)
    encoded = encode(blocks, agree(blocks), bits)
    result = decode(add(encoded.words), encoded.unit).reshape(tokens, hidden)
    return result, encoded.lost[:, None].expand(-1, block).reshape(tokens, hidden)


# ----------------------------------------------------------------------------------------------------------- bytes


def link_bytes(world: int, route: str, block: int = 128) -> float:
    """Bytes over the busiest direction of a GPU's links for each element of its result."""
    return {
        "peer loads, fp32": 4.0 * (world - 1),
        "switch, fp32": 4.0 * world,
        "switch, u64": 8.0 * world + 4.0 * world / block,
        "switch, u32": 4.0 * world + 4.0 * world / block,
    }[route]


def memory_bytes(world: int, route: str) -> float:
    """Bytes of the GPU's own memory for each element of its result: read the partials, write words, read them back."""
    return {"peer loads, fp32": 4.0, "switch, fp32": 4.0, "switch, u64": 20.0, "switch, u32": 12.0}[route] * world


ROUTES = ("peer loads, fp32", "switch, fp32", "switch, u32", "switch, u64")
LINK, MEMORY = 373e9, 4.3e12  # bytes a second: peer copies over NVLink, and HBM, both of an H200


def main() -> None:
    from bicomm.contract import EXACT

    print("| world size | " + " | ".join(ROUTES) + " |")
    for world in (4, 8, 72):
        cells = [f"{link_bytes(world, r):.0f} B, {time_of(world, r) / time_of(world, ROUTES[0]):.2f}x" for r in ROUTES]
        print(f"| {world} | " + " | ".join(cells) + " |")
    print("\n| data, W = 8, 256 x 2048 | block | lost blocks | wrong of 524,288 | largest error, ulps |")
    generator = torch.Generator().manual_seed(0)
    for name, x in samples(generator).items():
        want = EXACT.sum(x)
        for block in (32, 128, 2048):
            got, lost = fixed_point(x, block)
            wrong = got.view(torch.int32) != want.view(torch.int32)
            blocks = lost.view(-1, block)[:, 0].float().mean()
            print(f"| {name} | {block} | {blocks:.2%} | {int(wrong.sum()):,} | {ulps(got, want):,.0f} |")
        got, _ = fixed_point(x, 32, 32)
        wrong = got.view(torch.int32) != want.view(torch.int32)
        print(f"| {name}, u32 | 32 | - | {int(wrong.sum()):,} | {ulps(got, want):,.0f} |")


def time_of(world: int, route: str) -> float:
    return link_bytes(world, route) / LINK + (memory_bytes(world, route) - memory_bytes(world, ROUTES[0])) / MEMORY


def samples(generator: torch.Generator) -> dict[str, Tensor]:
    shape = (8, 256, 2048)
    normal = torch.randn(shape, generator=generator)
    columns = torch.ldexp(torch.ones(2048), torch.randint(-6, 7, (2048,), generator=generator).float())
    outliers = torch.where(torch.rand(shape, generator=generator) < 1e-3, normal * 4096.0, normal)
    spread = torch.ldexp(normal, torch.randint(-20, 21, shape, generator=generator).float())
    return {
        "normal": normal,
        "normal, scaled by channel": normal * columns,
        "outliers x 4096": outliers,
        "+-20 binades": spread,
    }


def ulps(got: Tensor, want: Tensor) -> float:
    """The largest distance in units of the last place of what is wanted."""
    unit = torch.ldexp(torch.ones_like(want, dtype=torch.float64), torch.frexp(want.double())[1] - 24)
    return float(((got.double() - want.double()).abs() / unit).max())


if __name__ == "__main__":
    main()
