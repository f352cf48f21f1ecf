"""Fused experts of a family, and everything around their products, as in transformers' grouped implementation.

The caller computes the products, since it knows where the weights are (quantized, offloaded).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from swarm_plugins.moe.routing import Routing

EXPERT_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
"""Weights of fused experts; with biases, also these names with ``_bias``."""
Product = Callable[[str, Tensor], Tensor]
"""Multiplies rows by the named weight, with all that is added to it (bias, adapters)."""


def is_fused_experts(module: nn.Module) -> bool:
    """Returns whether a module runs experts from fused parameters through transformers' registry."""
    return all(
        hasattr(module, name) for name in ("has_gate", "is_transposed", "has_bias", "_apply_gate", "num_experts")
    )


def expert_mlp(module: Any, rows: Tensor, product: Product) -> Tensor:
    """Runs rows through an expert, or through all of them if the product tells rows apart.

    Args:
        module: A family's experts; the flags of transformers' experts registry are honored.
        rows: ``[N, D]``.
        product: Called for ``gate_up_proj`` (``up_proj`` without a gate) and ``down_proj``.

    Returns:
        ``[N, D]``.
    """
    up = product("gate_up_proj" if module.has_gate else "up_proj", rows)
    return product("down_proj", activate(module, up))


def activate(module: Any, up: Tensor) -> Tensor:
    """Applies the gate and the activation of a family's experts to ``[N, 2 F]`` (``[N, F]`` without a gate)."""
    activated: Tensor = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    return activated


def out_of_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which products are formed in the tensors' own type.

    As in transformers' grouped implementation: autocast does not reach that one, neither in the forward pass nor in a
    backward pass that is called inside it.
    """
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def combine(module: Any, down: Tensor, top_k_weights: Tensor, routing: Routing | None, like: Tensor) -> Tensor:
    """Weighs the experts' results and sums them for each token.

    Args:
        module: A family's experts.
        down: Results, ``[T * k, D]``.
        top_k_weights: ``[T, k]``.
        routing: How the results are sorted; None: in the order of the weights.
        like: A tensor of the type to return.

    Returns:
        ``[T, D]``.
    """
    if module.has_post_expert_norm:
        down = module.post_expert_norm(down)
    if routing is not None:
        down = routing.unsort(down)
    weighted = down * top_k_weights.reshape(-1, 1)
    summed: Tensor = weighted.reshape(*top_k_weights.shape, down.shape[1]).sum(dim=1)  # [T, D]
    return summed.to(like.dtype)
