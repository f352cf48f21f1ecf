"""``generate()`` over a swarm: the same tokens as the local model."""

from __future__ import annotations

import pytest
import torch
from generation_modes import MODES, Mode
from transformers import PreTrainedModel

from swarm_plugins.testing.models import tiny_model


@pytest.fixture(scope="session")
def assistant() -> PreTrainedModel:
    """A small local model that guesses ahead."""
    return tiny_model("llama", seed=1, num_layers=1)


# The others cache keys and values of Mixtral's shape; other tests compare their logits.
FAMILIES = ("llama", "mixtral", "mixtral_sliding", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("pair", FAMILIES, indirect=True, scope="session")
@pytest.mark.parametrize("run", MODES.values(), ids=MODES)
@torch.no_grad()
def test_remote_says_what_local_says(pair, assistant: PreTrainedModel, run: Mode) -> None:
    assert run(pair.remote, assistant) == run(pair.local, assistant)
