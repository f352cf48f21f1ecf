"""A fresh LoRA on a model, by kinds of modules instead of their names."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from swarm_plugins.backbone.twin import twin
from swarm_plugins.checkpoint import layer_list_name
from swarm_plugins.errors import ConfigError
from swarm_plugins.moe import EXPERT_PARAMETERS, is_fused_experts
from swarm_plugins.noise import without_peft_deprecation

MAX_RANK = 256
_ALPHA = 32
"""At any rank, as the protocol has it: a learning rate fits all ranks (LoRA Without Regret, Schulman et al. 2025)."""
_ATTENTION = ("attn", "attention", "mixer")
_ROUTERS = ("router", "gate", "shared_expert_gate")


def new_lora(
    base: Any, *, rank: int, seed: int | None = None, attention: bool = True, mlp: bool = True, unembed: bool = True
) -> PeftModel:
    """Returns a model with a fresh LoRA that shares the weights of ``base``, which stays as it is.

    Args:
        base: A causal language model.
        rank: Rank of every product.
        seed: Of the factors' random start. None: another one each time.
        attention: Adapt the linear layers of attention, and of what stands in its place.
        mlp: Adapt the MLPs, experts among them.
        unembed: Adapt the output layer.

    Raises:
        ConfigError: If the rank is out of bounds, or nothing would be trained.
    """
    if not 1 <= rank <= MAX_RANK:
        raise ConfigError(f"a LoRA of rank {rank} cannot be trained here: 1 to {MAX_RANK} are possible")
    modules, parameters = _targets(base, attention=attention, mlp=mlp, unembed=unembed)
    if not modules and not parameters:
        raise ConfigError("no module would be trained: choose at least one of attention, MLPs and the output layer")
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=_ALPHA,
        target_modules=modules,
        target_parameters=parameters or None,
    )
    with torch.random.fork_rng(devices=[]), without_peft_deprecation():
        if seed is None:
            torch.seed()
        else:
            torch.manual_seed(seed)
        model = get_peft_model(twin(base), config)
    if not isinstance(model, PeftModel):
        raise TypeError(f"PEFT returned {type(model).__name__}")
    return model.eval()


def _targets(base: Any, *, attention: bool, mlp: bool, unembed: bool) -> tuple[list[str], list[str]]:
    """Returns the names of linear layers, and of experts' parameters."""
    layers = f"{layer_list_name(base)}."
    head = base.get_output_embeddings()
    modules, parameters = [], []
    for path, module in base.named_modules():
        if module is head:
            modules += [path] if unembed else []
        elif path.startswith(layers) and (attention if _is_attention(path) else mlp):
            if is_fused_experts(module):
                parameters += [f"{path}.{name}" for name in EXPERT_PARAMETERS if hasattr(module, name)]
            elif isinstance(module, nn.Linear) and path.rpartition(".")[2] not in _ROUTERS:
                modules.append(path)
    return modules, parameters


def _is_attention(path: str) -> bool:
    return any(word in part for part in path.split(".") for word in _ATTENTION)
