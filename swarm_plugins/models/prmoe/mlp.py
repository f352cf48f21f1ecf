"""MLPs of PR-MoE's layers: dense, and experts with a residual MLP.

Every token passes through the dense MLP plus its chosen experts (DeepSpeed-MoE, Rajbhandari et al. 2022, section
4.1.2). Letters: B batch, S positions, T = B S tokens, D width, F neurons, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from swarm_plugins.models.prmoe.configuration import PRMoEConfig
from swarm_plugins.moe.gating import top_k_gate, within_capacity


class PRMoEMLP(nn.Module):
    """A dense MLP, gated or not: the whole of a dense layer, or the residual branch of a sparse one."""

    def __init__(self, config: PRMoEConfig) -> None:
        super().__init__()
        self.gate_proj = None
        if config.mlp_gated:
            self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Takes and returns ``[..., D]``."""
        up = self.up_proj(hidden_states)
        inner = self.act_fn(up) if self.gate_proj is None else self.act_fn(self.gate_proj(hidden_states)) * up
        down: Tensor = self.down_proj(inner)
        return down


@use_experts_implementation
class PRMoEExperts(nn.Module):
    """All experts of a layer as three-dimensional parameters, run by ``config._experts_implementation``."""

    # Set by the decorator.
    has_gate: bool
    has_bias: bool
    _is_expert_parallel: bool
    _apply_gate: Callable[[Tensor], Tensor]

    def __init__(self, config: PRMoEConfig, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size or config.intermediate_size
        self.up_name = "gate_up_proj" if config.mlp_gated else "up_proj"
        rows = 2 * self.intermediate_dim if config.mlp_gated else self.intermediate_dim
        shapes = {self.up_name: (rows, self.hidden_dim), "down_proj": (self.hidden_dim, self.intermediate_dim)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, *shape)))
            if config.mlp_bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(num_experts, shape[0])))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the chosen experts one after another: transformers' ``eager`` implementation.

        Args:
            hidden_states: ``[T, D]``.
            top_k_index: ``[T, k]``; indices of ``num_experts`` mean an expert elsewhere.
            top_k_weights: ``[T, k]``.

        Returns:
            ``[T, D]``.
        """
        summed = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:
                continue
            tokens, choices = torch.where(top_k_index == expert)
            inner = self._linear(self.up_name, expert, hidden_states[tokens])
            inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
            rows = self._linear("down_proj", expert, inner) * top_k_weights[tokens, choices, None]
            summed.index_add_(0, tokens, rows.to(summed.dtype))
        return summed

    def _linear(self, name: str, expert: int, rows: Tensor) -> Tensor:
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
        return functional.linear(rows, getattr(self, name)[expert], bias)


class PRMoETopKRouter(nn.Module):
    """Top-k router over the layer's own number of experts; see `swarm_plugins.moe.gating`."""

    def __init__(self, config: PRMoEConfig, num_experts: int) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_experts = num_experts
        self.capacity_factor = config.capacity_factor
        self.min_capacity = config.min_capacity
        self.random_token_selection = config.random_token_selection
        self.jitter_noise = config.router_jitter_noise
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits ``[T, E]``, weights in float32 ``[T, k]`` and indices ``[T, k]``.

        A choice that its expert has no room for gets weight 0 and the index of no expert, ``E``: it is neither sent nor
        computed. Only training is random.
        """
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.training and self.jitter_noise:
            hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(
                1 - self.jitter_noise, 1 + self.jitter_noise
            )
        logits = functional.linear(hidden_states, self.weight)
        weights, index = top_k_gate(logits, self.top_k)
        if self.capacity_factor is not None:
            kept = within_capacity(
                index,
                self.num_experts,
                self.capacity_factor,
                least=self.min_capacity,
                is_random=self.training and self.random_token_selection,
            )
            weights, index = weights * kept, index.masked_fill(~kept, self.num_experts)
        return logits, weights, index


class PRMoESparseMoeBlock(nn.Module):
    """MoE layer: routed experts, and the residual MLP that every token passes through."""

    def __init__(self, config: PRMoEConfig, num_experts: int) -> None:
        super().__init__()
        self.config = config
        self.gate = PRMoETopKRouter(config, num_experts)
        self.experts = PRMoEExperts(config, num_experts)
        self.experts.has_gate, self.experts.has_bias = config.mlp_gated, config.mlp_bias
        # Tells transformers' implementations that indices past the last mean no expert: without, the rows of dropped
        # choices are memory that nobody wrote, and weight 0 does not make a NaN one.
        self.experts._is_expert_parallel = config.capacity_factor is not None
        self.residual_mlp = None if config.residual is None else PRMoEMLP(config)
        self.residual_coefficient = nn.Linear(config.hidden_size, 2) if config.residual == "learned" else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Takes and returns ``[B, S, D]``."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])  # [T, D]
        _, weights, index = self.gate(flat)
        output: Tensor = self.experts(flat, index, weights)
        if self.residual_mlp is not None:
            dense = self.residual_mlp(flat)
            if self.residual_coefficient is not None:
                shares = self.residual_coefficient(flat).softmax(dim=-1)  # [T, 2]
                output, dense = output * shares[:, :1], dense * shares[:, 1:]
            output = output + dense
        return output.reshape(hidden_states.shape)
