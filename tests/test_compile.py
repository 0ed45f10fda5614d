"""torch.compile: whole graphs with the same bits, calls that are neither merged, removed nor reordered, and opcheck."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config
from ranks import run_ranks
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import bicomm
from bicomm import world
from bicomm.communicator import Communicator
from bicomm.contract import Contract
from bicomm.errors import CallMismatch
from bicomm.operators import inductor, ops
from worlds import same_bits

pytestmark = [pytest.mark.timeout(300)]
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.skipif(not CXX, reason="no C++ compiler"))]
PARTIAL = Contract.parse("ordered/1+slot-fp64-activation/1")


def _functions(comm: Communicator) -> dict[str, Callable[[Tensor], Any]]:
    """What is compiled; x is fp32 [2 W, 4]."""
    size, rank = comm.size, comm.rank
    zeros = torch.zeros(2, 2, dtype=torch.int64)
    uneven = [2 * size - 1, *[1] * (size - 2), 0] if size > 2 else [3, 1]
    uneven[-1] = 2 * size - sum(uneven[:-1])
    first = [2 * size, *[0] * (size - 1)]

    def both(x: Tensor) -> Tensor:
        y = x * 2
        return comm.combine(y) + comm.combine(y)

    def unused(x: Tensor) -> Tensor:
        comm.combine(x * 3)
        return x + 1

    def layer(x: Tensor) -> Tensor:
        h = comm.combine(x.abs() * 3)  # no sin: Inductor's own has other bits
        return comm.dispatch(h, splits=[2] * size).neg()

    def mixed(x: Tensor) -> Tensor:
        a = comm.combine(x, "ordered")
        b = comm.dispatch(x[:1], splits=[1] * size)
        c = comm.combine(x, "fp64", out_dtype=torch.bfloat16)
        return a[0] + b[0] + c[0]  # no sum: Inductor's own has another order

    return {
        "combine": lambda x: comm.combine(x * 2) + 1,
        "with a contract": lambda x: comm.combine(x * 2, PARTIAL) + 1,
        "bicomm.combine": lambda x: bicomm.combine(x * 2, "exact") + 1,
        "list splits": lambda x: comm.combine(x * 2, splits=uneven) + 1,
        "tensor splits": lambda x: comm.combine(x * 2, splits=torch.tensor(uneven)) + 1,
        "array splits": lambda x: comm.combine(x * 2, splits=np.array(uneven)) + 1,
        "0 rows on most ranks": lambda x: comm.combine(x * 2, splits=first) + 1,
        "two equal combines": both,
        "an unused result": unused,
        "a layer": layer,
        "several in order": mixed,
        "dispatch of unknown counts": lambda x: comm.dispatch(x[: rank + 1] * 2).sum(0),
        "rows": lambda x: comm.combine_rows(x * 2, zeros, zeros + size - 1) + 1,
        "weighted rows": lambda x: comm.combine_rows(x * 2, zeros, zeros, x[:2, :2]) + 1,
    }


# What only Inductor could get wrong; the rest is decided before it.
INDUCTOR = ("tensor splits", "0 rows on most ranks", "two equal combines", "an unused result", "several in order",
            "weighted rows")  # fmt: skip


def _counting(comm: Communicator, calls: list[str]) -> None:
    """Note every call that reaches the transport, in order."""
    transport: Any = comm.transport
    for name in ("combine", "dispatch", "combine_rows"):
        real = getattr(transport, name)

        def noted(*arguments: Any, real: Any = real, name: str = name) -> Any:
            calls.append(name)
            return real(*arguments)

        setattr(transport, name, noted)


def _compiled(backend: str) -> list[str]:
    w = world.init(device="cpu")
    comm, calls, wrong = Communicator(mode="exact", timeout=60), [], []
    plain: list[str] = []
    _counting(comm, calls)
    data = torch.randn(2 * w.size, 4, generator=torch.Generator().manual_seed(w.rank))
    for name, function in _functions(comm).items():
        if backend == "inductor" and name not in INDUCTOR:
            continue
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        for needs in (False, True):
            results = []
            for run in (function, compiled):
                x = data.clone().requires_grad_(needs)
                calls.clear()
                out = run(x)
                if out.requires_grad:
                    (out.float() * (w.rank + 1)).sum().backward()
                results.append((out.detach(), x.grad, list(calls)))
            (a, ga, plain), (b, gb, kept) = results
            if not same_bits(a, b):
                wrong.append(f"{name}: other bits")
            if (ga is None) != (gb is None) or (ga is not None and not same_bits(ga, gb)):  # type: ignore[arg-type]
                wrong.append(f"{name}: another gradient")
            if plain != kept:
                wrong.append(f"{name}: {kept} instead of {plain}")
    comm.close()
    bicomm.shutdown()
    return wrong


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_functions_make_the_same_calls_and_give_the_same_bits(backend: str, tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "one"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for result in run_ranks(3, _compiled, backend, launcher="fork", timeout=280, env=env):
        assert result.value == []


def _cached(parts: list[list[int]]) -> list[str]:
    """The same function with the same shapes, in groups of different sizes that share one cache."""
    import torch.distributed as dist

    w = world.init(device="cpu")
    wrong = []
    group = [dist.new_group(part) for part in parts][next(k for k, part in enumerate(parts) if w.rank in part)]
    comm = Communicator(group, device="cpu", mode="exact", timeout=60)
    x = torch.arange(24.0).view(12, 2) * (comm.rank + 1)
    splits = torch.tensor([12 - 2 * (comm.size - 1), *[2] * (comm.size - 1)])
    for function in (lambda x: comm.combine(x + 1) * 2, lambda x: comm.combine(x + 1, splits=splits.tolist()) * 2):
        torch._dynamo.reset()
        if not same_bits(torch.compile(function, fullgraph=True)(x), function(x)):
            wrong.append("other bits")
    bicomm.shutdown()
    return wrong


@pytest.mark.long
@pytest.mark.skipif(not CXX, reason="no C++ compiler")
def test_a_cache_that_ranks_and_groups_share_mixes_nothing_up(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "shared"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for result in run_ranks(5, _cached, [[0, 1], [2, 3, 4]], launcher="fork", timeout=200, env=env):
        assert result.value == []


def test_tensor_splits_compile_once_and_list_splits_per_value() -> None:
    (comm,) = bicomm.local_world(1, mode="exact")
    counter = CompileCounterWithBackend("aot_eager")

    @functools.partial(torch.compile, fullgraph=True, backend=counter, dynamic=True)
    def function(x: Tensor, splits: Tensor) -> Tensor:
        return comm.combine(x, splits=splits) * 2

    torch._dynamo.reset()
    for tokens in (4, 7, 9, 30):
        x = torch.randn(tokens, 3)
        assert torch.equal(function(x, torch.tensor([tokens])), x * 2)
    assert counter.frame_count == 1


def _in_order(comm: Communicator) -> tuple[list[str], list[str]]:
    """The calls of an eager and of a compiled run of a function in which another order needs less memory."""
    calls: list[str] = []
    _counting(comm, calls)
    x = torch.ones(1, 4)

    def function(x: Tensor) -> Tensor:
        a = comm.combine(x, "ordered")
        b = comm.dispatch(x[:1], splits=[1])
        return a.sum() + b.sum() + comm.combine(x, "fp64", out_dtype=torch.bfloat16).sum()

    function(x)
    plain = list(calls)
    calls.clear()
    torch._dynamo.reset()
    torch.compile(function, fullgraph=True)(x)
    return plain, calls


@pytest.mark.skipif(not CXX, reason="no C++ compiler")
def test_inductor_keeps_the_order_and_alone_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: without bicomm's lowering, Inductor of these versions moves one collective ahead of another."""
    with torch._inductor.config.patch(force_disable_caches=True):
        _order_with_and_without(monkeypatch)


def _order_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, compiled = _in_order(bicomm.local_world(1, mode="exact")[0])
    assert compiled == plain == ["combine", "dispatch", "combine"]
    from torch._inductor.lowering import lowerings

    for name in inductor._OPERATORS:
        monkeypatch.delitem(lowerings, getattr(torch.ops.bicomm, name).default)
    plain, compiled = _in_order(bicomm.local_world(1, mode="exact")[0])
    assert sorted(compiled) == sorted(plain) and compiled != plain


def test_out_is_refused_while_compiling() -> None:
    (comm,) = bicomm.local_world(1, mode="exact")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="out= cannot be used"):
        torch.compile(lambda x: comm.combine(x, out=torch.empty(2, 2)), fullgraph=True, backend="aot_eager")(
            torch.ones(2, 2)
        )


def _only_some_ask() -> str:
    w = world.init(device="cpu")
    comm = Communicator(mode="exact", timeout=60)
    compiled = torch.compile(lambda x: comm.combine(x * 2), fullgraph=True, backend="aot_eager")
    try:
        compiled(torch.ones(3, 2, requires_grad=w.rank != 1))
        return "ran"
    except CallMismatch as error:
        return str(error)
    finally:
        bicomm.shutdown()


def test_compiled_ranks_that_ask_for_different_gradients_are_told() -> None:
    """Compiled code cannot join a backward pass that it was not compiled for, so that would hang."""
    for result in run_ranks(3, _only_some_ask, launcher="fork"):
        assert "rank 0 asks for the gradient to x" in result.value and "rank 1 for none" in result.value
        assert "requires_grad_()" in result.value


@pytest.mark.parametrize("case", ["combine", "counts", "equal", "dispatch", "own", "rows", "weighted"])
@pytest.mark.parametrize("needs", [True, False])
def test_opcheck(case: str, needs: bool) -> None:
    (comm,) = bicomm.local_world(1, mode="exact")
    x = torch.randn(4, 3, requires_grad=needs)
    maps = torch.tensor([[0, 1], [3, 3]]), torch.tensor([[0, 0], [0, -1]])
    weights = torch.rand(2, 2, requires_grad=needs)
    who = (comm.handle, 0, 1)
    f32, asked = torch.float32, "x" if needs else ""
    operator, arguments = {
        "combine": (ops.combine, (x, [4], None, *who, "exact", f32, 4, asked, True)),
        "counts": (ops.combine, (x, None, torch.tensor([4]), *who, "exact", f32, 4, asked, True)),
        "equal": (ops.combine, (x, None, None, *who, "exact", torch.bfloat16, 4, asked, True)),
        "dispatch": (ops.dispatch, (x, [4], None, *who, "exact", 4, asked, True)),
        "own": (ops.dispatch, (x, None, None, *who, "exact", 4, asked, True)),
        "rows": (ops.combine_rows, (x, *maps, None, *who, f32, f32, "rows" if needs else "", True)),
        "weighted": (ops.combine_rows, (x, *maps, weights, *who, f32, f32, "rows+weights" if needs else "", True)),
    }[case]
    torch.library.opcheck(operator, arguments)


def test_every_operator_carries_the_effect_that_keeps_it() -> None:
    from torch._higher_order_ops.effects import _get_effect
    from torch._library.effects import EffectType

    for operator in (ops.combine, ops.dispatch, ops.combine_rows, ops.combine_counted, ops.combine_rows_backward):
        assert _get_effect(operator._opoverload) == EffectType.ORDERED
