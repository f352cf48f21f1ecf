"""What is found out without weights about sessions is what servers and the loaded model keep of them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from type_models import save_type

from swarm_plugins.block_io import kept_by_window
from swarm_plugins.blocks.load import load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.outline import meta_model
from swarm_plugins.checkpoint.partition import num_blocks_of
from swarm_plugins.offload.plan.sessions import session_sizes
from swarm_plugins.offload.plan.sizes import model_sizes

# Of nemotron_h, one block of four attends, one keeps states, and two keep nothing.
HYBRIDS = ("qwen3_5_moe_text", "nemotron_h")
WITH_EXPERTS = (*HYBRIDS, "deepseek_v32")
WITHOUT = ("llama", "gemma2", "mistral", "mamba2", "falcon_h1")


@pytest.mark.parametrize("model_type", [*WITH_EXPERTS, *WITHOUT])
def test_a_session_takes_what_a_loaded_span_says(model_type: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_type(model_type, tmp_path))
    if model_type in WITH_EXPERTS:
        found = model_sizes(checkpoint, context_tokens=24).session
    else:
        found = session_sizes(meta_model(checkpoint.config, torch.float32))
    blocks = range(num_blocks_of(checkpoint.config))
    for kv_bits in (None, 8):
        with closing(load_span(checkpoint, blocks, kv_bits=kv_bits)) as span:
            on_server = span.spec.session_bytes(blocks)
        coded = kv_bits is not None
        whole = found.coded_token_bytes if coded else found.token_bytes
        of_window = found.coded_window_token_bytes if coded else found.window_token_bytes
        kept = kept_by_window(found.window) if found.window else 0
        assert on_server[:4] == (whole - of_window, of_window, kept, found.row_bytes)
    assert (found.window > 0) == (model_type in {"gemma2", "mistral"})
    assert (found.row_bytes > 0) == (model_type in {*HYBRIDS, "mamba2", "falcon_h1"})


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_the_cache_here_has_keys_and_values_of_some_layers_and_one_set_of_states(
    model_type: str, tmp_path: Path
) -> None:
    tokens = 24
    sizes = model_sizes(Checkpoint.open(save_type(model_type, tmp_path)), context_tokens=tokens)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        cache = model(input_ids=torch.ones((1, tokens), dtype=torch.long), use_cache=True).past_key_values
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            tensors += getattr(layer, name, {}).values()
    assert sizes.cache_bytes == sum(tensor.nbytes for tensor in tensors if tensor is not None)
    assert sizes.cache_bytes == tokens * sizes.session.token_bytes + sizes.session.row_bytes // 2
