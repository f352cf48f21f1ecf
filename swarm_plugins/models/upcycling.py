"""Upcycling: turns a dense model's MLPs into experts without changing its outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarm_plugins.checkpoint import model_from_tensors
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.models.prmoe.configuration import PRMoEConfig, check_known
from swarm_plugins.models.prmoe.modeling import PRMoEForCausalLM

FAMILIES = ("llama", "mistral", "qwen2")
"""Model types that compute what PR-MoE's dense layers compute."""
_KEPT = (
    "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
    "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "pad_token_id", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "vocab_size",
)  # fmt: skip
_FREE = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
_FROM_WEIGHTS = (set(_KEPT) | {"attention_bias", "mlp_gated", "norm", "position_embedding"}) - set(_FREE)
# Relative to the width: such a router gives every expert about the same weight, yet prefers one.
_FAINT = 0.01


def upcycle(
    dense: PreTrainedModel,
    experts_per_layer: Sequence[int] | int,
    *,
    moe_layers: Sequence[int] | None = None,
    residual: Literal["sum", "learned"] | None = "sum",
    num_experts_per_tok: int = 1,
    noise: float = 0.0,
    seed: int = 0,
    **settings: Any,
) -> PRMoEForCausalLM:
    """Turns a dense causal language model into a mixture of experts (sparse upcycling, Komatsuzaki et al. 2022).

    Routers are initialized at random. Initial outputs of the new model:

    | residual | experts per token | outputs |
    |---|---|---|
    | ``"sum"`` | any | the dense model's: its MLP is the residual branch, experts begin with a second layer of 0 |
    | ``"learned"`` | any | the dense model's: as above, the residual branch doubled, both coefficients one half |
    | None | 2 or more | the dense model's with ``noise=0``: experts are copies, and their weights add up to one |
    | None | 1 | about the dense model's: a fresh router gives each of E experts about 1/E, so they are scaled by E |

    Args:
        dense: A Llama, Mistral without sliding window, or Qwen2; SmolLM is a Llama. It stays as it is.
        experts_per_layer: As in `PRMoEConfig`.
        moe_layers: As in `PRMoEConfig`.
        residual: As in `PRMoEConfig`.
        num_experts_per_tok: As in `PRMoEConfig`.
        noise: Standard deviation of the noise added to each expert's first layer, relative to its weights', to make
            experts differ.
        seed: Seed of routers and noise.
        settings: Further settings of `PRMoEConfig`, such as ``router_aux_loss_coef``.

    Returns:
        A model of the dense one's dtype and generation config, on the CPU, in evaluation mode.

    Raises:
        UnsupportedError: If the dense model is of another family, has a sliding window, or its weights are elsewhere or
            have other names (remote or offloaded layers, adapters, quantization).
        ConfigError: If the settings do not fit together.
    """
    if not 0 <= noise < math.inf:
        raise ConfigError(f"invalid noise {noise}: expected 0 or more, such as 0.01")
    check_known(settings)
    fixed = sorted(_FROM_WEIGHTS & settings.keys())
    if fixed:
        raise ConfigError(
            f"{fixed[0]}={settings[fixed[0]]!r} cannot be chosen: it follows from the dense model, leave it out"
        )
    _check_family(dense)
    source = dense.config
    kept = {name: getattr(source, name) for name in _KEPT if hasattr(source, name)}
    weights = _weights(dense)
    experts = experts_per_layer if isinstance(experts_per_layer, int) else list(experts_per_layer)
    config = PRMoEConfig(
        **{
            **kept,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in weights,
            "experts_per_layer": experts,
            "moe_layers": None if moe_layers is None else list(moe_layers),
            "residual": residual,
            "num_experts_per_tok": num_experts_per_tok,
            **settings,
        }
    )
    if config.moe_intermediate_size != config.intermediate_size:
        raise ConfigError(
            f"moe_intermediate_size {config.moe_intermediate_size} differs from the dense model's intermediate_size "
            f"{config.intermediate_size}: experts are copies of its MLPs, leave it out"
        )
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    model_name = f"{dense.name_or_path or type(dense).__name__}, upcycled"
    scheme = _Scheme(config, noise, torch.Generator().manual_seed(seed))
    tensors = dict(_converted(weights, scheme))
    model = model_from_tensors(PRMoEForCausalLM, config, tensors, dense.dtype, model_name)
    model.generation_config = copy.deepcopy(dense.generation_config)
    return cast(PRMoEForCausalLM, model)


class _Scheme(NamedTuple):
    """Makes the sparse MLP of a layer from a dense one."""

    config: PRMoEConfig
    noise: float
    generator: torch.Generator

    def sparse_mlp(self, dense: dict[str, Tensor], num_experts: int) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of a `PRMoESparseMoeBlock`; ``dense`` has those of an MLP by name."""
        down = dense["down_proj.weight"]  # [D, F]
        width, residual = down.shape[0], self.config.residual
        is_alone = residual is None and self.config.num_experts_per_tok == 1
        std = _FAINT * width**-0.5 if is_alone else self.config.initializer_range
        yield "gate.weight", self._random((num_experts, width), std, down)
        first = torch.cat([dense["gate_proj.weight"], dense["up_proj.weight"]])  # [2F, D]
        firsts = first.expand(num_experts, -1, -1)
        if self.noise:
            firsts = firsts + self._random(firsts.shape, self.noise * float(first.std()), down)
        yield "experts.gate_up_proj", firsts.clone(memory_format=torch.contiguous_format)
        scale = 0.0 if residual is not None else float(num_experts) if is_alone else 1.0
        yield "experts.down_proj", (down * scale).repeat(num_experts, 1, 1)
        if self.config.mlp_bias:
            first_bias = torch.cat([dense["gate_proj.bias"], dense["up_proj.bias"]])
            yield "experts.gate_up_proj_bias", first_bias.repeat(num_experts, 1)
            yield "experts.down_proj_bias", (dense["down_proj.bias"] * scale).repeat(num_experts, 1)
        if residual is None:
            return
        for name, tensor in dense.items():
            is_doubled = residual == "learned" and name.startswith("down_proj.")
            yield f"residual_mlp.{name}", tensor * 2 if is_doubled else tensor.clone()
        if residual == "learned":
            yield "residual_coefficient.weight", down.new_zeros(2, width)
            yield "residual_coefficient.bias", down.new_zeros(2)

    def _random(self, shape: Sequence[int], std: float, like: Tensor) -> Tensor:
        return (torch.randn(tuple(shape), generator=self.generator) * std).to(like.dtype)


def _converted(weights: dict[str, Tensor], scheme: _Scheme) -> Iterator[tuple[str, Tensor]]:
    """Yields the mixture's tensors by name."""
    pools = dict(enumerate(scheme.config.experts_per_layer))  # type: ignore[arg-type]  # a list by now
    mlps: dict[int, dict[str, Tensor]] = {layer: {} for layer, num_experts in pools.items() if num_experts}
    for name, tensor in weights.items():
        parts = name.split(".", 4)  # model, layers, 3, mlp, the rest
        layer = int(parts[2]) if len(parts) == 5 and parts[2].isdigit() and parts[3] == "mlp" else -1
        if layer in mlps:
            mlps[layer][parts[4]] = tensor
        else:
            yield name, tensor.clone()
    for layer, dense in mlps.items():
        for name, tensor in scheme.sparse_mlp(dense, pools[layer]):
            yield f"model.layers.{layer}.mlp.{name}", tensor
    if scheme.config.attention_bias:
        # Qwen2 has none here; zeros are the same function.
        for layer in pools:
            name = f"model.layers.{layer}.self_attn.o_proj"
            if f"{name}.bias" not in weights:
                yield f"{name}.bias", weights[f"{name}.weight"].new_zeros(scheme.config.hidden_size)


def _check_family(dense: PreTrainedModel) -> None:
    config: Any = getattr(dense, "config", None)
    kind = getattr(config, "model_type", None)
    is_known = isinstance(dense, PreTrainedModel) and kind in FAMILIES
    if not is_known or dense.get_output_embeddings() is None:
        raise UnsupportedError(
            f"cannot upcycle {type(dense).__name__} (model_type {kind!r}): expected a causal language "
            f"model of {', '.join(FAMILIES)}; of a PEFT model, merge_and_unload() returns one"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise UnsupportedError(
            f"cannot upcycle {type(dense).__name__} with sliding_window {window} below its "
            f"{config.max_position_embeddings} positions: PR-MoE attends to all; set config.sliding_window = None if "
            "inputs are shorter"
        )


def _weights(dense: PreTrainedModel) -> dict[str, Tensor]:
    weights = dense.state_dict()
    with torch.device("meta"):
        usual = type(dense)(dense.config).state_dict()
    odd = sorted(weights.keys() ^ usual.keys()) or [name for name, tensor in weights.items() if tensor.is_meta]
    if odd:
        raise UnsupportedError(
            f"cannot upcycle {type(dense).__name__}: {len(odd)} of its weights are not where it should have them, such "
            f"as {odd[0]}; merge adapters, and load it whole, without quantization or offloading"
        )
    return {name: tensor.detach().cpu() for name, tensor in weights.items()}
