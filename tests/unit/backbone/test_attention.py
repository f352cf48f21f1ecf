"""The attention of models with remote blocks is refused to models that compute their blocks here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralForCausalLM

from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.backbone.attention import _attend, register_attention
from swarm_plugins.errors import UnsupportedError

IDS = torch.tensor([[5, 17, 99, 23]])
REFUSED = r"would be loaded here as a whole, with the attention 'swarm' .* leave out attn_implementation$"


@pytest.mark.parametrize("name", ["swarm", "swarm_local_sdpa", "swarm_images", "swarm_local_sdpa_images"])
def test_a_whole_model_is_refused_before_its_weights_are_looked_up(remote, name: str, tmp_path: Path) -> None:
    remote.config.save_pretrained(tmp_path)
    for load in (MixtralForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        for settings in ({"attn_implementation": name}, {"config": remote.config}):
            with pytest.raises(UnsupportedError, match=f"{tmp_path} {REFUSED}"):
                load(tmp_path, **settings)


def test_other_models_load_as_before(remote, directory: Path) -> None:
    for attention in ("sdpa", "eager", None):
        model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation=attention)
        assert model.config._attn_implementation == (attention or "sdpa")


def test_a_model_made_with_it_says_why_it_cannot_run(remote) -> None:
    made = AutoModelForCausalLM.from_config(remote.config)
    with pytest.raises(UnsupportedError, match="a model " + REFUSED):
        made(IDS)


@pytest.mark.parametrize("local_blocks", [(0, 0), (1, 0)])
def test_continuous_batching_is_refused(directory: Path, swarm, local_blocks: tuple[int, int]) -> None:
    model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, local_blocks=local_blocks)
    with pytest.raises(UnsupportedError, match=r"continuous batching .* call generate\(\)"):
        model.generate_batch(IDS.tolist())


def test_encoders_next_to_the_decoder_attend() -> None:
    register_attention()
    states = torch.randn(1, 2, 3, 4)
    found, _ = _attend(SimpleNamespace(is_causal=False), states, states, states, None)
    wanted = torch.nn.functional.scaled_dot_product_attention(states, states, states)
    torch.testing.assert_close(found, wanted.transpose(1, 2))
