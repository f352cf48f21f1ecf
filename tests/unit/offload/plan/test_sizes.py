"""What is found out without weights is what the model with weights has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.moe import is_fused_experts
from swarm_plugins.offload.plan.sizes import model_sizes
from swarm_plugins.testing.models import save_tiny, tiny_model

CONTEXT = 24
FAMILIES = ["mixtral", "mixtral_sliding", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "glm4_moe"]


def expert_bytes(model: PreTrainedModel) -> int:
    experts = [module for module in model.modules() if is_fused_experts(module)]
    return sum(parameter.nbytes for module in experts for parameter in module.parameters())


def cache_bytes(model: PreTrainedModel) -> int:
    ids = torch.ones((1, CONTEXT), dtype=torch.long)
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    tensors = [(layer.keys, layer.values) for layer in cache.layers]
    return sum(keys.nbytes + values.nbytes for keys, values in tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path, num_layers=2)
    model = tiny_model(family, num_layers=2)
    sizes = model_sizes(Checkpoint.open(tmp_path), context_tokens=CONTEXT)
    everything = sum(parameter.nbytes for parameter in model.parameters())
    assert sizes.expert_bytes == expert_bytes(model)
    assert sizes.other_bytes == everything - expert_bytes(model)
    assert sizes.cache_bytes == cache_bytes(model)
    assert sizes.num_layers == 2
    assert {(layer.num_experts, layer.experts_per_token) for layer in sizes.layers} == {(4, 2)}
    assert sizes.token_bytes == sizes.expert_bytes // 2
    assert sizes.dtype == torch.float32


def test_layers_without_experts_are_left_out(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path, num_layers=3)
    assert [layer.layer for layer in model_sizes(Checkpoint.open(tmp_path)).layers] == [1, 2]
