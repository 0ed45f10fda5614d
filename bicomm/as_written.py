"""What all definitions of bits have in common: no compiler rewrites them, and their roundings have a gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def as_written(definition: Callable[P, R]) -> Callable[P, R]:
    """The same function, which torch.compile calls and does not trace: under fullgraph=True that is torch's error.

    Inductor drops a rounding to bf16 that is widened again at once, and the sum is another one.
    `torch.compiler.disable` as a decorator would import the compiler, which takes longer than torch itself.
    """

    @functools.wraps(definition)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            run_as_written = torch.compiler.disable(definition)  # no graph may hold it: mirror.combine can be in one
            result: R = run_as_written(*args, **kwargs)
            return result
        return definition(*args, **kwargs)

    return run


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[], Tensor], *terms: Tensor) -> Tensor:
        ctx.dtypes = [term.dtype for term in terms]
        return run()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        needed = zip(ctx.needs_input_grad[1:], ctx.dtypes, strict=True)
        return None, *(grads[0].to(dtype) if need else None for need, dtype in needed)


def rounded_sum(run: Callable[[], Tensor], *terms: Tensor) -> Tensor:
    """run(), a sum of the terms with roundings, each of which counts as the identity in the backward pass.

    So every term's gradient is the result's, cast to the term's type. All are of one shape.
    """
    if not needs_gradient(terms):
        return run()
    result: Tensor = _Rounded.apply(run, *terms)  # type: ignore[no-untyped-call]
    return result


def needs_gradient(terms: tuple[Tensor, ...] | list[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(term.requires_grad for term in terms)
