"""A small Qwen3-MoE with bicomm's router: the same loss curve twice, checkpointed or not, and undone."""

from __future__ import annotations

import pytest
import torch

from router_cases import same

pytest.importorskip("transformers")

from bicomm.model_hooks import transformers_router
from qwen_router import train


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_curve_twice_and_under_checkpointing(dtype: torch.dtype) -> None:
    first, again, saved = train(dtype=dtype), train(dtype=dtype), train(dtype=dtype, checkpoint=True)
    assert first[0] == again[0] == saved[0] and first[2] == again[2] == saved[2]
    for _, tape, _ in (again, saved):
        assert len(tape) == len(first[1]) == 8
        assert all(torch.equal(a, b) for a, b in zip(tape.ids, first[1].ids, strict=True))
    assert first[0][-1] < first[0][0]
    assert train(dtype=dtype, aux_coeff=0.0)[0] != first[0], "the auxiliary loss takes part"


def test_it_starts_where_transformers_starts() -> None:
    ours, theirs = train(steps=1, aux_coeff=0.0), train(steps=1, replaced=False)
    assert abs(ours[0][0] - theirs[0][0]) < 1e-4


def test_replacing_twice_is_an_error_and_removing_restores() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    ids = torch.arange(8)[None]
    before = model(input_ids=ids).logits
    with transformers_router.replace_routers(model) as routers:
        assert routers.names == ("model.layers.0.mlp.gate",)
        with pytest.raises(ValueError, match="replaced already"):
            transformers_router.replace_routers(model)
        got = model(input_ids=ids, output_router_logits=True)
        assert got.router_logits[0].shape[-1] == 4  # recording still works
    assert same(model(input_ids=ids).logits, before)
    routers.remove()
    with pytest.raises(ValueError, match="no router of a known class"):
        transformers_router.replace_routers(torch.nn.Linear(2, 2))
