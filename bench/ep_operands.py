"""What one size of the sweep works on: partials, expert rows with their routing, tokens; and what must come out."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from bicomm.contract import Contract
from ep_stage import Stage


def room(world: int, tokens: int, hidden: int, top_k: int) -> int:
    """Bytes of symmetric memory that one rank's operands take: partials, rows, and tokens copied for a dispatch."""
    rows = min(world * tokens * top_k, tokens * top_k + 8 * int((tokens * top_k) ** 0.5) + 64)
    return world * tokens * hidden * 4 + rows * hidden * 2 + tokens * hidden * 2 + (1 << 20)


class Routing:
    """Which row of which rank each slot of each token is: random experts, the same on every rank."""

    def __init__(self, world: int, tokens: int, top_k: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        ranks = torch.randint(0, world, (world * tokens * top_k,), generator=generator)
        order = torch.argsort(ranks, stable=True)  # a rank's rows lie in the order of the tokens that they are for
        self.count = torch.bincount(ranks, minlength=world)
        start = self.count.cumsum(0) - self.count
        row = torch.empty_like(ranks)
        row[order] = torch.arange(ranks.numel()) - start[ranks[order]]
        self.ranks, self.rows = (t.view(world, tokens, top_k) for t in (ranks, row))
        # [sender, owner]: rows that go from one to the other when rows travel.
        per = ranks.view(world, -1)
        self.sent = torch.stack([torch.bincount(own, minlength=world) for own in per], dim=1)

    @property
    def most(self) -> int:
        """Rows of the rank that has most."""
        return int(self.count.max())

    def arrival(self, owner: int) -> Tensor:
        """int64 [T, K]: where each slot's row is among those that arrive at `owner`, sorted by sender."""
        ranks, rows = self.ranks[owner], self.rows[owner]
        before = self.sent[:, :owner].sum(dim=1)  # rows of each sender for lower owners
        received = self.sent[:, owner]
        return (received.cumsum(0) - received - before)[ranks] + rows


class Operands:
    """Operands of every communicator of a stage at one size, in symmetric memory; a context, which gives it back."""

    def __init__(self, stage: Stage, tokens: int, hidden: int, top_k: int) -> None:
        self.stage, self.tokens, self.hidden, self.top_k = stage, tokens, hidden, top_k
        self.routing = Routing(stage.size, tokens, top_k)
        device = stage.device
        self.rank_of_slot, self.row_of_slot, self.x, self.out, self.gathered = {}, {}, {}, {}, {}
        for comm in stage.comms:
            r = comm.rank
            self.rank_of_slot[r] = self.routing.ranks[r].to(device)
            self.row_of_slot[r] = self.routing.rows[r].to(device)
            self.x[r] = torch.randn(tokens, hidden, device=device).bfloat16()
            self.out[r] = torch.zeros(tokens, hidden, device=device)
            self.gathered[r] = torch.zeros(stage.size * tokens, hidden, dtype=torch.bfloat16, device=device)
        self._held = [
            [comm.acquire(stage.size * tokens, hidden) for comm in stage.comms],
            [comm.acquire(self.routing.most, hidden, torch.bfloat16) for comm in stage.comms],
        ]

    def __enter__(self) -> Self:
        entered = [{c.rank: h.__enter__() for c, h in zip(self.stage.comms, held, strict=True)} for held in self._held]
        self.partials: dict[int, Tensor] = entered[0]
        self.rows: dict[int, Tensor] = entered[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stage.sync()
        for held in self._held:
            for one in held:
                one.__exit__(None, None, None)

    def fill(self) -> None:
        """Normal data, as experts make it: what is timed."""
        for target in (*self.partials.values(), *self.rows.values()):
            target.normal_()
        self.stage.sync()

    def fill_to_check(self, wide: bool) -> None:
        """Data that every rank can make again. wide: exponents spread over +-20 binades, ties, dust, cancellations."""
        world, tokens = self.stage.size, self.tokens
        for rank, target in self.partials.items():
            for owner in range(world):
                target[owner * tokens : (owner + 1) * tokens] = self._block(rank, owner, wide).to(target)
        rows = [torch.zeros(self.routing.most, self.hidden) for _ in range(world)]
        for owner in range(world):
            addends = self._addends(owner, wide)
            for rank in self.rows:
                here = self.routing.ranks[owner] == rank
                rows[rank][self.routing.rows[owner][here]] = addends[here]
        for rank, target in self.rows.items():
            target.copy_(rows[rank])
        for rank, target in self.x.items():
            target.copy_(self.tokens_of(rank))
        self.stage.sync()

    def expected(self, contract: Contract, rank: int, wide: bool) -> Tensor:
        """What `rank` must get, by the contract's own definition."""
        if contract.rule == "owner":
            return contract.sum(self._addends(rank, wide).transpose(0, 1).contiguous())
        return contract.sum([self._block(r, rank, wide) for r in range(self.stage.size)])

    def tokens_of(self, rank: int) -> Tensor:
        """bf16 [T, H]: what one rank dispatches in a check."""
        generator = torch.Generator().manual_seed(20_000_003 + rank)
        return torch.randn(self.tokens, self.hidden, generator=generator).bfloat16()

    def _block(self, rank: int, owner: int, wide: bool) -> Tensor:
        """The partials of one rank for one owner's tokens."""
        generator = torch.Generator().manual_seed(1 + rank * self.stage.size + owner)
        x = torch.randn(self.tokens, self.hidden, generator=generator)
        if wide:
            x *= torch.exp2(torch.randint(-20, 20, x.shape, generator=generator).float())
            for column, planted in enumerate(((1.0, 2.0**-24, 2.0**-60), (2.0**60, 1.0, -(2.0**60)))):
                x[:, column] = planted[rank] if rank < len(planted) else 0.0
        return x

    def _addends(self, owner: int, wide: bool) -> Tensor:
        """fp32 [T, K, H], exact in bf16: the rows of one owner's slots."""
        generator = torch.Generator().manual_seed(10_000_019 + owner)
        x = torch.randn(self.tokens, self.top_k, self.hidden, generator=generator)
        if wide:
            x *= torch.exp2(torch.randint(-20, 20, x.shape, generator=generator).float())
        return x.bfloat16().float()
