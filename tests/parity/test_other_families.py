"""No family has code of its own: those outside the main matrix work too, or are refused when they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from generation_modes import MODES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny

IDS = torch.tensor([[5, 17, 99, 23, 64, 9, 88]])
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SOME_MODES = ("greedy_padded", "beam_padded", "prompt_lookup", "prefill_in_chunks", "without_cache")


def save_other(model_type: str, directory: Path, **settings: object) -> Path:
    """Writes a toy of a family that the test kit does not have."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # A larger spread than HF's 0.02: a toy near the identity would hide a skipped layer.
        config = AutoConfig.for_model(model_type, **{**SIZES, "initializer_range": 0.2, **settings})
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "save",
    [
        pytest.param(lambda path: save_tiny("glm4_moe", path), id="glm4_moe"),
        pytest.param(lambda path: save_tiny("phimoe", path), id="phimoe"),
        pytest.param(lambda path: save_tiny("gemma2", path), id="gemma2"),
        pytest.param(lambda path: save_tiny("prmoe", path), id="prmoe"),
        pytest.param(lambda path: save_other("gpt_neox", path), id="gpt_neox"),  # calls its cache `layer_past`
        pytest.param(lambda path: save_other("phi", path), id="phi"),
        pytest.param(lambda path: save_other("olmo", path), id="olmo"),  # norms without weights
        pytest.param(lambda path: save_other("cohere", path, num_key_value_heads=2), id="cohere"),
        # Biases of attention by the number of padding tokens; a norm behind the embeddings.
        pytest.param(lambda path: save_other("bloom", path, n_layer=4, n_head=4), id="bloom"),
        pytest.param(lambda path: save_other("falcon", path), id="falcon"),  # masks of its own
        # Positions are added to the embeddings.
        pytest.param(lambda path: save_other("gpt2", path, n_inner=48), id="gpt2"),
        pytest.param(lambda path: save_other("opt", path, ffn_dim=48, word_embed_proj_dim=24), id="opt"),
    ],
)
def test_other_families_say_what_local_says(save: Callable[[Path], Path], tmp_path: Path) -> None:
    directory = save(tmp_path)
    local = AutoModelForCausalLM.from_pretrained(directory).eval()
    with InProcessSwarm(directory) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        for name in SOME_MODES:
            assert MODES[name](remote, remote) == MODES[name](local, local), name
        gradients = [gradient(model) for model in (remote, local)]
    # Another attention kernel or order of sums: about 1e-6 of the largest entry.
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5 * float(gradients[1].abs().max()))


def gradient(model: PreTrainedModel) -> torch.Tensor:
    width = model.get_input_embeddings().weight.shape[1]
    embedded = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0)).requires_grad_()
    model(inputs_embeds=embedded, use_cache=False).logits.square().mean().backward()
    return embedded.grad
