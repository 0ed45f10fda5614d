"""The integer route in software: exact where it says so, marked where not; and what docs/fixed-point.md says."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import fixed_point
import oracle
from bicomm.certify.families import FAMILIES
from bicomm.contract import EXACT, FP64
from fixed_point import add, agree, decode, encode, headroom, link_bytes, span

ROOT = Path(__file__).parent.parent


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


def combine(addends: torch.Tensor, block: int) -> torch.Tensor:
    """The whole route: integers where the block allows it, the software sum of the same contract elsewhere."""
    result, lost = fixed_point.fixed_point(addends, block)
    return torch.where(lost, EXACT.sum(addends), result)


@pytest.mark.parametrize("world", [2, 3, 8, 72, 128])
@pytest.mark.parametrize("name", FAMILIES)
def test_with_its_fall_back_it_is_exact(name: str, world: int) -> None:
    x = FAMILIES[name](torch.Generator().manual_seed(world), world, 64 * 32).view(world, 64, 32)
    assert torch.equal(bits(combine(x, 32)), bits(EXACT.sum(x)))


@pytest.mark.parametrize("world", [3, 8])
def test_blocks_that_are_not_marked_are_exact(world: int) -> None:
    """Exponents over exactly the allowed span, at every height: subnormals and the largest numbers included."""
    generator = torch.Generator().manual_seed(1)
    marked = 0
    for largest in (127, 126, 100, 0, -60, -89, -90, -91, -110, -126):
        low = largest - span(world)
        e = torch.randint(low, largest + 1, (world, 40, 32), generator=generator)
        mantissa = torch.randint(1 << 23, 1 << 24, e.shape, generator=generator).double()
        x = torch.ldexp(
            mantissa * (torch.rand(e.shape, generator=generator) < 0.5).double().mul(2).sub(1), e - 23
        ).float()
        result, lost = fixed_point.fixed_point(x, 32)
        assert not lost.any()
        assert torch.equal(bits(result), bits(EXACT.sum(x)))
        marked += int(lost.sum())
    columns = x[:, 0].T.double().tolist()
    assert oracle.column_bits("exact", columns) == [b & 0xFFFFFFFF for b in bits(result[0]).tolist()]


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 72, 128])
def test_the_span_is_what_it_is_said_to_be(world: int) -> None:
    assert (headroom(8), span(8), span(72)) == (59, 36, 32)
    x = torch.zeros(world, 1, 32)
    x[0, 0, 0] = 1.75
    odd = 1 + 2.0**-23  # needs all 24 bits
    x[1, 0, 5] = odd * 2.0 ** -span(world)
    result, lost = fixed_point.fixed_point(x, 32)
    assert not lost.any()
    assert result[0, 5] == x[1, 0, 5]
    x[1, 0, 5] /= 2
    result, lost = fixed_point.fixed_point(x, 32)
    assert lost.all()
    assert result[0, 5] != x[1, 0, 5]  # the twin: unmarked, it would be a wrong sum


@pytest.mark.parametrize("world", [2, 3, 8, 9, 72, 128])
def test_integers_never_overflow(world: int) -> None:
    largest = torch.finfo(torch.float32).max
    for sign in (1, -1):
        x = torch.full((world, 1, 32), sign * largest)
        encoded = encode(x, agree(x))
        total = add(encoded.words)
        assert [int(v) for v in total[0, :2]] == [world * int(encoded.words[0, 0, 0])] * 2  # did not wrap
        assert abs(int(total[0, 0])) < 2**63
        assert decode(total, encoded.unit)[0, 0] == sign * float("inf")
        small = x * 2.0**-20
        assert torch.equal(bits(combine(small, 32)), bits(EXACT.sum(small)))


def test_any_order_of_integers_gives_the_same_bits() -> None:
    """Also where blocks are marked: that is what makes the route a contract of its own without the fall-back."""
    x = torch.ldexp(torch.randn(8, 16, 64), torch.randint(-30, 31, (8, 16, 64)).float())
    first, _ = fixed_point.fixed_point(x, 32)
    chains = {tuple(bits(x.sum(0)).flatten().tolist())}
    for seed in range(5):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
        again, _ = fixed_point.fixed_point(x[order], 32)
        assert torch.equal(bits(first), bits(again))
        total = x[order[0]].clone()
        for rank in order[1:]:
            total += x[rank]
        chains.add(tuple(bits(total).flatten().tolist()))
    assert len(chains) > 1  # the twin: fp32 in those orders differs


def test_a_token_depends_on_its_own_row_alone() -> None:
    x = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(5))
    x[:, 15] *= 2.0**60  # another token of the batch
    whole, _ = fixed_point.fixed_point(x, 32)
    alone, _ = fixed_point.fixed_point(x[:, 7:8], 32)
    assert torch.equal(bits(whole[7:8]), bits(alone))
    by_column = x.transpose(1, 2).contiguous()  # the twin: blocks across tokens
    across, _ = fixed_point.fixed_point(by_column, 16)
    fewer, _ = fixed_point.fixed_point(by_column[..., :8].contiguous(), 8)
    assert not torch.equal(bits(across[..., :8]), bits(fewer))


def test_the_conversion_rounds_once() -> None:
    """int64 to fp32 through fp64 alone rounds twice: 2**62 + 2**38 + 1 is just above a tie."""
    values = [2**62 + 2**38 + 1, 2**62 + 2**38, 2**62 + 2**38 - 1, -(2**62) - 2**38 - 1, 2**53 + 1, 7, 0, -(2**24) - 1]
    got = fixed_point._to_fp32(torch.tensor(values)).tolist()
    assert got == [oracle.round_to(Fraction(v), oracle.FP32) for v in values]
    assert torch.tensor(values[0]).double().float().item() != got[0]
    generator = torch.Generator().manual_seed(4)
    many = torch.randint(-(2**62), 2**62, (3000,), generator=generator) >> torch.randint(
        0, 62, (3000,), generator=generator
    )
    want = [oracle.round_to(Fraction(int(v)), oracle.FP32) for v in many]
    assert fixed_point._to_fp32(many).tolist() == want


def test_it_reaches_further_than_an_fp64_chain_and_less_far_than_a_window() -> None:
    x = torch.zeros(3, 1, 32)
    x[:, 0, 0] = torch.tensor([1.0, 2.0**-24, 2.0**-59])
    assert not fixed_point.fixed_point(x, 32)[1].any()
    assert torch.equal(bits(combine(x, 32)), bits(EXACT.sum(x)))
    assert not torch.equal(bits(FP64.sum(x)), bits(EXACT.sum(x)))
    x[2, 0, 0] = 2.0**-90
    assert fixed_point.fixed_point(x, 32)[1].all()


def test_32_bits_are_not_enough() -> None:
    x = torch.randn(8, 64, 128, generator=torch.Generator().manual_seed(2))
    result, lost = fixed_point.fixed_point(x, 32, bits=32)
    assert lost.float().mean() > 0.99
    assert (bits(result) != bits(EXACT.sum(x))).float().mean() > 0.03
    assert span(8, 32) == 4


# --------------------------------------------------------------------------------------------- what the page says


def test_the_numbers_of_the_page() -> None:
    page = (ROOT / "docs" / "fixed-point.md").read_text()
    for world in (4, 8, 72):
        for route in fixed_point.ROUTES:
            ratio = fixed_point.time_of(world, route) / fixed_point.time_of(world, fixed_point.ROUTES[0])
            assert f"{link_bytes(world, route):.0f} B, {ratio:.2f}x" in page
    for number in (f"W = 8: {span(8)}", f"W = 72: {span(72)}"):
        assert number in page


def test_the_instructions_assemble_one_word_at_a_time() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "fixed_point_compile.py")], capture_output=True, text=True, timeout=250
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"kernel"')]
    refused = {(line["kernel"], line["target"]): line["refused"] for line in lines}
    assert len(refused) == 9
    for target in (90, 100, 103):
        assert refused["add_u64", target] == refused["max_u32", target] == ""
        assert refused["add_two_u64", target] == "PTXASError"
