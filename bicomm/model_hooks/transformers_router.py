"""bicomm's router inside transformers' Qwen3-MoE: the same parameters, other arithmetic, undone with `remove()`.

Each router module keeps its class, weight and hooks; only the `forward` of the instance is replaced. So checkpoints,
tensor-parallel plans and output recording work as before. Written against transformers 5.17 to 5.24, where a router
returns (logits, weights, ids) and a model may be imported after this module.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Self

import torch
from torch import Tensor, nn

from bicomm.as_written import as_written
from bicomm.model_hooks import losses, router
from bicomm.model_hooks.gate import gate

ROUTER_CLASSES = ("Qwen3MoeTopKRouter",)


class ReplacedRouters:
    """What :func:`replace_routers` did. `names`: the routers, in order. `remove()`, or leaving a `with`, undoes it."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self.names = tuple(modules)

    def remove(self) -> None:
        """Give every router its own forward back."""
        for module in self._modules.values():
            with contextlib.suppress(AttributeError):  # removing twice is no error
                del module.forward
        self._modules = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@as_written
def _forward(module: Any, hidden: Tensor, *, name: str, aux_coeff: float, z_coeff: float) -> tuple[Tensor, ...]:
    hidden = hidden.reshape(-1, module.hidden_dim)
    logits = gate(hidden, module.weight)
    weights, ids = router.route(
        logits, module.top_k, renormalize=module.norm_topk_prob, weights_dtype=hidden.dtype, name=name
    )
    if module.training and torch.is_grad_enabled():
        if aux_coeff:
            values = router.scores_for_aux_loss(logits)
            counts = losses.count_tokens(ids, module.num_experts)
            loss = losses.load_balancing_loss(values, counts, hidden.shape[0], module.top_k, aux_coeff)
            weights = losses.attach_loss(weights, loss)
        if z_coeff:
            weights = losses.attach_loss(weights, losses.z_loss(logits, z_coeff, hidden.shape[0]))
    return logits.to(hidden.dtype), weights, ids


def replace_routers(model: nn.Module, *, aux_coeff: float = 0.0, z_coeff: float = 0.0) -> ReplacedRouters:
    """Route every Qwen3-MoE layer of `model` with bicomm: gate, softmax, top-k, renormalisation as the config says.

    While training, aux_coeff and z_coeff add the auxiliary and the z-loss of the tokens of each call to the gradient
    (transformers' own `output_router_logits` loss is separate). The router's weights are rounded to the dtype of the
    hidden states, as transformers rounds them; the gate's logits are fp32 inside and rounded only where they are
    returned. Raises ValueError if the model has no such router, or one that is replaced already.
    """
    found = {name: m for name, m in model.named_modules() if type(m).__name__ in ROUTER_CLASSES}
    if not found:
        raise ValueError(f"no router of a known class ({', '.join(ROUTER_CLASSES)}) in {type(model).__name__}")
    for name, module in found.items():
        if "forward" in vars(module):
            raise ValueError(f"the forward of {name} is replaced already: call remove() on what replaced it")
    for name, module in found.items():
        module.forward = functools.partial(_forward, module, name=name, aux_coeff=aux_coeff, z_coeff=z_coeff)
    return ReplacedRouters(found)
