"""Collectives keep their order in the code that Inductor generates.

The operators carry an ordered effect, and Inductor (read in torch 2.11 and 2.13) notes for each of them that it comes
after the one before; but under the name of its buffer, where the scheduler looks for the name of its operation. Passes
that save memory then move a collective ahead of another, by sizes that differ between ranks: data of two equal calls
could be exchanged. Here the operators are lowered to the kernel that names its predecessor as something it reads.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import torch

_OPERATORS = ("combine", "dispatch", "combine_rows", "combine_counted", "combine_rows_backward")


def keep_order() -> None:
    """Make it so, once; called while a program is traced. Nothing is imported and done where nothing compiles."""
    if "torch._dynamo" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    try:
        from torch._inductor import ir, lowering

        for name in _OPERATORS:
            operator = getattr(torch.ops.bicomm, name).default
            lowering.register_lowering(operator, type_promotion_kind=None)(
                functools.partial(_lower, operator, ir.EffectfulKernel, ir.IRNode, ir.TensorBox)
            )
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"this torch has another Inductor than bicomm knows ({error}): code that it compiles may reorder "
            f"collectives. Compile with backend='aot_eager', or one collective in each compiled function",
            stacklevel=2,
        )


def _lower(operator: Any, kernel: Any, node: Any, box: Any, *arguments: Any, **options: Any) -> Any:
    made = kernel.create(operator, *arguments, **options)
    return torch.utils._pytree.tree_map(lambda x: box.create(x) if isinstance(x, node) else x, made)
