"""Low-rank adapters on fused expert parameters, applied to the tokens of each expert.

transformers' own grouped implementation runs unchanged; the adapters' products are added in the functions that it
calls between its own products (the gate, the norm after the experts).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from swarm_plugins.moe import ExpertDelta, Routing
from swarm_plugins.offload.model.experts import OffloadedExperts, run_adapted

__all__ = ["adapted_experts_forward"]


def adapted_experts_forward(module: nn.Module, deltas: Sequence[ExpertDelta]) -> Callable[..., Tensor]:
    """Returns a forward of the experts with adapters on them."""
    if isinstance(module, OffloadedExperts):
        return functools.partial(run_adapted, module, deltas)
    # Quantized experts bring their own grouped implementation.
    run: Callable[..., Tensor] = getattr(module, "grouped_forward", None) or ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        adapted = _AdaptedExperts(module, deltas, hidden_states, top_k_index)
        return run(adapted, hidden_states, top_k_index, top_k_weights)

    return forward


class _AdaptedExperts:
    """Poses as the experts' module for the grouped implementation and adds the adapters' products."""

    has_post_expert_norm = True

    def __init__(
        self, module: nn.Module, deltas: Sequence[ExpertDelta], hidden_states: Tensor, top_k_index: Tensor
    ) -> None:
        self._module = module
        self._deltas = deltas
        self._hidden = hidden_states
        self._routing = Routing(top_k_index, int(module.num_experts))  # type: ignore[arg-type]
        self._down_input: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _apply_gate(self, up: Tensor) -> Tensor:
        return self._between(up, self._module._apply_gate)

    def act_fn(self, up: Tensor) -> Tensor:
        """Replaces the activation of experts without a gate."""
        return self._between(up, self._module.act_fn)

    def post_expert_norm(self, down: Tensor) -> Tensor:
        """Replaces the norm after the experts, where the down projection's result is final."""
        if self._down_input is not None:
            for delta in self._deltas:
                if delta.parameter == "down_proj":
                    down = delta.add(self._down_input, down, self._routing)
        if self._module.has_post_expert_norm:
            down = self._module.post_expert_norm(down)  # type: ignore[operator]
        return down

    def _between(self, up: Tensor, activation: Any) -> Tensor:
        hidden = self._hidden[self._routing.tokens]
        for delta in self._deltas:
            if delta.parameter != "down_proj":
                up = delta.add(hidden, up, self._routing)
        activated: Tensor = activation(up)
        self._down_input = activated
        return activated
