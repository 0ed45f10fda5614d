"""What the kernels are asked, in the interpreter and on a GPU alike: W local buffers stand for W ranks on one device.

The oracle is `bicomm.contract` on the CPU, and equality is of bits. Whatever must not be read or written is poisoned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from bicomm.contract import EXACT, FP64, ORDERED, OWNER, Contract, round_output
from bicomm.kernels import barrier, exact, gather, ordered, owner
from bicomm.kernels.broadcast import Broadcast, broadcast
from bicomm.kernels.call import Gather, Pull, Reduce, Sync, Tile
from families import FAMILIES

UNTOUCHED = 7.0

# The interpreter computes with NumPy, which tells of every overflow and NaN: they are what the data are for.
quiet = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def bits(x: Tensor) -> Tensor:
    """A tensor's bits as integers, on the CPU."""
    return x.cpu().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_bits(got: Tensor, want: Tensor, what: object = "") -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    wrong = (bits(got) != bits(want)).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what}: {len(wrong)} of {got.numel()} differ, first at {first}: {got[first]!r} is not {want[first]!r}"
        )


def family(name: str, ranks: int, shape: Sequence[int], seed: int = 0) -> Tensor:
    """fp32 [ranks, *shape] of one family of tests/families.py."""
    rng = np.random.default_rng([seed, ranks])
    return torch.from_numpy(FAMILIES[name](rng, ranks, int(np.prod(shape)))).view(ranks, *shape)


def every_family(ranks: int, columns: int, seed: int = 0) -> Tensor:
    """fp32 [ranks, families, columns]: each family in rows of its own, so that tiles of `columns` see one family."""
    return torch.stack([family(name, ranks, [columns], seed) for name in FAMILIES], 1)


@dataclasses.dataclass
class Ranks:
    """Buffers of W ranks that hold `data` [W, rows, hidden] from element `lead` on, with NaN all around it."""

    data: Tensor
    lead: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        flat = self.data.flatten(1).to(self.device)
        self.buffers = []
        for row in flat:
            buffer = torch.full((self.lead + row.numel() + 64,), torch.nan, dtype=row.dtype, device=self.device)
            buffer[self.lead : self.lead + row.numel()] = row
            self.buffers.append(buffer)
        self.peers = torch.tensor([b.data_ptr() for b in self.buffers], device=self.device)

    @property
    def size(self) -> int:
        return self.data.shape[0]

    @property
    def offset(self) -> int:
        return self.lead * self.data.element_size()


# ----------------------------------------------------------------------------------------------------- reductions

Launch = Callable[[Reduce, Tile | None], Tensor]


def launch_of(contract: Contract) -> Launch:
    """The executor of a contract over peers' buffers."""
    if contract.rule == "ordered":
        return lambda call, tile: ordered.reduce(call, tile=tile)
    if contract.rule == "fp64":
        return lambda call, tile: ordered.reduce(call, accumulator=torch.float64, tile=tile)
    return lambda call, tile: exact.reduce(call, contract.parameters, tile=tile)


def check_reduce(
    contract: Contract,
    ranks: Ranks,
    splits: Sequence[int],
    rank: int,
    *,
    on_device: bool = False,
    out_dtype: torch.dtype = torch.float32,
    rotate: int = 0,
    tile: Tile | None = None,
    launch: Launch | None = None,
    shift: int = 0,
) -> Tensor:
    """One rank's slice is the contract's sum, and what lies beyond the slice is untouched. Returns the slice.

    shift: elements by which the result misses 16-byte alignment.
    """
    hidden, own, before = ranks.data.shape[2], splits[rank], sum(splits[:rank])
    spare = torch.full(((own + 2) * hidden + 8 + shift,), UNTOUCHED, dtype=out_dtype, device=ranks.device)
    out = spare[shift : shift + (own + 2) * hidden].view(own + 2, hidden)
    call = Reduce(
        peers=ranks.peers,
        offset=ranks.offset,
        rank=rank,
        hidden=hidden,
        out=out,
        start=before * hidden,
        count=own * hidden,
        splits=torch.tensor(splits, device=ranks.device) if on_device else None,
        rotate=rotate,
    )
    (launch or launch_of(contract))(call, tile)
    want = contract.sum(ranks.data[:, before : before + own], out=torch.empty(own, hidden, dtype=out_dtype))
    assert_bits(out[:own].cpu(), want, (contract.id, tuple(ranks.data.shape), splits, rank, out_dtype))
    assert spare[:shift].eq(UNTOUCHED).all() and spare[shift + own * hidden :].eq(UNTOUCHED).all()
    return out[:own]


# ----------------------------------------------------------------------------------------------------- routed rows


@dataclasses.dataclass
class Routing:
    """Rows [W, R, H] on every rank, and which of them the slots of t tokens name."""

    rows: Tensor
    row_of_slot: Tensor
    rank_of_slot: Tensor
    weights: Tensor | None = None
    product_dtype: torch.dtype = torch.float32

    def addends(self) -> Tensor:
        """fp32 [K, t, H]: what each slot adds; 0 where it is not routed."""
        routed = (self.rank_of_slot >= 0) & (self.row_of_slot >= 0)
        rows = self.rows[self.rank_of_slot.clamp(min=0).long(), self.row_of_slot.clamp(min=0).long()].float()
        if self.weights is not None:
            rows = (rows * self.weights.unsqueeze(-1)).to(self.product_dtype).float()
        return torch.where(routed.unsqueeze(-1), rows, 0.0).transpose(0, 1)


def routing(
    ranks: int,
    rows: int,
    hidden: int,
    tokens: int,
    slots: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weighted: bool = False,
    product_dtype: torch.dtype = torch.float32,
    integers: torch.dtype = torch.int64,
    seed: int = 0,
) -> Routing:
    """Random routing with skipped slots, rows of any size of exponent, and NaN in every row that nobody names."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(ranks, rows, hidden, generator=generator)
    data *= torch.exp2(torch.randint(-40, 40, data.shape, generator=generator).float())
    rank_of_slot = torch.randint(-1, ranks, (tokens, slots), generator=generator)
    row_of_slot = torch.randint(0, rows, (tokens, slots), generator=generator)
    if slots > 1:
        row_of_slot[0, 0] = -1  # skipped by its row
    rank_of_slot[-1] = -1  # a token without any
    weights = torch.randn(tokens, slots, generator=generator) if weighted else None
    if weights is not None:
        weights[rank_of_slot < 0] = torch.nan
    named = torch.zeros(ranks, rows, dtype=torch.bool)
    routed = (rank_of_slot >= 0) & (row_of_slot >= 0)
    named[rank_of_slot[routed], row_of_slot[routed]] = True
    data[~named] = torch.nan
    return Routing(data.to(dtype), row_of_slot.to(integers), rank_of_slot.to(integers), weights, product_dtype)


def check_owner(
    case: Routing,
    *,
    out_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    lead: int = 0,
    there: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """The pull kernel gives the contract's sum of each token's slots; tokens from `there` on are untouched."""
    ranks = Ranks(case.rows, lead, device)
    tokens, hidden = case.row_of_slot.shape[0], case.rows.shape[2]
    spare = torch.full((tokens * hidden + 8,), UNTOUCHED, dtype=out_dtype, device=device)
    out = spare[: tokens * hidden].view(tokens, hidden)
    owner.pull(
        Pull(
            peers=ranks.peers,
            offset=ranks.offset,
            rank=0,
            dtype=case.rows.dtype,
            out=out,
            row_of_slot=case.row_of_slot.to(device),
            rank_of_slot=case.rank_of_slot.to(device),
            weights=None if case.weights is None else case.weights.to(device),
            product_dtype=case.product_dtype,
            count=None if there is None else torch.tensor([there], dtype=torch.int32, device=device),
            rows=case.rows.shape[1],
        ),
        tile=tile,
    )
    valid = tokens if there is None else there
    want = round_output(OWNER.sum(case.addends()), None, out_dtype)[:valid]
    assert_bits(out[:valid].cpu(), want, (tuple(case.rows.shape), tokens, case.rows.dtype, out_dtype))
    assert spare[valid * hidden :].eq(UNTOUCHED).all()
    return out[:valid]


WINDOWS = [Contract("window", (16, 95, 86)), Contract("window", (8, 40, 33)), Contract("window", (1, 30, 30))]
REDUCTIONS = [ORDERED, FP64, EXACT, *WINDOWS]


# -------------------------------------------------------------------------------------------------------- dispatch


class Bytes:
    """Rows of `row_bytes` random bytes, splits[r] of them on rank r, `lead` bytes into its buffer."""

    def __init__(self, splits: Sequence[int], row_bytes: int, lead: int = 0, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(sum(splits) + row_bytes)
        self.splits, self.row_bytes, self.lead, self.device = tuple(splits), row_bytes, lead, device
        self.rows, self.buffers = [], []
        for rows in splits:
            data = torch.randint(-128, 128, (rows, row_bytes), generator=generator).to(torch.int8)
            buffer = torch.full((lead + rows * row_bytes + 64,), 99, dtype=torch.int8, device=device)
            buffer[lead : lead + rows * row_bytes] = data.flatten().to(device)
            self.rows.append(data)
            self.buffers.append(buffer)
        self.peers = torch.tensor([b.data_ptr() for b in self.buffers], device=device)

    def check(
        self,
        *,
        dtype: torch.dtype = torch.int8,
        capacity: int | None = None,
        rotate: int = 0,
        on_device: bool = False,
        tile: Tile | None = None,
    ) -> None:
        """The gathered rows are all ranks' rows in rank order, as far as they fit; other bytes of the result stay."""
        capacity = sum(self.splits) + 2 if capacity is None else capacity
        spare = torch.full((capacity * self.row_bytes + 16,), 5, dtype=torch.int8, device=self.device)
        out = spare[: capacity * self.row_bytes].view(capacity, self.row_bytes).view(dtype)
        splits = torch.tensor(self.splits, device=self.device) if on_device else self.splits
        gather.gather(Gather(self.peers, self.lead, 0, out, splits, rotate=rotate), tile=tile)
        want = torch.cat(self.rows)[:capacity].flatten()
        assert torch.equal(spare.cpu()[: len(want)], want), (self.splits, self.row_bytes, self.lead, dtype)
        assert spare[len(want) :].eq(5).all()


class Pushed:
    """splits[r] rows that rank r writes to all ranks, into buffers with `lead` elements before the result."""

    def __init__(
        self, splits: Sequence[int], hidden: int, dtype: torch.dtype, lead: int = 0, device: str = "cpu"
    ) -> None:
        self.splits, self.hidden, self.dtype, self.lead, self.device = tuple(splits), hidden, dtype, lead, device

    def check(self, capacity: int | None = None, *, tile: Tile | None = None) -> None:
        """After every rank's launch each buffer holds all rows in rank order, as far as they fit, and no more."""
        total = sum(self.splits)
        capacity = total if capacity is None else capacity
        size = self.lead + total * self.hidden + 32
        buffers = [torch.full((size,), UNTOUCHED, dtype=self.dtype, device=self.device) for _ in self.splits]
        peers = torch.tensor([b.data_ptr() for b in buffers], device=self.device)
        counts = torch.tensor(self.splits, device=self.device)
        word = torch.ones(1, dtype=torch.int32, device=self.device)
        generator = torch.Generator().manual_seed(total)
        rows = [torch.randn(n + 1, self.hidden, generator=generator).to(self.dtype) for n in self.splits]
        offset = self.lead * self.dtype.itemsize
        for rank, own in enumerate(rows):
            call = Broadcast(peers, 0, offset, rank, own.to(self.device), counts, capacity, word)
            broadcast(call, hardware=False, tile=tile or Tile(16, 4, 3))
        want = torch.cat([own[:n] for own, n in zip(rows, self.splits, strict=True)])[:capacity].flatten()
        for buffer in (b.cpu() for b in buffers):
            assert_bits(
                buffer[self.lead : self.lead + len(want)], want, (self.splits, self.hidden, self.dtype, self.lead)
            )
            assert buffer[: self.lead].eq(UNTOUCHED).all() and buffer[self.lead + len(want) :].eq(UNTOUCHED).all()


def check_owner_among_many_ranks(device: str) -> None:
    """One of 72 ranks, with the flags of the others planted: its arrival and leave must reach every one of them."""
    ranks, rank, call, hidden, mark = 72, 70, 41, 40, 99
    rows = family("tie_dust", ranks, [1, hidden]).to(device)
    control = torch.zeros(ranks, barrier.control_words(ranks), dtype=torch.int64, device=device)
    control[:, barrier.GENERATION.value], control[:, barrier.EPOCH.value] = call - 1, 1
    arrivals, leaves = barrier.WORDS.value, barrier.WORDS.value + ranks
    control[rank, arrivals : arrivals + ranks] = (call << 24) + mark
    control[rank, leaves : leaves + ranks] = call << 24
    page = torch.zeros(barrier.page_words(ranks), dtype=torch.int64)
    page = page if device == "cpu" else page.pin_memory()
    sync = Sync(
        torch.tensor([words.data_ptr() for words in control], device=device), control[rank], page, 0, 0, 0, mark,
        patience=10**9, soft=device == "cpu",
    )  # fmt: skip
    slots = torch.tensor([[3, 64, 71], [70, 0, 65]], device=device)
    out = torch.empty(2, hidden, device=device)
    peers = torch.tensor([x.data_ptr() for x in rows], device=device)
    pull = Pull(peers, 0, rank, torch.float32, out, torch.zeros_like(slots), slots, rows=1, sync=sync)
    owner.pull(pull, tile=Tile(32, 2, 3))  # the two warps of a large call
    assert_bits(out.cpu(), OWNER.sum(rows.cpu()[slots.cpu(), 0].transpose(0, 1)))
    assert control[:, arrivals + rank].eq((call << 24) + mark).all(), "ranks that never learn of this one's arrival"
    assert control[:, leaves + rank].eq(call << 24).all()
    assert control[rank, barrier.GENERATION.value] == call and not page.any()
