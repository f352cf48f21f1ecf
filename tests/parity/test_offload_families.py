"""More families of transformers' experts interface, by one config that all of them understand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from offload_models import tokens
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swarm_plugins import OffloadConfig, load_offloaded

FAMILIES = (
    "afmoe", "cohere2_moe", "deepseek_v4", "dots1", "exaone_moe", "flex_olmo", "granitemoe_swa", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3", "laguna", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "qwen3_5_moe_text",
    "qwen3_next", "solar_open",
)  # fmt: skip
SETTINGS: dict[str, int] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_topk": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1, "sliding_window": 16,
    "n_shared_experts": 1, "num_shared_experts": 1, "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24, "q_lora_rank": 16, "qk_rope_head_dim": 8, "index_head_dim": 8, "index_n_heads": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_an_offloaded_model_gives_the_logits_of_the_model_in_memory(family: str, tmp_path: Path) -> None:
    known = AutoConfig.for_model(family)
    config = AutoConfig.for_model(family, **{name: one for name, one in SETTINGS.items() if hasattr(known, name)})
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        local = build(config, dtype=torch.float32).eval()
    local.save_pretrained(tmp_path)
    few = load_offloaded(tmp_path, OffloadConfig(fast_bytes=60_000), device="cpu")
    with torch.no_grad():
        expected, found = local(tokens()).logits, few(tokens()).logits
    assert few.offload_stats().bytes_read > 0
    # Products of the same numbers, some in another order; HF's initial values give logits of about 0.1.
    assert (found - expected).abs().max() < 1e-6
