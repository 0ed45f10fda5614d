"""The table of bad input: an error on every rank that names the rank and both values; the next call works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bicomm.communicator import Communicator
from bicomm.contract import Contract
from bicomm.errors import CallMismatch, PeerRefused
from worlds import Ranks, local_ranks

pytestmark = [pytest.mark.timeout(60)]
SIZE, TOKENS, HIDDEN = 3, 6, 5
BAD = 1  # the rank whose arguments are bad
Call = Callable[[Communicator], Any]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks[Communicator]]:
    with local_ranks(SIZE, mode="exact", timeout=10) as made:
        yield made


def _x(**changes: Any) -> torch.Tensor:
    return torch.ones(TOKENS, HIDDEN, **changes)


def _maps() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)


def _combine(x: Any = None, **arguments: Any) -> Call:
    return lambda comm: comm.combine(_x() if x is None else x, **arguments)


def _dispatch(x: Any = None, **arguments: Any) -> Call:
    return lambda comm: comm.dispatch(_x() if x is None else x, **arguments)


def _rows(rows: Any = None, row: Any = None, rank: Any = None, weights: Any = None, **arguments: Any) -> Call:
    def call(comm: Communicator) -> torch.Tensor:
        good = _maps()
        given = (_x() if rows is None else rows, good[0] if row is None else row, good[1] if rank is None else rank)
        return comm.combine_rows(*given, weights, **arguments)

    return call


def _counts(own: Any = 3) -> Call:
    return lambda comm: comm.exchange_counts(own)


def _acquired(tokens: Any = TOKENS, hidden: Any = HIDDEN, dtype: Any = torch.float32) -> Call:
    def call(comm: Communicator) -> torch.Tensor:
        with comm.acquire(tokens, hidden, dtype) as buffer:
            return comm.combine(buffer)

    return call


def _reserved(tokens: Any = TOKENS, hidden: Any = HIDDEN, dtype: Any = torch.float32) -> Call:
    def call(comm: Communicator) -> torch.Tensor:
        comm.reserve(tokens, hidden, dtype)
        return comm.combine(_x())

    return call


def _needs(x: torch.Tensor) -> torch.Tensor:
    return x.requires_grad_()


# What one rank calls while the others call the plain thing; the exception it gets; words of its message.
REFUSED: dict[str, tuple[Call, type[Exception], tuple[str, ...]]] = {
    "bf16 partials": (_combine(_x(dtype=torch.bfloat16)), TypeError, ("bfloat16", "expected float32", "accumulate")),
    "fp64 partials": (_combine(_x(dtype=torch.float64)), TypeError, ("float64", "expected float32")),
    "integer partials": (_combine(_x(dtype=torch.int64)), TypeError, ("int64", "expected float32")),
    "bf16 multimem": (_combine(_x(dtype=torch.bfloat16), mode="multimem"), TypeError, ("bf16 multimem", "reproduced")),
    "a mode of bf16 multimem": (_combine(mode="multimem_bf16"), ValueError, ("bf16 multimem is refused",)),
    "1-D": (_combine(torch.ones(6)), ValueError, ("1 dimensions (6,)", "expected 2")),
    "3-D": (_combine(torch.ones(2, 3, 5)), ValueError, ("3 dimensions (2, 3, 5)", "expected 2")),
    "0-D": (_combine(torch.tensor(1.0)), ValueError, ("0 dimensions",)),
    "no columns": (_combine(torch.ones(6, 0)), ValueError, ("hidden is at least 1",)),
    "no tensor": (_combine([[1.0]]), TypeError, ("torch.Tensor, got list",)),
    "numpy": (_combine(np.ones((6, 5), np.float32)), TypeError, ("torch.Tensor, got ndarray",)),
    "another device": (_combine(_x(device="meta")), ValueError, ("x is on meta", "work on cpu")),
    "sparse": (_combine(_x().to_sparse()), TypeError, ("layout", "to_dense")),
    "splits too short": (_combine(splits=[3, 3]), ValueError, ("2 entries", "3 ranks")),
    "splits too long": (_combine(splits=[0] * 5000), ValueError, ("5000 entries", "3 ranks", "5000 in all")),
    "splits that do not sum": (_combine(splits=[1, 2, 4]), ValueError, ("sum to 7", "6 rows")),
    "a negative split": (_combine(splits=[8, -2, 0]), ValueError, ("splits[1] is -2",)),
    "fractions": (_combine(splits=[2.0, 2.0, 2.0]), TypeError, ("integers", "2.0")),
    "truths": (_combine(splits=[True, True, True]), TypeError, ("integers", "True")),
    "a tensor of fractions": (_combine(splits=torch.ones(3)), TypeError, ("integers", "float32")),
    "2-D splits": (_combine(splits=np.array([[2, 2, 2]])), ValueError, ("shape (1, 3)",)),
    "a number as splits": (_combine(splits=6), TypeError, ("list, tuple, numpy array",)),
    "words as splits": (_combine(splits="222"), TypeError, ("list, tuple, numpy array",)),
    "rows that ranks cannot share": (_combine(torch.ones(7, 5)), ValueError, ("7 rows", "3 ranks", "splits=")),
    "an unknown mode": (_combine(mode="exakt"), ValueError, ("unknown contract 'exakt'", "ordered", "'multimem'")),
    "a mode of another kind": (_combine(mode=7), TypeError, ("string or a bicomm.Contract, got int",)),
    "owner": (_combine(mode="owner"), ValueError, ("combine_rows",)),
    "out of another shape": (_combine(out=torch.ones(3, 5)), ValueError, ("(3, 5)", "(2, 5)")),
    "out that is scattered": (_combine(out=torch.ones(5, 2).t()), ValueError, ("not contiguous",)),
    "out of another type": (_combine(out=torch.ones(2, 5, dtype=torch.float16)), TypeError, ("float16",)),
    "out and out_dtype": (_combine(out=torch.ones(2, 5), out_dtype=torch.bfloat16), TypeError, ("float32", "bfloat16")),
    "out of no kind": (_combine(out=[1]), TypeError, ("out is a torch.Tensor", "list")),
    "out that wants a gradient": (_combine(out=_needs(torch.ones(2, 5))), ValueError, ("filled in place",)),
    "out_dtype fp16": (_combine(out_dtype=torch.float16), TypeError, ("float16",)),
    "out_dtype in words": (_combine(out_dtype="bf16"), TypeError, ("'bf16'",)),
    "out with a gradient": (_combine(_needs(_x()), out=torch.ones(2, 5)), ValueError, ("out= cannot",)),
    "bf16 with a gradient": (_combine(_needs(_x(dtype=torch.bfloat16))), TypeError, ("bfloat16", "expected float32")),
    "fractions with a gradient": (_combine(_needs(_x()), splits=[1.9, 2.9, 1.9]), TypeError, ("integers", "1.9")),
    "0-D with a gradient": (_combine(_needs(torch.tensor(1.0))), ValueError, ("0 dimensions",)),
    "an unknown mode with a gradient": (_combine(_needs(_x()), mode="exakt"), ValueError, ("unknown contract",)),
    "out_dtype in words with a gradient": (_combine(_needs(_x()), out_dtype="bf16"), TypeError, ("'bf16'",)),
    "a capacity in words": (_combine(capacity="all"), ValueError, ("'all'",)),
    "dispatch of another count": (_dispatch(splits=[5, 5, 5]), ValueError, ("5 tokens", "its x has 6")),
    "dispatch of 1-D": (_dispatch(torch.ones(6)), ValueError, ("1 dimensions",)),
    "dispatch into another shape": (_dispatch(out=torch.ones(17, 5)), ValueError, ("(17, 5)", "(18, 5)")),
    "dispatch into another type": (_dispatch(out=torch.ones(18, 5).int()), TypeError, ("int32", "float32")),
    "dispatch whose gradient is lost": (_dispatch(_needs(_x(dtype=torch.float64))), TypeError, ("float64",)),
    "dispatch under no contract": (_dispatch(_needs(_x()), mode="exakt"), ValueError, ("unknown contract",)),
    "dispatch under owner": (_dispatch(_needs(_x()), mode="owner"), ValueError, ("combine_rows",)),
    "rows of fp16": (_rows(_x(dtype=torch.float16)), TypeError, ("rows is float16",)),
    "rows of one dimension": (_rows(torch.ones(6)), ValueError, ("rows has 1 dimensions",)),
    "maps of fractions": (_rows(row=torch.zeros(2, 2)), TypeError, ("row_of_slot is an int32 or int64", "float32")),
    "maps of one dimension": (_rows(rank=torch.zeros(2).int()), TypeError, ("rank_of_slot", "(2,)")),
    "maps of no kind": (_rows(row=[[0, 0]]), TypeError, ("row_of_slot", "list")),
    "maps of unequal shapes": (_rows(row=torch.zeros(2, 3).int()), ValueError, ("(2, 3)", "(2, 2)")),
    "maps elsewhere": (_rows(row=_maps()[0].to("meta")), ValueError, ("row_of_slot is on meta",)),
    "weights of another shape": (_rows(weights=torch.ones(2, 3)), TypeError, ("(2, 2)", "(2, 3)")),
    "weights of bf16": (_rows(weights=torch.ones(2, 2).bfloat16()), TypeError, ("float32", "bfloat16")),
    "product_dtype fp16": (_rows(product_dtype=torch.float16), TypeError, ("product_dtype", "float16")),
    "product_dtype in words": (_rows(product_dtype="bf16"), TypeError, ("product_dtype", "'bf16'")),
    "a row that is not there": (_rows(row=torch.full((2, 2), 6)), IndexError, ("row 6 of rank 0", "[6, 6, 6]")),
    "a negative row": (_rows(row=torch.full((2, 2), -1)), IndexError, ("row -1 of rank 0",)),
    "a rank that is not there": (_rows(rank=torch.full((2, 2), 3)), IndexError, ("rank 3", "slot 0")),
    "a rank below -1": (_rows(rank=torch.full((2, 2), -2)), IndexError, ("rank -2",)),
    "no count": (_counts(None), TypeError, ("a count is an integer, got NoneType",)),
    "a count of a half": (_counts(1.5), TypeError, ("a count is an integer, got float 1.5",)),
    "a count of two": (_counts(torch.tensor([1, 2])), TypeError, ("one element, got torch.int64 (2,)",)),
    "a count of fractions": (_counts(torch.ones(1)), TypeError, ("one element, got torch.float32",)),
    "a count below 0": (_counts(-1), ValueError, ("a count is -1",)),
    "a count beyond 64 bits": (_counts(2**70), ValueError, ("no memory holds that",)),
    "a split beyond 64 bits": (_dispatch(splits=[6, 6, 2**70]), ValueError, ("splits[2] is 1180591620717411303424",)),
    "a split beyond a message": (
        _dispatch(splits=[6, 6, 10**5000]),
        ValueError,
        ("splits[2] is a number of 16610 bits",),
    ),
    "a buffer below 0": (_acquired(tokens=-1), ValueError, ("at least 0 rows and columns, got [-1, 5]",)),
    "a buffer of fractions": (_acquired(hidden=5.0), TypeError, ("hidden is an integer, got float 5.0",)),
    "a buffer of words": (_acquired(dtype="float32"), TypeError, ("dtype is a torch.dtype, got 'float32'",)),
    "a buffer beyond memory": (_acquired(tokens=2**60), ValueError, ("no memory holds that",)),
    "room below 0": (_reserved(tokens=-1), ValueError, ("at least 0 rows and columns",)),
    "room of fractions": (_reserved(tokens=1e3), TypeError, ("tokens is an integer, got float",)),
    "out of another sign": (_combine(out=torch._neg_view(torch.ones(2, 5))), ValueError, ("lazily",)),
    "maps with a gradient": (_rows(_needs(_x()), row=[[0, 0]]), TypeError, ("row_of_slot", "list")),
}


def _plain(name: str) -> Call:
    """What the other ranks call."""
    call = REFUSED[name][0]
    plain = {f.__name__: f for f in (_combine, _dispatch, _rows, _counts, _acquired, _reserved)}
    return plain[call.__qualname__.split(".")[0]]()


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_of_one_rank_are_an_error_on_all(ranks: Ranks[Communicator], name: str) -> None:
    call, kind, words = REFUSED[name]
    start = time.monotonic()
    outcomes = ranks.outcomes(lambda comm: (call if comm.rank == BAD else _plain(name))(comm))
    assert time.monotonic() - start < 5
    assert type(outcomes[BAD]) is kind, repr(outcomes[BAD])
    assert all(word in str(outcomes[BAD]) for word in words), str(outcomes[BAD])
    for rank in (0, 2):
        assert isinstance(outcomes[rank], PeerRefused), repr(outcomes[rank])
        assert f"rank {BAD}" in str(outcomes[rank]) and kind.__name__ in str(outcomes[rank])
        assert words[0] in str(outcomes[rank])
    _works(ranks)


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_of_all_ranks_are_everybodys_own_error(ranks: Ranks[Communicator], name: str) -> None:
    call, kind, _ = REFUSED[name]
    outcomes = ranks.outcomes(call)
    assert [type(outcome) for outcome in outcomes] == [kind] * SIZE
    _works(ranks)


def _works(ranks: Ranks[Communicator]) -> None:
    x = torch.arange(TOKENS * HIDDEN).view(TOKENS, HIDDEN).float()
    outs = ranks(lambda comm: comm.combine(x + comm.rank))
    assert torch.equal(torch.cat(outs), Contract("exact").sum([x, x + 1, x + 2]))


# What ranks call that each is right by itself; words that every rank reads.
DIFFERENT: dict[str, tuple[Callable[[int], Call], tuple[str, ...]]] = {
    "hidden": (
        lambda r: _combine(torch.ones(6, 5 + (r == 2))),
        ("rank 0 combine(hidden=5)", "rank 2 combine(hidden=6)"),
    ),
    "splits": (
        lambda r: _combine(splits=[2, 2, 2] if r else [6, 0, 0]),
        ("rank 0 combine(splits=(6, 0, 0))", "rank 1 combine(splits=(2, 2, 2))"),
    ),
    "contract": (
        lambda r: _combine(mode="ordered" if r == 1 else "exact"),
        ("rank 0 combine(contract=exact/1)", "rank 1 combine(contract=ordered/1)"),
    ),
    "rows": (
        lambda r: _combine(torch.ones(6 + 3 * (r == 2), 5)),
        ("splits=(2, 2, 2)", "rank 2 combine(splits=(3, 3, 3))"),
    ),
    "operation": (lambda r: _dispatch() if r == 2 else _combine(), ("rank 0 combine(", "rank 2 dispatch(")),
    "dtype": (
        lambda r: _dispatch(_x(dtype=torch.float16 if r == 1 else torch.float32)),
        ("rank 0 dispatch(dtype=float32)", "rank 1 dispatch(dtype=float16)"),
    ),
    "counts told by some": (
        lambda r: _dispatch(splits=None if r else [6, 6, 6]),
        ("rank 0 dispatch(splits=(6, 6, 6))", "rank 1 dispatch(splits=())"),
    ),
    "slots": (
        lambda r: _rows(*([_x()] + [torch.zeros(2, 2 + (r == 2), dtype=torch.int64)] * 2)),
        ("rank 0 combine_rows(slots=2)", "rank 2 combine_rows(slots=3)"),
    ),
    "weights": (
        lambda r: _rows(weights=torch.ones(2, 2) if r == 1 else None),
        ("no weights", "product float32"),
    ),
    "product": (
        lambda r: _rows(weights=torch.ones(2, 2), product_dtype=torch.bfloat16 if r else torch.float32),
        ("product float32", "product bfloat16"),
    ),
    "row dtype": (lambda r: _rows(_x(dtype=torch.bfloat16 if r else torch.float32)), ("float32, no", "bfloat16, no")),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_call_different_things_read_both_sides(ranks: Ranks[Communicator], name: str) -> None:
    call, words = DIFFERENT[name]
    outcomes = ranks.outcomes(lambda comm: call(comm.rank)(comm))
    for outcome in outcomes:
        assert isinstance(outcome, CallMismatch), repr(outcome)
        assert all(word in str(outcome) for word in words), str(outcome)
    _works(ranks)


def test_several_refusals_are_all_told(ranks: Ranks[Communicator]) -> None:
    bad: list[Call] = [_combine(), _combine(torch.ones(6)), _combine(mode="exakt")]
    outcomes = ranks.outcomes(lambda comm: bad[comm.rank](comm))
    assert isinstance(outcomes[0], PeerRefused)
    assert "rank 1: ValueError" in str(outcomes[0]) and "rank 2: ValueError: unknown contract" in str(outcomes[0])
    _works(ranks)


def test_a_message_of_any_characters_travels(ranks: Ranks[Communicator]) -> None:
    mode = '\0\n"\\' * 500 + "\u6df7\u6dc6"
    outcomes = ranks.outcomes(lambda comm: comm.combine(_x(), mode=mode if comm.rank == BAD else None))
    assert isinstance(outcomes[BAD], ValueError) and isinstance(outcomes[0], PeerRefused)
    _works(ranks)


def test_without_a_mode_the_others_learn_it_too() -> None:
    with local_ranks(SIZE, timeout=10) as ranks:
        outcomes = ranks.outcomes(lambda comm: comm.combine(_x(), mode=None if comm.rank == BAD else "exact"))
        assert isinstance(outcomes[BAD], ValueError) and "which bits?" in str(outcomes[BAD])
        assert isinstance(outcomes[0], PeerRefused) and "which bits?" in str(outcomes[0])


def test_subnormals_that_a_thread_flushes_are_an_error_on_all_ranks() -> None:
    with local_ranks(SIZE, mode="exact", timeout=10) as ranks:

        def flush(comm: Communicator) -> Any:
            torch.set_flush_denormal(comm.rank == BAD)  # of this thread
            try:
                return comm.combine(_x())
            finally:
                torch.set_flush_denormal(False)

        outcomes = ranks.outcomes(flush)
        assert type(outcomes[BAD]) is RuntimeError and "flushes subnormals" in str(outcomes[BAD])
        assert isinstance(outcomes[0], PeerRefused) and "flushes subnormals" in str(outcomes[0])
        _works(ranks)


def test_a_dtensor_is_refused_with_what_to_do(ranks: Ranks[Communicator]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = DTensor.from_local(_x(), init_device_mesh("cpu", (1,)), [Replicate()])
        outcomes = ranks.outcomes(lambda comm: comm.combine(x if comm.rank == BAD else _x()))
    finally:
        dist.destroy_process_group()
    assert type(outcomes[BAD]) is TypeError and "x.to_local()" in str(outcomes[BAD])
    _works(ranks)
