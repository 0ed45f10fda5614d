"""Whole contracts by name: the trees that published engines use, within a rank and across ranks.

Sources, read in 2026: Megatron-LM's `moe/batch_invariant.py` and its inference experts, vLLM's batch-invariant fused
MoE, transformers' MoE blocks. A preset names what an engine does; it does not make an engine do it.
"""

from __future__ import annotations

import re

from bicomm.contract import Contract, Partial

PARTIALS: dict[str, Partial] = {
    # Megatron-LM inference, vLLM-style fused experts, SwiGLU: top-k slot order, fp64, one rounding to fp32.
    "megatron-vllm-swiglu": Partial("slot", "fp64", "activation"),
    # The same experts with squared ReLU: the older kernel weighs after FC2 in a fused multiply-add; the newer one
    # weighs at the activation, which leaves a plain fp32 chain here.
    "megatron-vllm-squared-relu-fma": Partial("slot", "fp32", "combine", "fma"),
    "megatron-vllm-squared-relu": Partial("slot", "fp32", "activation"),
    # Megatron-LM inference, torch or DeepGEMM experts: ascending local expert id, fp32.
    "megatron-deepgemm": Partial("expert", "fp32", "activation"),
    # Megatron-LM's own training mirror: ascending expert id, fp64 where the rows are not weighed here.
    "megatron-training-mirror": Partial("expert", "fp64", "activation"),
    # vLLM batch-invariant: the weight enters FC2's fp32 accumulator, rows are bf16, slots are added in order.
    "vllm-bf16": Partial("slot", "bf16", "activation"),
    "vllm-fp32": Partial("slot", "fp32", "activation"),
    # transformers, Qwen3MoE and GPT-OSS: weights and every weighted row in bf16, added in bf16 by expert id.
    "transformers-bf16": Partial("expert", "bf16", "combine", "bf16", "bf16"),
    # transformers, Mixtral and DeepSeek-V3: weights in fp32, one rounding to the model's dtype after the sum.
    "transformers-fp32": Partial("expert", "fp32", "combine", "fp32", "fp32"),
    # slime, verl, SkyRL: rows travel to the token's owner, who adds them in fp32 in slot order.
    "slot-fp32": Partial("slot", "fp32", "combine", "fp32", "fp32"),
}

PRESETS: dict[str, Contract] = {
    "megatron-vllm-swiglu": Contract("ordered", partial=PARTIALS["megatron-vllm-swiglu"]),
    "megatron-vllm-swiglu-fp64": Contract("fp64", partial=PARTIALS["megatron-vllm-swiglu"]),
    "megatron-vllm-squared-relu-fma": Contract("ordered", partial=PARTIALS["megatron-vllm-squared-relu-fma"]),
    "megatron-vllm-squared-relu": Contract("ordered", partial=PARTIALS["megatron-vllm-squared-relu"]),
    "megatron-deepgemm": Contract("ordered", partial=PARTIALS["megatron-deepgemm"]),
    "megatron-training-mirror": Contract("ordered", partial=PARTIALS["megatron-training-mirror"]),
    "megatron-training-mirror-fp64": Contract("fp64", partial=PARTIALS["megatron-training-mirror"]),
    # One process holds all experts of a token in the next three: mirror them with ep_size 1.
    "transformers-bf16": Contract("ordered", partial=PARTIALS["transformers-bf16"]),
    "transformers-fp32": Contract("ordered", partial=PARTIALS["transformers-fp32"]),
    "slot-fp32": Contract("ordered", partial=PARTIALS["slot-fp32"]),
    "owner": Contract("owner"),
}


def name_of_partial(partial: Partial) -> str:
    """The preset's name and version where one has this tree, else the tree spelled out."""
    for name, known in PARTIALS.items():
        if known == partial:
            return f"{name}/1"
    return partial.id


def partial_named(text: str) -> Partial:
    """The `Partial` that `name_of_partial` gave this name. Raises ValueError for an unknown one."""
    name = text.removesuffix("/1")
    if name in PARTIALS:
        return PARTIALS[name]
    if re.fullmatch(r"(slot|expert)-(exact|fp64|fp32|bf16)-(activation|combine)(-(fp32|bf16|fma)-(fp32|bf16))?", name):
        return Partial(*name.split("-"))  # type: ignore[arg-type]
    raise ValueError(f"unknown tree within a rank {text!r}: expected one of {', '.join(PARTIALS)}, or a spelled one")
