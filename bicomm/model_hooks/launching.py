"""What every launcher of a Triton kernel here shares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(launch: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """Run a launcher on the GPU of its first tensor: Triton launches on the current one, whatever its arguments say."""

    @functools.wraps(launch)
    def wrapped(x: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(x):
            return launch(x, *args, **kwargs)

    return cast(Callable[Concatenate[Tensor, P], R], wrapped)
