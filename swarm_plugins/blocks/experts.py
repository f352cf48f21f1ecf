"""Low-rank adapters on fused expert parameters, applied to the tokens of each expert.

transformers' own grouped implementation runs on the experts unchanged; what it calls between its products (the gate,
the norm behind the experts) is where the adapters' products are added. PEFT's layouts: ``A`` is
``[rank * E, in]`` with the expert outermost, ``B`` is ``[out, rank * E]`` with the expert innermost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

__all__ = ["EXPERT_PARAMETERS", "ExpertDelta", "Routing", "adapted_experts_forward", "is_fused_experts"]

EXPERT_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
"""Parameters of fused experts that LoRA can be on."""


@dataclass(frozen=True)
class ExpertDelta:
    """A low-rank product on one fused parameter."""

    parameter: str
    num_experts: int
    factor_a: Tensor
    """``[rank * E, in]``."""
    factor_b: Tensor
    """``[out, rank * E]``."""
    scaling: float
    index: Callable[[int], Tensor | None]
    """Returns which of so many tokens it applies to, None for all."""

    def add(self, hidden: Tensor, result: Tensor, routing: Routing) -> Tensor:
        """Adds the product to the rows of an expert-sorted result.

        Args:
            hidden: Input of the experts' product, ``[T * k, in]``, sorted by expert.
            result: Its output, ``[T * k, out]``.
            routing: Which token and expert each row belongs to.
        """
        # Unbound once: slicing an expert at a time would make a full-size gradient for each.
        factors_a = self.factor_a.to(hidden.dtype).reshape(self.num_experts, -1, self.factor_a.shape[1]).unbind(0)
        factors_b = self.factor_b.to(hidden.dtype).reshape(self.factor_b.shape[0], -1, self.num_experts).unbind(2)
        index, counts = routing.rows_of(self.index(routing.num_tokens))
        if index is not None:
            hidden = hidden[index]
        pieces = [
            functional.linear(functional.linear(rows, factors_a[expert]), factors_b[expert])
            for expert, rows in enumerate(hidden.split(counts))
            if rows.shape[0]
        ]
        if not pieces:
            return result
        delta = torch.cat(pieces) * self.scaling
        return result + delta if index is None else result.index_add(0, index, delta)


class Routing:
    """Which token and which expert each row of an expert-sorted tensor belongs to.

    Args:
        top_k_index: Chosen experts, ``[T, k]``.
        num_experts: ``E``; larger indices mean an expert that lives elsewhere.
    """

    def __init__(self, top_k_index: Tensor, num_experts: int) -> None:
        self.num_tokens, num_chosen = top_k_index.shape
        # The same call on the same values as in the grouped implementation, hence the same order.
        self.experts, self.order = torch.sort(top_k_index.reshape(-1))
        self.tokens = self.order // num_chosen
        self._num_experts = num_experts

    def rows_of(self, tokens: Tensor | None) -> tuple[Tensor | None, list[int]]:
        """Returns the sorted rows of some tokens (None: of all) and how many belong to each expert."""
        experts, index = self.experts, None
        if tokens is not None:
            is_wanted = torch.zeros(self.num_tokens, dtype=torch.bool, device=experts.device)
            is_wanted[tokens] = True
            index = is_wanted[self.tokens].nonzero().squeeze(1)
            experts = experts[index]
        counts: list[int] = torch.bincount(experts, minlength=self._num_experts).tolist()
        return index, counts


def is_fused_experts(module: nn.Module) -> bool:
    """Says whether a module runs experts from fused parameters through transformers' registry."""
    return all(
        hasattr(module, name) for name in ("has_gate", "is_transposed", "has_bias", "_apply_gate", "num_experts")
    )


def adapted_experts_forward(module: nn.Module, deltas: Sequence[ExpertDelta]) -> Callable[..., Tensor]:
    """Returns a forward of the experts with adapters on them."""
    # Quantized experts bring their own grouped implementation.
    run: Callable[..., Tensor] = getattr(module, "grouped_forward", None) or ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        adapted = _AdaptedExperts(module, deltas, hidden_states, top_k_index)
        return run(adapted, hidden_states, top_k_index, top_k_weights)

    return forward


class _AdaptedExperts:
    """What the grouped implementation takes for the experts' module: the module, with the products added on the way."""

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
        """Stands for the activation of experts without a gate."""
        return self._between(up, self._module.act_fn)

    def post_expert_norm(self, down: Tensor) -> Tensor:
        """Stands for the norm behind the experts: the place where the down projection's result is final."""
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
