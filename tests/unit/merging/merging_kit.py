"""Tiny bases and adapters to merge, and what PEFT makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from swarm_plugins.testing.models import tiny_model

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj", "v_proj", "o_proj"]}


def save_base(
    folder: Path, family: str = "llama", *, dtype: torch.dtype = torch.bfloat16, num_layers: int = 2, **settings: Any
) -> Path:
    """Saves a tiny model in several shards."""
    model = tiny_model(family, num_layers=num_layers)
    for name, value in settings.items():
        setattr(model.config, name, value)
    model.tie_weights()
    model.to(dtype).save_pretrained(folder, max_shard_size="20KB")
    return folder


def load(folder: Path, dtype: torch.dtype | str = "auto") -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def save_adapter(folder: Path, base: Path, config: PeftConfig | None = None, *, scale: float = 0.2) -> Path:
    """Saves an adapter with random numbers, also in modules that PEFT saves whole."""
    torch.manual_seed(1)
    model = get_peft_model(load(base), config or LoraConfig(**LORA))
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.requires_grad and "lora_magnitude" not in name:
                one.add_(torch.randn_like(one) * scale)
    model.save_pretrained(folder)
    return folder


def merged_by_peft(base: Path, adapter: Path, dtype: torch.dtype | str = "auto") -> dict[str, Tensor]:
    model: Any = PeftModel.from_pretrained(load(base, dtype), adapter)
    whole: nn.Module = model.merge_and_unload()
    return whole.state_dict()
