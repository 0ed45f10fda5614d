"""Trains a tiny Qwen3-MoE with bicomm's router: loss curves, routed ids and weights, as a script or a function."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from bicomm.model_hooks import replay
from bicomm.model_hooks.transformers_router import replace_routers


def train(
    device: str = "cpu", dtype: torch.dtype = torch.float32, steps: int = 4, checkpoint: bool = False,
    aux_coeff: float = 0.01, replaced: bool = True,
) -> tuple[list[float], replay.RoutingTape, float]:  # fmt: skip
    """(losses, routed ids, a sum of all parameters in fp64), from random weights made here."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config: Any = Qwen3MoeConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model: Any = Qwen3MoeForCausalLM(config).to(dtype).train()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    ids = torch.randint(0, 96, (2, 24), generator=generator).to(device)
    model = model.to(device)
    routers = replace_routers(model, aux_coeff=aux_coeff, z_coeff=1e-3) if replaced else None
    if checkpoint:
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": replay.checkpoint_contexts}
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    with replay.record() as tape:
        for _ in range(steps):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    if routers is not None:
        routers.remove()
    return losses, tape, sum(float(p.detach().double().sum()) for p in model.parameters())


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[sys.argv[2]]
    runs = [train(sys.argv[1], kind, 6), train(sys.argv[1], kind, 6), train(sys.argv[1], kind, 6, checkpoint=True)]
    same_ids = all(
        len(tape) == len(runs[0][1]) and all(torch.equal(a, b) for a, b in zip(tape.ids, runs[0][1].ids, strict=True))
        for _, tape, _ in runs
    )
    print(json.dumps({"curves": [r[0] for r in runs], "weights": [r[2] for r in runs], "same_ids": same_ids}))
