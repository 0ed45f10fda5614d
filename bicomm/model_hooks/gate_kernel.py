"""A product [M, K] @ [K, N] with fp32 output that walks K in order and never splits it, as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bicomm.model_hooks.launching import on_its_device


@triton.jit(do_not_specialize=["M"])
def serial_product(
    a, b, out, M: tl.int64, N: tl.int64, K: tl.int32, a_row, a_col, b_row, b_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    # the strides are not annotated: one that is 1 becomes a constant, and with it the loads become wide
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :].to(tl.int64)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    # rows and columns beyond the end repeat the last one: they are computed, and not stored
    x_at = a + tl.minimum(m, M - 1) * a_row + k[None, :] * a_col
    w_at = b + k[:, None] * b_row + tl.minimum(n, N - 1) * b_col
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x, w = tl.load(x_at), tl.load(w_at)
        else:
            x = tl.load(x_at, mask=k[None, :] < K - start, other=0.0)
            w = tl.load(w_at, mask=k[:, None] < K - start, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        x_at += BLOCK_K * a_col
        w_at += BLOCK_K * b_row
    tl.store(out + m * N + n, acc, mask=(m < M) & (n < N))


def tile(K: int, N: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_K, warps, stages) by (K, N, dtype) only: never by the number of rows."""
    if dtype == torch.float32:
        return 64, 32, 32, 4, 2
    return 64, 32 if N > 16 else 16, 64, 4, 4


@on_its_device
def product(a: Tensor, b: Tensor) -> Tensor:
    """fp32 [M, N] of a [M, K] and b [K, N], any strides, one dtype (bf16, fp16 or fp32)."""
    (M, K), N = a.shape, b.shape[1]
    out = torch.empty(M, N, dtype=torch.float32, device=a.device)
    if out.numel() == 0 or K == 0:
        return out.zero_()
    block_m, block_n, block_k, warps, stages = tile(K, N, a.dtype)
    serial_product[(triton.cdiv(M, block_m), triton.cdiv(N, block_n))](
        a, b, out, M, N, K, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=K % block_k == 0, num_warps=warps, num_stages=stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
