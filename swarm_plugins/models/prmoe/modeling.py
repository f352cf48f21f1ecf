"""PR-MoE as transformers models: Llama's decoder whose MLPs are experts with a dense MLP next to them.

DeepSpeed-MoE (Rajbhandari et al. 2022), section 4.1: more experts in deeper layers (pyramid), and every token passes
through a dense MLP plus one chosen expert (residual). Letters: B batch, S positions, T = B S tokens, D width,
F neurons, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, initialization
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.integrations.moe import use_experts_implementation
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from swarm_plugins.errors import ConfigError
from swarm_plugins.models.prmoe.configuration import PRMoEConfig
from swarm_plugins.moe.gating import top_k_gate, within_capacity
from swarm_plugins.moe.losses import load_balancing_loss


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
    """Chooses experts: `swarm_plugins.moe.gating`, with the layer's own number of them."""

    def __init__(self, config: PRMoEConfig, num_experts: int) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_experts = num_experts
        self.capacity_factor = config.capacity_factor
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits ``[T, E]``, weights in float32 ``[T, k]`` and indices ``[T, k]``.

        A token that its expert has no room for keeps its index and gets weight 0.
        """
        logits = functional.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)
        weights, index = top_k_gate(logits, self.top_k)
        if self.capacity_factor is not None:
            weights = weights * within_capacity(index, self.num_experts, self.capacity_factor)
        return logits, weights, index


class PRMoESparseMoeBlock(nn.Module):
    """Experts of a layer and the dense MLP that every token passes through."""

    def __init__(self, config: PRMoEConfig, num_experts: int) -> None:
        super().__init__()
        self.gate = PRMoETopKRouter(config, num_experts)
        self.experts = PRMoEExperts(config, num_experts)
        self.experts.has_gate, self.experts.has_bias = config.mlp_gated, config.mlp_bias
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


class PRMoENoRotation(nn.Module):
    """Takes the place of rotary positions where positions are learned: turns nothing."""

    def __init__(self, config: PRMoEConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim or 0  # which the config has filled in

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of zero, ``[B, S, head_dim]`` each."""
        zeros = hidden_states.new_zeros(*position_ids.shape, self.head_dim)
        return zeros.cos(), zeros


def _norm(config: PRMoEConfig) -> nn.Module:
    kind = LlamaRMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.rms_norm_eps)


class PRMoEDecoderLayer(LlamaDecoderLayer):
    """Llama's decoder layer with a dense or a sparse MLP."""

    def __init__(self, config: PRMoEConfig, layer_idx: int) -> None:
        # Not Llama's own, which would make an MLP to be thrown away.
        GradientCheckpointingLayer.__init__(self)
        num_experts = config.experts_per_layer[layer_idx]  # type: ignore[index]  # a list by now
        self.hidden_size = config.hidden_size
        self.self_attn = LlamaAttention(config, layer_idx)  # type: ignore[arg-type]  # has all that a Llama's has
        self.mlp = PRMoESparseMoeBlock(config, num_experts) if num_experts else PRMoEMLP(config)  # type: ignore[assignment]
        self.input_layernorm = _norm(config)  # type: ignore[assignment]
        self.post_attention_layernorm = _norm(config)  # type: ignore[assignment]
        self.position_embedding = None
        if config.position_embedding == "learned" and layer_idx == 0:
            self.position_embedding = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(  # type: ignore[override]  # the rest is Llama's business
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, position_ids: Any = None, **kwargs: Any
    ) -> Tensor:
        """Takes and returns ``[B, S, D]``.

        Learned positions are added here, not next to the tokens' embeddings: prompts that are given as embeddings get
        them too, and a part of the layers that runs elsewhere adds them once.

        Raises:
            ConfigError: If there are more positions than learned.
        """
        if self.position_embedding is not None:
            known = self.position_embedding.num_embeddings
            if position_ids.device.type == "cpu" and position_ids.numel() and int(position_ids.max()) >= known:
                raise ConfigError(
                    f"position {int(position_ids.max())} is beyond the {known} learned ones: shorten the input to "
                    f"{known} tokens"
                )
            hidden_states = hidden_states + self.position_embedding(position_ids)
        return super().forward(hidden_states, attention_mask, position_ids, **kwargs)


class PRMoEPreTrainedModel(PreTrainedModel):
    """What all PR-MoE models share: initial weights, and what transformers may do with them."""

    config: PRMoEConfig
    config_class = PRMoEConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["PRMoEDecoderLayer"]  # noqa: RUF012  # transformers' declarations
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(PRMoETopKRouter, index=0),
        "hidden_states": PRMoEDecoderLayer,
        "attentions": LlamaAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PRMoEExperts | PRMoETopKRouter):
            for name, parameter in module.named_parameters(recurse=False):
                if name.endswith("_bias"):
                    initialization.zeros_(parameter)
                else:
                    initialization.normal_(parameter, mean=0.0, std=self.config.initializer_range)


class PRMoEModel(PRMoEPreTrainedModel):
    """The decoder without a head."""

    def __init__(self, config: PRMoEConfig) -> None:
        super().__init__(config)
        if len(config.experts_per_layer) != config.num_hidden_layers:  # type: ignore[arg-type]  # a list by now
            raise ConfigError(
                f"experts_per_layer {config.experts_per_layer} does not fit {config.num_hidden_layers} layers: give "
                "one entry per layer, 0 for a dense one"
            )
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        layers = (PRMoEDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = _norm(config)
        self.rotary_emb: nn.Module = PRMoENoRotation(config)
        if config.position_embedding == "rotary":
            self.rotary_emb = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """Runs the decoder on tokens ``[B, S]`` or their embeddings ``[B, S, D]``.

        Raises:
            ValueError: If both or neither of them are given.
            ConfigError: If there is no token.
            NumericError: If router logits are NaN or infinite.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if not inputs_embeds.numel():
            raise ConfigError(f"the batch is empty (shape {list(inputs_embeds.shape[:2])}): give at least one token")
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **kwargs,
            )
        return MoeModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class PRMoEForCausalLM(PRMoEPreTrainedModel, GenerationMixin):
    """The decoder with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: PRMoEConfig) -> None:
        super().__init__(config)
        self.model = PRMoEModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Returns logits, with labels also the loss of the next tokens.

        While routers are trained, the loss contains the load-balancing loss, the sum over the layers times
        ``router_aux_loss_coef``; ``aux_loss`` is that sum.
        """
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits or (labels is not None and self._trains_routers())
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = aux_loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        if output_router_logits and outputs.router_logits:
            aux_loss = self._balance(outputs.router_logits, attention_mask)
            if loss is not None:
                loss = loss + self.config.router_aux_loss_coef * aux_loss.to(loss.device)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )

    def _balance(self, router_logits: tuple[Tensor, ...], attention_mask: Tensor | None) -> Tensor:
        """Returns the sum of the layers' load-balancing losses; layers may lie on different devices."""
        mask = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None
        picks, home = self.config.num_experts_per_tok, router_logits[0].device
        return torch.stack([load_balancing_loss(one, picks, mask).to(home) for one in router_logits]).sum()

    def _trains_routers(self) -> bool:
        """Returns whether a load-balancing loss would teach a router: not if an adapter is trained over frozen ones."""
        if not self.training or not self.config.router_aux_loss_coef:
            return False
        return any(one.weight.requires_grad for one in self.modules() if isinstance(one, PRMoETopKRouter))


class PRMoEForSequenceClassification(GenericForSequenceClassification, PRMoEPreTrainedModel):
    """The decoder with a head that classifies by the last token."""


# Runs when the first PRMoEConfig is made.
AutoModel.register(PRMoEConfig, PRMoEModel, exist_ok=True)
AutoModelForCausalLM.register(PRMoEConfig, PRMoEForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(PRMoEConfig, PRMoEForSequenceClassification, exist_ok=True)
