"""Routed ids, written down once and used again: for rollout replay and for activation checkpointing.

An engine records the expert ids of a rollout; the trainer replays them, with weights recomputed from its own logits, so
that both sides send every token to the same experts. Checkpointed layers run their forward twice; the second run must
send tokens where the first one did, whatever its logits are by then: pass :func:`checkpoint_contexts` as `context_fn`.

What is active is process-wide, not per thread: autograd recomputes layers in threads of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Self

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class RoutingDifference:
    """Where replayed and live ids differ, for one router call of T tokens and k slots.

    call     the number of the call on its tape. name: the router's name, "" if it has none.
    tokens   int64 [D]: tokens whose two sets of experts differ, ascending. Padding never counts.
    live     ids [D, k] that the live logits choose there. replayed: ids [D, k] that were used.
    reordered  the number of tokens with the same set in another slot order.
    """

    call: int
    name: str
    tokens: Tensor
    live: Tensor
    replayed: Tensor
    reordered: int

    def __str__(self) -> str:
        where = f"call {self.call}" + (f" ({self.name})" if self.name else "")
        if self.tokens.numel() == 0:
            return f"{where}: the same experts ({self.reordered} tokens in another slot order)"
        shown = "; ".join(
            f"token {t}: live {live}, replayed {used}"
            for t, live, used in zip(
                self.tokens[:4].tolist(), self.live[:4].tolist(), self.replayed[:4].tolist(), strict=True
            )
        )
        return f"{where}: {self.tokens.numel()} tokens differ: {shown}"


def compare_ids(
    live: Tensor, replayed: Tensor, *, padding_mask: Tensor | None = None, call: int = 0, name: str = ""
) -> RoutingDifference:
    """Say where two sets of routed ids [..., k] differ. padding_mask: bool [...], True where a token is padding.

    Raises ValueError for unequal shapes.
    """
    if live.shape != replayed.shape:
        raise ValueError(
            f"ids to compare have shapes {tuple(live.shape)} (live) and {tuple(replayed.shape)} (replayed)"
        )
    a = live.reshape(-1, live.shape[-1]).to(torch.int64)
    b = replayed.reshape(-1, live.shape[-1]).to(device=a.device, dtype=torch.int64)
    real = torch.ones(a.shape[0], dtype=torch.bool, device=a.device)
    if padding_mask is not None:
        real = ~padding_mask.reshape(-1).to(a.device)
    differ = (a.sort(-1).values != b.sort(-1).values).any(-1) & real
    tokens = differ.nonzero().squeeze(-1)
    reordered = int(((a != b).any(-1) & ~differ & real).sum())
    return RoutingDifference(call, name, tokens, a[tokens], b[tokens], reordered)


@dataclasses.dataclass
class RoutingTape:
    """The routed ids of a run, one entry a router call, in call order: ids[i] is [T, k], names[i] the router's name."""

    ids: list[Tensor] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, ids: Sequence[Tensor]) -> RoutingTape:
        """A tape of ids that came from elsewhere (an engine's rollout), in the order of the router calls."""
        return cls(list(ids), [""] * len(ids))

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, ids: Tensor, name: str) -> None:
        self.ids.append(ids.detach().clone())
        self.names.append(name)


class _Recorder:
    def __init__(self, tape: RoutingTape) -> None:
        self.tape = tape

    def __enter__(self) -> RoutingTape:
        _active.append(self)
        return self.tape

    def __exit__(self, *_: object) -> None:
        _active.remove(self)


class Replay:
    """A tape being replayed. `position`: calls so far. `differences`: one entry a call, where `check` was asked for."""

    def __init__(self, tape: RoutingTape, check: bool = False, recompute: bool = False) -> None:
        self.tape, self.check, self.recompute = tape, check, recompute
        self.position = 0
        self.differences: list[RoutingDifference] = []

    def __enter__(self) -> Self:
        self.position = 0
        _active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.remove(self)

    def _next(self, shape: tuple[int, int], name: str) -> Tensor:
        if self.position >= len(self.tape):
            raise RuntimeError(
                f"router call {self.position} ({name or 'unnamed'}) has no ids: the tape holds {len(self.tape)} calls"
            )
        ids, recorded = self.tape.ids[self.position], self.tape.names[self.position]
        if recorded and name and recorded != name:
            raise RuntimeError(f"router call {self.position} is {name!r}, but {recorded!r} was recorded at this place")
        if ids.shape[-1:] != shape[1:] or ids.numel() != shape[0] * shape[1]:
            raise RuntimeError(
                f"router call {self.position} ({name or 'unnamed'}) has (tokens, k) = {shape}, "
                f"but {tuple(ids.shape)} was recorded"
            )
        self.position += 1
        return ids.reshape(shape)


_active: list[_Recorder | Replay] = []


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def record(tape: RoutingTape | None = None) -> Iterator[RoutingTape]:
    """Write down the ids of every router call inside. Recomputation during a backward is not written down again."""
    with _Recorder(RoutingTape() if tape is None else tape) as written:
        yield written


@contextlib.contextmanager
def replay(tape: RoutingTape | Sequence[Tensor], *, check: bool = False) -> Iterator[Replay]:
    """Route every call inside by the recorded ids; weights come from the live logits.

    check=True also computes what the live logits would choose and keeps a :class:`RoutingDifference` a call (a host
    synchronisation each). Ids of -1 mean "not routed": weight 0. Raises RuntimeError in a call that the tape does not
    fit (too many calls, another name or shape), and at the end if calls were fewer than the tape holds.
    """
    with Replay(tape if isinstance(tape, RoutingTape) else RoutingTape.of(tape), check) as running:
        yield running
    if running.position != len(running.tape):
        raise RuntimeError(f"the tape holds {len(running.tape)} router calls, but {running.position} were made")


def checkpoint_contexts() -> tuple[
    contextlib.AbstractContextManager[object], contextlib.AbstractContextManager[object]
]:
    """`context_fn` for torch.utils.checkpoint(use_reentrant=False): recomputation gets the ids of the first forward."""
    tape = RoutingTape()
    return _Recorder(tape), Replay(tape, recompute=True)


def fixed_ids(shape: tuple[int, int], name: str) -> tuple[Tensor | None, Replay | None]:
    """Used by the router: the ids [T, k] that this call must take, if any, and the replay they come from."""
    for entry in reversed(_active):
        if isinstance(entry, Replay):
            if _in_backward() and not entry.recompute:
                raise RuntimeError(
                    "a layer is recomputed inside replay() and its place on the tape is not known: "
                    "pass context_fn=bicomm.model_hooks.replay.checkpoint_contexts to the checkpoint"
                )
            return entry._next(shape, name), entry
    return None, None


def note(ids: Tensor, name: str) -> None:
    """Used by the router: hand the ids of this call to the recorders that are open inside the innermost replay."""
    for entry in reversed(_active):
        if isinstance(entry, Replay):
            if entry.recompute:
                return
        elif not _in_backward():
            entry.tape.append(ids, name)
