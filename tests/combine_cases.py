"""What every communicator must do, whatever carries the rows: each check runs on all ranks and tells what was wrong.

The ranks share seeds, so that each knows all operands and can sum them itself. A check collects what failed instead of
raising at once: a rank that left early would make the others wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bicomm.communicator import Communicator
from bicomm.contract import Contract
from families import FAMILIES
from worlds import same_bits

MODES = ("ordered", "exact", "window(16,95,86)", "window(7,40,30)", "fp64", "multimem", "transformers-bf16")
HIDDENS = (1, 7, 2050, 2880, 4097)


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seed) & 0x7FFFFFFF)


def partials(family: str, size: int, tokens: int, hidden: int, seed: int = 0) -> Tensor:
    """Every rank's partials, fp32 [W, tokens, hidden]; each element's addends are one column of the family."""
    columns = min(max(tokens * hidden, 1), 96)  # patterns are made one by one in Python, so they repeat
    drawn = torch.from_numpy(FAMILIES[family](np.random.default_rng(seed), size, columns).copy())
    picked = torch.randint(columns, (tokens * hidden,), generator=generator(seed, tokens, hidden))
    return drawn[:, picked].view(size, tokens, hidden)


def uneven(size: int, seed: int = 0) -> list[list[int]]:
    """Splits of every kind: zeros at either end, all on one rank, one rank far ahead, none at all."""
    chance = np.random.default_rng(seed)
    kinds = [[3] * size, [40, *[1] * (size - 1)], [0] * (size - 1) + [5], [0] * size]
    kinds += [[0, *[int(n) for n in chance.integers(0, 6, size - 1)]]]
    return kinds


def want(
    contract: Contract, addends: Tensor, splits: list[int], rank: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A rank's share of the sum, by the contract's own function over all ranks' operands."""
    first = sum(splits[:rank])
    return contract.sum(addends[:, first : first + splits[rank]], out_dtype=dtype)


def check_modes(comm: Communicator) -> Iterator[str]:
    """Every mode, every family of addends, uneven splits, fp32 and bf16 results."""
    size, rank = comm.size, comm.rank
    shares = itertools.cycle(uneven(size))
    for number, (family, mode) in enumerate(itertools.product(FAMILIES, MODES)):
        splits = next(shares)
        x = partials(family, size, sum(splits), 9, number)
        contract = comm.plan(mode).contract
        for dtype in (torch.float32, torch.bfloat16):
            got = comm.combine(x[rank], mode, splits=splits, out_dtype=dtype)
            if not same_bits(got, want(contract, x, splits, rank, dtype)):
                yield f"{mode} of {family}, splits {splits}, {dtype}"


def check_shapes(comm: Communicator) -> Iterator[str]:
    """Hidden sizes that no vector divides; splits as a list, tuple, array or tensor; operands that lie anyhow."""
    size, rank = comm.size, comm.rank
    exact = Contract("exact")
    for hidden, splits in itertools.product(HIDDENS, uneven(size)[:3]):
        x = partials("spread", size, sum(splits), hidden, hidden)
        if not same_bits(comm.combine(x[rank], "exact", splits=splits), want(exact, x, splits, rank)):
            yield f"hidden {hidden}, splits {splits}"
    splits = [4, *[1] * (size - 1)]
    x = partials("tie_dust", size, sum(splits), 6, 5)
    mine, result = x[rank], want(exact, x, splits, rank)
    forms: list[Any] = [
        splits,
        tuple(splits),
        np.array(splits, np.int32),
        torch.tensor(splits),
        torch.tensor(splits).int(),
    ]
    for form in forms:
        if not same_bits(comm.combine(mine, "exact", splits=form), result):
            yield f"splits as {type(form)}"
    padded = torch.full((sum(splits) + 2, 9), float("nan"))
    padded[1:-1, 1:7] = mine  # its first element is not 16-byte aligned, NaN all around
    flat = torch.full((mine.numel() + 1,), float("nan"))
    flat[1:] = mine.reshape(-1)
    lying = {
        "transposed": mine.t().contiguous().t(),
        "sliced": padded[1:-1, 1:7],
        "misaligned": flat[1:].view(mine.shape),
        "every other row": mine.repeat_interleave(2, 0)[::2],
        "expanded": mine,
        "negated when it is read": torch._neg_view(-mine),
    }
    for name, operand in lying.items():
        if not same_bits(comm.combine(operand, "exact", splits=splits), result):
            yield name
    column = partials("normal", size, size, 1, 4)
    lying_down = column[rank].t().contiguous().t()  # [size, 1], whose second stride means nothing
    if not same_bits(comm.combine(lying_down, "exact"), want(exact, column, [1] * size, rank)):
        yield "one column"
    one = partials("normal", size, size, 1, 3)[:, :1].expand(size, size, 4)  # stride 0
    if not same_bits(comm.combine(one[rank], "ordered"), want(Contract("ordered"), one, [1] * size, rank)):
        yield "an operand with stride 0"


def check_out(comm: Communicator) -> Iterator[str]:
    """out=, with and without out_dtype; the rest of the tensor that it is a part of stays as it was."""
    size, rank = comm.size, comm.rank
    splits = [2, *[3] * (size - 1)]
    x = partials("cancellation", size, sum(splits), 8, 1)
    for dtype in (torch.float32, torch.bfloat16):
        around = torch.full((splits[rank] + 2, 8), 7.0, dtype=dtype)
        out = around[1:-1]
        got = comm.combine(x[rank], "exact", splits=splits, out=out, out_dtype=dtype if rank % 2 else None)
        if got is not out or not same_bits(out, want(Contract("exact"), x, splits, rank, dtype)):
            yield f"out= of {dtype}"
        if not (around[0] == 7).all() or not (around[-1] == 7).all():
            yield f"out= of {dtype} writes beyond it"


def check_dispatch(comm: Communicator) -> Iterator[str]:
    """Every dtype, uneven and empty; with splits, and where each rank knows its own count only."""
    size, rank = comm.size, comm.rank
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64]
    for dtype, splits in itertools.product(dtypes, uneven(size)):
        every = torch.arange(sum(splits) * 3).view(-1, 3).to(dtype)
        first = sum(splits[:rank])
        mine = every[first : first + splits[rank]]
        for told in (splits, None):
            if not torch.equal(comm.dispatch(mine, splits=told), every):
                yield f"dispatch of {dtype}, splits {told or f'unknown, {splits}'}"
    out = torch.empty(size, 2)
    x = torch.full((1, 2), float(rank))
    if comm.dispatch(x, out=out) is not out or out[:, 0].tolist() != list(range(size)):
        yield "dispatch with out="
    special = torch.tensor([[float("nan"), -0.0, float("inf"), 2.0**-149]]).view(torch.int32) + rank * 0
    if not torch.equal(comm.dispatch(special.view(torch.float32)).view(torch.int32), special.repeat(size, 1)):
        yield "dispatch changes bits"


def rows_case(size: int, seed: int, slots: int, dtype: torch.dtype, hidden: int = 6) -> dict[str, Any]:
    """Expert rows, maps and weights of all ranks. Some have no tokens, some no rows; NaN where nobody may look."""
    chance = generator(seed, size, slots)
    counts = [int(torch.randint(1, 9, (1,), generator=chance)) for _ in range(size)]
    tokens = [int(torch.randint(0, 7, (1,), generator=chance)) for _ in range(size)]
    if size > 1:
        counts[seed % size], tokens[(seed + 1) % size] = 0, 0
    rows = []
    for rank, count in enumerate(counts):
        drawn = partials("spread", 1, max(count, 1), hidden, 31 * seed + rank)[0][:count].to(dtype)
        rows.append(torch.cat([drawn, torch.full((1, hidden), float("nan"), dtype=dtype)]))  # the last row is nobody's
    usable = [rank for rank in range(size) if counts[rank]]
    maps = []
    for count in tokens:
        ranks = torch.tensor(usable)[torch.randint(len(usable), (count, slots), generator=chance)]
        row = (torch.rand(count, slots, generator=chance) * torch.tensor(counts)[ranks]).long()
        unrouted = torch.rand(count, slots, generator=chance) < 0.25
        weights = torch.rand(count, slots, generator=chance) * 4 - 2
        weights[torch.rand(count, slots, generator=chance) < 0.1] = 0.0  # still a slot
        ranks[unrouted], row[unrouted], weights[unrouted] = -1, 2**40, float("nan")
        maps.append((row, ranks, weights))
    return {"rows": rows, "maps": maps}


def addends_of(case: dict[str, Any], rank: int, weighted: bool, product: torch.dtype) -> Tensor:
    """The addends of one rank's tokens, [K, t, H], written slot by slot as the contract says them."""
    row, ranks, weights = case["maps"][rank]
    tokens, slots = row.shape
    out = torch.zeros(max(slots, 1), tokens, case["rows"][0].shape[1])
    for token, slot in itertools.product(range(tokens), range(slots)):
        owner = int(ranks[token, slot])
        if owner >= 0:
            value = case["rows"][owner][int(row[token, slot])].float()
            out[slot, token] = (value * weights[token, slot]).to(product).float() if weighted else value
    return out


def check_rows(comm: Communicator) -> Iterator[str]:
    """The owner combine: top-k 1 and more, both row and product types, unrouted slots, int32 maps, bf16 results."""
    size, rank = comm.size, comm.rank
    owner = Contract("owner")
    kinds = itertools.product((0, 1, 2, 8), (torch.float32, torch.bfloat16), (None, torch.float32, torch.bfloat16))
    for seed, (slots, dtype, product) in enumerate(kinds):
        case = rows_case(size, seed, slots, dtype)
        row, ranks, weights = case["maps"][rank]
        if seed % 2:
            row, ranks = row.clamp(max=2**31 - 1).int(), ranks.int()
        given = None if product is None else weights
        for out_dtype in (torch.float32, torch.bfloat16):
            got = comm.combine_rows(
                case["rows"][rank], row, ranks, given, product_dtype=product or torch.float32, out_dtype=out_dtype
            )
            addends = addends_of(case, rank, given is not None, product or torch.float32)
            if not same_bits(got, owner.sum(addends, out_dtype=out_dtype)):
                yield f"combine_rows, {slots} slots, {dtype}, product {product}, {out_dtype}"


def check_zero_copy(comm: Communicator) -> Iterator[str]:
    """A buffer written in place gives the bits of an ordinary operand; two at once; the first rows of one, or none."""
    size, rank = comm.size, comm.rank
    splits = [2] * size
    for seed in range(3):
        x, y = (partials("split_cancellation", size, 2 * size, 5, seed + k) for k in (0, 10))
        with comm.acquire(2 * size, 5) as a, comm.acquire(2 * size + 3, 5) as b:
            a.copy_(x[rank])
            b.fill_(float("nan"))
            b[: 2 * size].copy_(y[rank])
            if not same_bits(comm.combine(a, "exact", splits=splits), want(Contract("exact"), x, splits, rank)):
                yield "an acquired operand"
            if not same_bits(comm.combine(b[: 2 * size], "exact"), want(Contract("exact"), y, splits, rank)):
                yield "the first rows of an acquired buffer"
            ordinary = comm.combine(y[rank], "exact")
            if not same_bits(ordinary, want(Contract("exact"), y, splits, rank)):
                yield "an ordinary operand beside acquired buffers"
            if not same_bits(comm.combine(torch._neg_view(a), "exact"), want(Contract("exact"), -x, splits, rank)):
                yield "an acquired buffer, negated when it is read"
            if comm.combine(b[:0], "exact").shape != (0, 5):
                yield "no rows of an acquired buffer"
    case = rows_case(size, 4, 3, torch.bfloat16)
    row, ranks, weights = case["maps"][rank]
    mine = case["rows"][rank]
    with comm.acquire(16, 6, torch.bfloat16) as buffer:
        buffer.fill_(float("nan"))
        held = buffer[: mine.shape[0] - 1]  # without its NaN row: none at all on one rank
        held.copy_(mine[:-1])
        got = comm.combine_rows(held, row, ranks, weights)
    if not same_bits(got, Contract("owner").sum(addends_of(case, rank, True, torch.float32))):
        yield "rows in an acquired buffer"


CHECKS = (check_modes, check_shapes, check_out, check_dispatch, check_rows, check_zero_copy)


def failures(comm: Communicator) -> list[str]:
    """Everything that is wrong with this rank's results."""
    return [f"{check.__name__}: {text}" for check in CHECKS for text in check(comm)]
