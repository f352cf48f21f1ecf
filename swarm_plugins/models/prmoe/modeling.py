"""PR-MoE as transformers models: a Llama decoder with MoE layers and residual MLPs.

DeepSpeed-MoE (Rajbhandari et al. 2022), section 4.1: more experts in deeper layers (pyramid), and every token passes
through a dense MLP plus one chosen expert (residual). Letters: B batch, S positions, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, initialization
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
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
from swarm_plugins.models.prmoe.mlp import PRMoEExperts, PRMoEMLP, PRMoESparseMoeBlock, PRMoETopKRouter
from swarm_plugins.moe.losses import load_balancing_loss


class PRMoENoRotation(nn.Module):
    """Rotary embedding of angle zero, for models with learned positions."""

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
    """Base class: initial weights, and which features of transformers apply."""

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

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers looks for its decorator in the file of the model; the experts are in mlp.py.
        return True

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
    """PR-MoE decoder without a head."""

    def __init__(self, config: PRMoEConfig) -> None:
        super().__init__(config)
        # Settings may have been changed since, by from_pretrained(..., experts_per_layer=...) too.
        config.check_experts()
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
    """PR-MoE decoder with a language-model head."""

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
        ``router_aux_loss_coef``; ``aux_loss`` is that sum. With ``num_items_in_batch``, the labels of all batches of an
        accumulated step, each batch counts by its share of them.
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
            if self._trains_routers() and torch.is_grad_enabled() and not aux_loss.requires_grad:
                raise ConfigError(
                    "the load-balancing loss has no gradient: gradient checkpointing with use_reentrant=True computes "
                    "router logits without one; enable it with {'use_reentrant': False}, or set router_aux_loss_coef=0"
                )
            if loss is not None:
                share = _share_of_step(labels, kwargs.get("num_items_in_batch"))
                loss = loss + self.config.router_aux_loss_coef * share * aux_loss.to(loss.device)
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
        picks, home = self.config.num_experts_per_tok, router_logits[0].device
        mask = None
        if attention_mask is not None and attention_mask.ndim == 2:
            # It begins with the tokens in the cache, or those of a prefix.
            mask = attention_mask[:, -(len(router_logits[0]) // len(attention_mask)) :]
        return torch.stack([load_balancing_loss(one, picks, mask).to(home) for one in router_logits]).sum()

    def _trains_routers(self) -> bool:
        """Returns whether a router is trained, so that a load-balancing loss has an effect."""
        if not self.training or not self.config.router_aux_loss_coef:
            return False
        # Adapters count: they freeze the router's own weight.
        gates = [one.gate for one in self.modules() if isinstance(one, PRMoESparseMoeBlock)]
        return any(parameter.requires_grad for gate in gates for parameter in gate.parameters())


def _share_of_step(labels: Tensor | None, num_items: Tensor | int | None) -> Tensor | float:
    """Returns the share of a batch in the labels of a step; the losses of its batches are summed by the Trainer."""
    if labels is None or num_items is None:
        return 1.0
    return (labels[..., 1:] != -100).sum() / num_items


class PRMoEForSequenceClassification(GenericForSequenceClassification, PRMoEPreTrainedModel):
    """PR-MoE decoder with a classification head on the last token."""


# Runs when the first PRMoEConfig is made.
AutoModel.register(PRMoEConfig, PRMoEModel, exist_ok=True)
AutoModelForCausalLM.register(PRMoEConfig, PRMoEForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(PRMoEConfig, PRMoEForSequenceClassification, exist_ok=True)
