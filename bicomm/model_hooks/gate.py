"""The router's linear layer: bf16 in, fp32 out, a row's bits independent of the other rows and of the shape around it.

y[t, e] = sum_k x[t, k] * w[e, k], in fp32, k ascending, K never split. On Hopper every kernel that walks K in order
gives one canonical value (measured: 384 Triton configurations and cuBLAS agree), so the tile is free; it is chosen by
(K, E, dtype) all the same, because that is not known for other GPUs. On a CPU the order is that of its BLAS, which
sees one shape, one layout and one thread: tiles of 64 rows, copied.
A 3-D input is a 2-D input with another shape: it never reaches bmm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bicomm.as_written import as_written

TILE = 64
GATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@contextlib.contextmanager
def _one_fp32_product() -> Iterator[None]:
    """`@` as it is in fp32 on one thread: autocast would round both sides to bf16, and a BLAS splits K over threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_num_threads(threads)


def _copied(x: Tensor) -> Tensor:
    return x.to(torch.float32).clone(memory_format=torch.contiguous_format)


def _tiled_rows(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] in fp32, 64 rows at a time, the last tile filled up with zeros: no row sees M."""
    b = _copied(b)
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    tile = torch.zeros(TILE, a.shape[1], dtype=torch.float32, device=a.device)
    with _one_fp32_product():
        for start in range(0, a.shape[0], TILE):
            rows = min(TILE, a.shape[0] - start)
            tile[:rows] = a[start : start + rows]
            tile[rows:] = 0.0
            out[start : start + rows] = (tile @ b)[:rows]
    return out


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N], fp32, K ascending; rows independent of M."""
    if a.is_cuda:
        from bicomm.model_hooks import gate_kernel

        return gate_kernel.product(a, b)
    return _tiled_rows(a, b)


def _sum_over_tokens(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T [E, T] @ x [T, K] in fp32: tokens ascending in a fixed order (it depends on T, as a sum over T must)."""
    if x.is_cuda:
        from bicomm.model_hooks import gate_kernel

        return gate_kernel.product(grad.t(), x)
    out = torch.zeros(grad.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
    with _one_fp32_product():
        for start in range(0, x.shape[0], 16 * TILE):
            part = slice(start, start + 16 * TILE)
            out = out + _copied(grad[part].t()) @ _copied(x[part])
    return out


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = _product(grad, weight.to(torch.float32)).to(x.dtype) if ctx.needs_input_grad[0] else None
        dw = _sum_over_tokens(grad, x.to(torch.float32)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw


@as_written
def gate(x: Tensor, weight: Tensor) -> Tensor:
    """Router logits fp32 [..., E] from hidden states x [..., K] and weight [E, K]; differentiable in both.

    x and weight are bf16, fp16 or fp32; where they differ both are widened to fp32. Products and sums are fp32.
    Raises TypeError for another dtype, ValueError for shapes or devices that do not fit.
    """
    if x.dtype not in GATE_DTYPES or weight.dtype not in GATE_DTYPES:
        raise TypeError(f"the gate takes bf16, fp16 or fp32; got x {x.dtype} and weight {weight.dtype}")
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1] or x.device != weight.device:
        raise ValueError(
            f"expected x [..., K] and weight [E, K] on one device; got {tuple(x.shape)} on {x.device} and "
            f"{tuple(weight.shape)} on {weight.device}"
        )
    if x.dtype != weight.dtype:
        x, weight = x.to(torch.float32), weight.to(torch.float32)
    out: Tensor = _Gate.apply(x.reshape(-1, x.shape[-1]), weight)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], weight.shape[0])
