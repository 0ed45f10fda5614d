"""The maps of a mirror: where each slot's row is, and which engine rank made it, in which place of that rank's order.

All of them are built on the device of their input, without a host sync, and can be captured in a CUDA graph once a
placement's tables are on the device (after its first use there). Sorting is stable, so equal inputs give equal maps.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NO_SUCH_PLACE = -(2**31)  # as an order: the named rank does not hold the slot's expert; the token becomes NaN
LAST_PLACE = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which experts each engine rank holds, in the order of their local index. An expert may sit on several ranks.

    experts_of_rank[r] lists the global expert ids of rank r. Raises ValueError for an id outside [0, num_experts), an
    expert twice on one rank, or one that is nowhere; TypeError for ids that are no integers.
    """

    experts_of_rank: tuple[tuple[int, ...], ...]
    num_experts: int
    _tables: dict[torch.device, tuple[Tensor, Tensor]] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        held = tuple(tuple(operator.index(e) for e in here) for here in self.experts_of_rank)
        object.__setattr__(self, "experts_of_rank", held)
        if self.num_experts < 1:
            raise ValueError(f"a placement is of at least one expert, got {self.num_experts}")
        for rank, here in enumerate(self.experts_of_rank):
            if len(set(here)) != len(here) or not all(0 <= e < self.num_experts for e in here):
                raise ValueError(f"rank {rank} holds {here}: expected distinct ids in [0, {self.num_experts})")
        missing = set(range(self.num_experts)) - {e for here in self.experts_of_rank for e in here}
        if missing:
            raise ValueError(f"no rank holds expert {min(missing)} ({len(missing)} of {self.num_experts} are nowhere)")

    @classmethod
    def even(cls, num_experts: int, ep_size: int) -> Placement:
        """Contiguous blocks of num_experts / ep_size experts. Raises ValueError where that is no integer."""
        if ep_size < 1 or num_experts % ep_size:
            raise ValueError(f"{num_experts} experts do not divide over {ep_size} ranks: use Placement.counts([...])")
        return cls.counts([num_experts // ep_size] * ep_size)

    @classmethod
    def counts(cls, experts_per_rank: Sequence[int]) -> Placement:
        """Contiguous blocks of these sizes, which may differ and may be 0."""
        starts = [sum(experts_per_rank[:r]) for r in range(len(experts_per_rank) + 1)]
        blocks = [range(a, b) for a, b in itertools.pairwise(starts)]
        return cls(tuple(tuple(b) for b in blocks), starts[-1])

    def __reduce__(self) -> tuple[type[Placement], tuple[tuple[tuple[int, ...], ...], int]]:
        return Placement, (self.experts_of_rank, self.num_experts)  # tables are this process's, on its devices

    @property
    def ep_size(self) -> int:
        return len(self.experts_of_rank)

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(rank_of_expert int32 [E + 1], index int32 [W * (E + 1)]) on `device`, -1 where there is none; made once."""
        pair = self._tables.get(device)
        if pair is None:
            ranks = [-1] * (self.num_experts + 1)
            index = [[-1] * (self.num_experts + 1) for _ in self.experts_of_rank]
            for rank, here in enumerate(self.experts_of_rank):
                for place, expert in enumerate(here):
                    ranks[expert] = rank
                    index[rank][expert] = place
            flat = [place for row in index for place in row]
            first, second = (torch.tensor(values, dtype=torch.int32, device="cpu") for values in (ranks, flat))
            pair = (first.to(device), second.to(device))
            if type(pair[0]) is Tensor:  # torch.export traces with fakes, which must not stay
                self._tables[device] = pair
        return pair

    def expert_of_slot(self, expert_ids: Tensor) -> Tensor:
        """The ids as int64, with num_experts for a slot that is not routed (any id outside [0, num_experts))."""
        ids = expert_ids.long()
        return torch.where((ids >= 0) & (ids < self.num_experts), ids, self.num_experts)


def _check_integers(name: str, given: Tensor, like: Tensor | None = None) -> None:
    """Raise TypeError for what is no tensor of integers, ValueError for one that is not [T, K] or not as `like`."""
    if given.dtype == torch.bool and name == "expert_ids":
        raise TypeError("expert_ids holds integers, got a boolean map: mirror.slots_of_routing_map makes ids of one")
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise TypeError(f"{name} holds integers, got {given.dtype}")
    if given.dim() != 2:
        raise ValueError(f"{name} is [T, K], got {tuple(given.shape)}")
    if like is not None and given.shape != like.shape:
        raise ValueError(f"{name} is [T, K] = {tuple(like.shape)}, got {tuple(given.shape)}")
    if like is not None and given.device != like.device:
        raise ValueError(f"{name} is on {given.device}, where {like.device} was expected")


def rank_of_slot(expert_ids: Tensor, placement: Placement) -> Tensor:
    """The engine rank of each slot's expert: int32 [T, K], -1 where the slot is not routed.

    expert_ids: [T, K] global ids, any integer type; an id outside [0, num_experts) means not routed. Raises ValueError
    where experts are replicated: then only the engine knows which rank it used, and its record is the argument.
    """
    _check_integers("expert_ids", expert_ids)
    held = [e for here in placement.experts_of_rank for e in here]
    if len(held) != placement.num_experts:
        twice = next(e for e in held if held.count(e) > 1)
        raise ValueError(
            f"expert {twice} sits on several ranks: the rank cannot be derived from its id; "
            "pass the rank that the engine recorded for each slot"
        )
    return placement.tables(expert_ids.device)[0][placement.expert_of_slot(expert_ids)]


_derived_rank = rank_of_slot  # the next function has an argument of this name


def order_of_slot(expert_ids: Tensor, placement: Placement, rank_of_slot: Tensor | None = None) -> Tensor:
    """The local expert index of each slot on its rank, the place in `Partial.order="expert"`: int32 [T, K].

    rank_of_slot: [T, K] as the engine recorded it, needed where experts are replicated. A slot that is not routed (its
    id outside [0, num_experts), or its rank outside [0, W)) gets -1. A slot whose rank does not hold its expert gets
    NO_SUCH_PLACE, which the mirror turns into NaN on a GPU and into a ValueError on a CPU.
    """
    _check_integers("expert_ids", expert_ids)
    if rank_of_slot is not None:
        _check_integers("rank_of_slot", rank_of_slot, expert_ids)
    ranks = _derived_rank(expert_ids, placement) if rank_of_slot is None else rank_of_slot.long()
    experts = placement.expert_of_slot(expert_ids)
    routed = (ranks >= 0) & (ranks < placement.ep_size) & (experts < placement.num_experts)
    here = torch.where(routed, ranks, 0) * (placement.num_experts + 1) + experts
    place = placement.tables(expert_ids.device)[1][here]
    return torch.where(routed, torch.where(place < 0, NO_SUCH_PLACE, place), -1).to(torch.int32)


class SlotMap(NamedTuple):
    """Where rows sorted by expert lie. row_of_slot: int64 [T, K], -1 where not routed. tokens_per_expert: int64 [E].

    num_rows is the capacity that any routing fits in: T * K, and room to align every expert's rows.
    """

    row_of_slot: Tensor
    tokens_per_expert: Tensor
    num_rows: int


def inverse_map(expert_ids: Tensor, num_experts: int, *, align: int = 1) -> SlotMap:
    """The rows of each slot when rows are sorted by expert, and by token and slot within an expert.

    expert_ids: [T, K]; an id outside [0, num_experts) means not routed. align: each expert's first row is a multiple
    of it (grouped GEMMs want 8 to 128); rows between are padding, which no slot names. Raises ValueError for another
    shape or sizes below 1, TypeError where the ids are no integers.
    """
    _check_integers("expert_ids", expert_ids)
    if num_experts < 1 or align < 1:
        raise ValueError(f"num_experts and align are at least 1: got {num_experts} and {align}")
    tokens, slots = expert_ids.shape
    flat = expert_ids.reshape(-1).long()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    by_expert, slot_of_place = torch.sort(flat, stable=True)
    edges = torch.searchsorted(by_expert, torch.arange(num_experts + 1, device=flat.device))
    counts = edges[1:] - edges[:-1]
    aligned = torch.div(counts + (align - 1), align, rounding_mode="floor") * align
    shift = torch.cat([aligned.cumsum(0) - aligned - edges[:-1], edges.new_zeros(1)])
    place = torch.arange(flat.numel(), device=flat.device)
    row_of_place = torch.where(by_expert < num_experts, place + shift[by_expert], -1)
    rows = torch.empty_like(flat).scatter_(0, slot_of_place, row_of_place)
    return SlotMap(rows.view(tokens, slots), counts, tokens * slots + (align - 1) * num_experts)


def slots_of_routing_map(routing_map: Tensor, topk: int) -> Tensor:
    """The expert ids [T, topk] (int64, ascending, -1 where a token has fewer) of a boolean routing map [T, E].

    A routing map does not know the router's order of slots: an engine whose order is "slot" cannot be mirrored from
    one unless its slots ascend too. More than `topk` experts of a token: a ValueError on a CPU, a device-side assertion
    on a GPU.
    """
    if routing_map.dim() != 2 or topk < 0:
        raise ValueError(f"a routing map is [T, E], topk at least 0: got {tuple(routing_map.shape)} and {topk}")
    routing_map = routing_map.bool()
    tokens, experts = routing_map.shape
    place = routing_map.cumsum(1) - 1
    fits = (place < topk).all()
    if routing_map.device.type == "cpu" and not torch.compiler.is_compiling():
        if not fits:
            raise ValueError(f"a token has {int(routing_map.sum(1).max())} experts in the routing map, topk is {topk}")
    else:
        torch._assert_async(fits, f"a token has more than topk = {topk} experts in the routing map")
    target = torch.where(routing_map, place, topk)  # column topk takes what is not routed, and is dropped
    ids = torch.full((tokens, topk + 1), -1, dtype=torch.int64, device=routing_map.device)
    every = torch.arange(experts, device=ids.device).expand(tokens, experts)
    return ids.scatter_(1, target, every)[:, :topk].contiguous()


def check_maps(
    row_of_slot: Tensor, rank_of_slot: Tensor | None, order_of_slot: Tensor | None, num_rows: int, ep_size: int
) -> None:
    """Raise ValueError where a slot names a row or rank that does not exist, or two slots name one row. Syncs the host.

    A CPU mirror always checks; on a GPU, where a check would stall the host, such a token's result is NaN (and two
    slots that share a row have undefined gradients): call this once when a layout is new.
    """
    routed = row_of_slot >= 0
    if rank_of_slot is not None:
        routed &= rank_of_slot >= 0
        _refuse(routed & (rank_of_slot >= ep_size), rank_of_slot, f"engine rank {{}}, but ep_size is {ep_size}")
    _refuse(routed & (row_of_slot >= num_rows), row_of_slot, f"row {{}}, but there are {num_rows} rows")
    if order_of_slot is not None:
        _refuse(routed & (order_of_slot == NO_SUCH_PLACE), order_of_slot, "a rank that does not hold its expert")
        outside = (order_of_slot > LAST_PLACE) | (order_of_slot < NO_SUCH_PLACE)
        _refuse(routed & outside, order_of_slot, "place {}, which does not fit into int32")
    used = torch.zeros(num_rows + 1, dtype=torch.int32, device=row_of_slot.device)
    flat = torch.where(routed, row_of_slot, num_rows).reshape(-1).long()
    used.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    shared = routed & (used[flat.view(row_of_slot.shape)] > 1)
    _refuse(shared, row_of_slot, "row {}, which another slot names too")


def _refuse(wrong: Tensor, values: Tensor, what: str) -> None:
    if bool(wrong.any()):
        token, slot = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(f"token {token}, slot {slot} names {what.format(int(values[token, slot]))}")
