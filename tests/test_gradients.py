"""Gradients, bit for bit: combine's is dispatch, dispatch's is combine, and those of combine_rows are exact sums."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import bicomm
from bicomm.communicator import Communicator
from bicomm.contract import Contract
from bicomm.errors import CallMismatch
from combine_cases import partials, rows_case, uneven
from worlds import local_ranks, same_bits

pytestmark = [pytest.mark.timeout(120)]
EXACT = Contract("exact")


@pytest.mark.parametrize("size", [1, 3, 5])
def test_combines_gradient_is_autograds_of_the_plain_sum(size: int) -> None:
    with local_ranks(size, timeout=20) as ranks:
        for seed, (mode, splits) in enumerate(itertools.product(("ordered", "exact"), uneven(size))):
            x = partials("spread", size, sum(splits), 4, seed)
            upstream = [partials("spread", 1, max(count, 1), 4, 77 + r)[0][:count] for r, count in enumerate(splits)]

            plain = x.clone().requires_grad_()  # one process: the same function, by torch's own autograd
            plain.sum(0).backward(torch.cat(upstream))
            assert plain.grad is not None

            def work(
                comm: Communicator, x: Tensor = x, splits: Any = splits, mode: str = mode, up: Any = upstream
            ) -> Any:
                mine = x[comm.rank].clone().requires_grad_()
                comm.combine(mine, mode, splits=splits).backward(up[comm.rank])
                return mine.grad

            grads = ranks(work)
            assert all(same_bits(grad, plain.grad[rank]) for rank, grad in enumerate(grads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("told", [True, False])
def test_dispatchs_gradient_is_the_contracts_sum_at_the_owner(dtype: torch.dtype, told: bool) -> None:
    size = 3
    with local_ranks(size, timeout=20) as ranks:
        for seed, (mode, splits) in enumerate(itertools.product(("ordered", "exact"), uneven(size))):
            tokens = sum(splits)
            x = partials("normal", 1, max(tokens, 1), 4, seed)[0][:tokens].to(dtype)
            upstream = partials("tie_dust", size, tokens, 4, seed).to(dtype)
            total = bicomm.Contract.parse(mode).sum(list(upstream.float())).to(dtype)

            def work(
                comm: Communicator, x: Tensor = x, splits: Any = splits, mode: str = mode, up: Tensor = upstream
            ) -> Any:
                first = sum(splits[: comm.rank])
                mine = x[first : first + splits[comm.rank]].clone().requires_grad_()
                comm.dispatch(mine, splits=splits if told else None, mode=mode).backward(up[comm.rank])
                return mine.grad

            assert same_bits(torch.cat(ranks(work)), total)


def test_a_bf16_result_and_a_bf16_gradient() -> None:
    with local_ranks(3, mode="exact", timeout=20) as ranks:
        x = partials("normal", 3, 6, 5, 1)
        upstream = partials("normal", 3, 2, 5, 2).bfloat16()

        def work(comm: Communicator) -> Any:
            mine = x[comm.rank].clone().requires_grad_()
            out = comm.combine(mine, out_dtype=torch.bfloat16)
            assert out.dtype == torch.bfloat16
            out.backward(upstream[comm.rank])
            return mine.grad

        assert all(same_bits(grad, upstream.reshape(6, 5).float()) for grad in ranks(work))


def test_both_directions_twice() -> None:
    """Gradients of gradients: the operators are each other's, so autograd may go on."""
    with local_ranks(3, mode="exact", timeout=20) as ranks:
        x = partials("normal", 3, 6, 2, 3)

        def work(comm: Communicator) -> Any:
            mine = x[comm.rank].clone().requires_grad_()
            out = comm.combine(mine)
            (grad,) = torch.autograd.grad((out**3).sum(), mine, create_graph=True)
            grad.sum().backward()
            return out.detach(), mine.grad

        outs = ranks(work)
        every = torch.cat([out for out, _ in outs])
        # d/dx of sum over ranks of 3 out^2: each rank's partial enters all three ranks' gradients.
        assert all(torch.equal(grad, 18 * every) for _, grad in outs)


def test_a_chain_of_layers_with_dispatch_and_combine() -> None:
    """Tokens out, experts, partials back, twice; against one process that holds all experts."""
    size, splits, hidden = 3, [2, 0, 3], 4
    weights = [partials("normal", 1, hidden, hidden, 10 + r)[0].double() for r in range(size)]
    x = partials("normal", 1, 5, hidden, 1)[0]
    with local_ranks(size, mode="exact", timeout=20) as ranks:

        def work(comm: Communicator) -> Any:
            first = sum(splits[: comm.rank])
            mine = x[first : first + splits[comm.rank]].clone().requires_grad_()
            expert = weights[comm.rank].clone().requires_grad_()
            h = mine
            for _ in range(2):
                every = comm.dispatch(h, splits=splits)
                h = comm.combine(torch.tanh((every.double() @ expert).float()), splits=splits)
            h.sum().backward()
            return h.detach(), mine.grad, expert.grad

        outs = ranks(work)
    whole = x.clone().requires_grad_()
    experts = [w.clone().requires_grad_() for w in weights]
    h = whole
    for _ in range(2):
        h = torch.stack([torch.tanh((h.double() @ w).float()) for w in experts]).sum(0)
    h.sum().backward()
    assert torch.allclose(torch.cat([o[0] for o in outs]), h, rtol=1e-6)
    assert whole.grad is not None and torch.allclose(torch.cat([o[1] for o in outs]), whole.grad, rtol=1e-5)
    for rank in range(size):
        assert torch.allclose(outs[rank][2], experts[rank].grad, rtol=1e-5)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------- operands that need no gradient


def test_a_rank_whose_operand_needs_no_gradient_joins_the_others_backward_pass() -> None:
    """A rank whose experts got no tokens has partials without a graph: the others must not wait for it."""
    with local_ranks(3, mode="exact", timeout=10) as ranks:
        x = partials("normal", 3, 6, 4, 2)

        def combine(comm: Communicator) -> Any:
            mine = x[comm.rank].clone().requires_grad_(comm.rank != 1)
            (comm.combine(mine) * (comm.rank + 1)).sum().backward()
            return mine.grad

        want = torch.tensor([1.0, 1, 2, 2, 3, 3]).unsqueeze(1).expand(6, 4)
        grads = ranks(combine)
        assert grads[1] is None and torch.equal(grads[0], want) and torch.equal(grads[2], want)

        def dispatch(comm: Communicator) -> Any:
            mine = torch.ones(comm.rank, 4).requires_grad_(comm.rank != 1)
            (comm.dispatch(mine) * (comm.rank + 1)).sum().backward()  # rank 1's use counts for the others' tokens
            return mine.grad

        grads = ranks(dispatch)
        assert grads[1] is None and grads[0].shape == (0, 4) and torch.equal(grads[2], torch.full((2, 4), 6.0))

        # Nobody asks: no graph at all, and nothing to run backward.
        assert not any(out.requires_grad for out in ranks(lambda comm: comm.combine(x[comm.rank])))


def test_rows_and_weights_that_only_some_ranks_train() -> None:
    case = rows_case(3, 5, 2, torch.float32)
    with local_ranks(3, timeout=10) as ranks:

        def work(comm: Communicator, rows_on: tuple[int, ...], weights_on: tuple[int, ...]) -> Any:
            row, rank, weights = case["maps"][comm.rank]
            rows = case["rows"][comm.rank].clone().requires_grad_(comm.rank in rows_on)
            weights = weights.clone().requires_grad_(comm.rank in weights_on)
            out = comm.combine_rows(rows, row, rank, weights)
            if out.requires_grad:
                (out * (comm.rank + 1)).sum().backward()
            return rows.grad, weights.grad

        full = ranks(lambda comm: work(comm, (0, 1, 2), (0, 1, 2)))
        for rows_on, weights_on in itertools.product(((), (1,), (0, 2)), ((), (2,), (0, 1))):
            for rank, grads in enumerate(ranks(lambda comm, r=rows_on, w=weights_on: work(comm, r, w))):
                for k, trained in enumerate((rows_on, weights_on)):
                    assert (grads[k] is not None) == (rank in trained)
                    assert grads[k] is None or same_bits(grads[k], full[rank][k])


def test_a_rank_that_runs_without_gradients_cannot_join_and_all_learn_it() -> None:
    with local_ranks(3, mode="exact", timeout=10) as ranks:

        def work(comm: Communicator) -> Any:
            with torch.set_grad_enabled(comm.rank != 1):
                return comm.combine(torch.ones(3, 2, requires_grad=comm.rank == 0))

        for outcome in ranks.outcomes(work):
            assert isinstance(outcome, CallMismatch) and "rank 0 asks for the gradient to x" in str(outcome)
            assert "rank 1 for none" in str(outcome) and "no_grad" in str(outcome)
        ranks(lambda comm: comm.combine(torch.ones(3, 2, requires_grad=True)).sum().backward())


# ------------------------------------------------------------------------------------------------------ combine_rows


def _gathered(case: dict[str, Any], size: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """All ranks' rows below each other, every rank's map into that, and every rank's weights."""
    starts = torch.tensor([0, *itertools.accumulate(len(rows) for rows in case["rows"])])
    flat = [torch.where(rank < 0, -1, row + starts[rank]) for row, rank, _ in case["maps"]]
    return torch.cat(case["rows"]), flat, [maps[2] for maps in case["maps"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_of_combine_rows(dtype: torch.dtype, slots: int, weighted: bool) -> None:
    """Against the definition, written out: an exact sum over the uses of a row, an exact inner product a slot."""
    size, hidden = 3, 6
    for seed in range(4):
        case = rows_case(size, seed, slots, dtype, hidden)
        rows, flat, weights = _gathered(case, size)
        upstream = [partials("spread", 1, max(len(f), 1), hidden, seed + r)[0][: len(f)] for r, f in enumerate(flat)]
        uses: list[list[Tensor]] = [[] for _ in range(len(rows))]
        to_weights = [torch.zeros(f.shape) for f in flat]
        for r in range(size):
            for token, slot in itertools.product(range(flat[r].shape[0]), range(slots)):
                at = int(flat[r][token, slot])
                if at >= 0:
                    scale = weights[r][token, slot] if weighted else 1.0
                    uses[at].append(upstream[r][token] * scale)
                    to_weights[r][token, slot] = EXACT.sum(list(rows[at].float() * upstream[r][token]))
        zero = torch.zeros(hidden)
        to_rows = torch.stack([EXACT.sum(use) if use else zero for use in uses]).to(dtype)

        def work(comm: Communicator, case: Any = case, upstream: Any = upstream) -> Any:
            row, rank, weights = case["maps"][comm.rank]
            mine = case["rows"][comm.rank].clone().requires_grad_()
            given = weights.clone().requires_grad_() if weighted else None
            comm.combine_rows(mine, row, rank, given).backward(upstream[comm.rank])
            return mine.grad, None if given is None else given.grad

        with local_ranks(size, timeout=20) as ranks:
            grads = ranks(work)
            again = ranks(work)
        assert same_bits(torch.cat([g[0] for g in grads]), to_rows)
        assert all(same_bits(a[0], b[0]) for a, b in zip(grads, again, strict=True))
        for r in range(size):
            if weighted:
                assert same_bits(grads[r][1], to_weights[r])


def test_rows_gradient_agrees_with_autograd_of_the_plain_sum() -> None:
    """Where every row is used once, nothing is summed and the bits must be autograd's own."""
    size, tokens, slots, hidden = 3, 4, 2, 5
    chance = torch.Generator().manual_seed(1)
    place = torch.randperm(size * tokens * slots, generator=chance).view(size, tokens, slots)
    rows = partials("normal", size, tokens * slots, hidden, 4)
    weights = torch.rand(size, tokens, slots, generator=chance)
    upstream = partials("normal", size, tokens, hidden, 5)
    plain_rows, plain_weights = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    flat = plain_rows.view(-1, hidden)[place.view(-1)].view(size, tokens, slots, hidden)
    (flat * plain_weights.unsqueeze(-1)).sum(2).backward(upstream)
    assert plain_rows.grad is not None and plain_weights.grad is not None
    with local_ranks(size, timeout=20) as ranks:

        def work(comm: Communicator) -> Any:
            mine, given = rows[comm.rank].clone().requires_grad_(), weights[comm.rank].clone().requires_grad_()
            at = place[comm.rank]
            out = comm.combine_rows(mine, at % (tokens * slots), at // (tokens * slots), given)
            out.backward(upstream[comm.rank])
            return mine.grad, given.grad

        for rank, (to_rows, to_weights) in enumerate(ranks(work)):
            assert same_bits(to_rows, plain_rows.grad[rank])
            assert torch.allclose(to_weights, plain_weights.grad[rank], rtol=1e-5)


def test_gradients_of_rows_depend_neither_on_the_world_size_nor_on_the_owner_of_a_token() -> None:
    tokens, hidden = 12, 4
    row_of = partials("tie_dust", 1, 5, hidden, 1)[0]
    slots = torch.randint(5, (tokens, 2), generator=torch.Generator().manual_seed(2))  # every row is used many times
    upstream = partials("tie_dust", 1, tokens, hidden, 3)[0]
    results = []
    for size, splits in ((1, [12]), (2, [5, 7]), (2, [12, 0]), (4, [1, 0, 8, 3])):
        with local_ranks(size, timeout=20) as ranks:

            def work(comm: Communicator, splits: Any = splits, size: int = size) -> Any:
                first = sum(splits[: comm.rank])
                mine = slice(first, first + splits[comm.rank])
                rows = row_of[comm.rank :: size].clone().requires_grad_()
                comm.combine_rows(rows, slots[mine] // size, slots[mine] % size).backward(upstream[mine])
                return rows.grad

            grads = torch.empty(5, hidden)
            for rank, grad in enumerate(ranks(work)):
                grads[rank::size] = grad
            results.append(grads)
    assert all(same_bits(result, results[0]) for result in results)
    naive = [torch.zeros(5, hidden).index_add_(0, slots[order].view(-1), upstream[order].repeat_interleave(2, 0))
             for order in (torch.arange(tokens), torch.arange(tokens).flip(0))]  # fmt: skip
    assert not same_bits(naive[0], naive[1])


def test_a_slot_that_is_not_routed_has_no_gradient_even_beside_infinities() -> None:
    with local_ranks(2, timeout=10) as ranks:

        def work(comm: Communicator) -> Any:
            weights = torch.tensor([[2.0, float("nan")]]).requires_grad_()
            rows = torch.ones(1, 2, requires_grad=True)
            out = comm.combine_rows(rows, torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[0, -1]]), weights)
            out.backward(torch.tensor([[float("inf"), 1.0]]))
            return rows.grad, weights.grad

        for _, to_weights in ranks(work):
            assert to_weights[0].tolist() == [float("inf"), 0.0]


def test_no_slots_and_no_tokens() -> None:
    with local_ranks(2, timeout=10) as ranks:

        def work(comm: Communicator, tokens: int, slots: int) -> Any:
            rows = torch.ones(2, 3, requires_grad=True)
            maps = torch.zeros(tokens * comm.rank, slots, dtype=torch.int64)
            weights = torch.ones(tokens * comm.rank, slots, requires_grad=True)
            comm.combine_rows(rows, maps, maps, weights).sum().backward()
            return rows.grad, weights.grad

        for tokens, slots in ((0, 2), (4, 0), (0, 0)):
            for rank, (to_rows, to_weights) in enumerate(ranks(lambda comm, t=tokens, s=slots: work(comm, t, s))):
                assert torch.equal(to_rows, torch.zeros(2, 3)) and to_weights.shape == (tokens * rank, slots)


# ---------------------------------------------------------------------------------------------------- checkpointing


@pytest.mark.parametrize("saved", [True, False])
def test_activation_checkpointing(saved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed by all ranks alike with the same bits; or saved by the policy, and then called once."""
    calls = [0] * 3
    real = Communicator._combine

    def count(self: Communicator, *arguments: Any, **options: Any) -> Tensor:
        calls[self.rank] += 1
        return real(self, *arguments, **options)

    monkeypatch.setattr(Communicator, "_combine", count)
    contexts = functools.partial(create_selective_checkpoint_contexts, bicomm.save_collectives)
    x = partials("normal", 3, 6, 4, 8)
    with local_ranks(3, mode="exact", timeout=20) as ranks:

        def work(comm: Communicator, checkpointed: bool) -> Any:
            mine = x[comm.rank].clone().requires_grad_()

            def layer(h: Tensor) -> Tensor:
                return comm.combine(torch.sin(h)).tanh()

            if checkpointed:
                options: dict[str, Any] = {"context_fn": contexts} if saved else {}
                out = checkpoint(layer, mine, use_reentrant=False, **options)
            else:
                out = layer(mine)
            out.sum().backward()
            return out.detach(), mine.grad

        plain = ranks(lambda comm: work(comm, False))
        calls[:] = [0] * 3
        kept = ranks(lambda comm: work(comm, True))
    assert calls == [1 if saved else 2] * 3
    assert all(same_bits(a[k], b[k]) for a, b in zip(plain, kept, strict=True) for k in (0, 1))
