"""Models with sliding windows over a swarm: far beyond the window, tokens are those of the local model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from session_check import sessions_left
from transformers import AutoModelForCausalLM, PreTrainedModel
from type_models import save_type

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.block_io import kept_by_window
from swarm_plugins.client import SwarmConfig
from swarm_plugins.testing import save_tiny
from swarm_plugins.testing.in_process import InProcessSwarm

TOYS = ("mixtral_sliding", "gpt_oss")
TYPES = ("mistral", "gemma3_text")
PROMPT = torch.randint(3, 40, (1, 130), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[*TOYS, *TYPES])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    name = request.param
    return save_tiny(name, tmp_path / name) if name in TOYS else Path(save_type(name, tmp_path / name))


@pytest.fixture
def swarm(directory: Path) -> Iterator[InProcessSwarm]:
    with InProcessSwarm(directory, config=SwarmConfig(micro_batches=1)) as swarm:
        yield swarm


@pytest.fixture
def local(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture
def remote(directory: Path, swarm: InProcessSwarm) -> PreTrainedModel:
    return AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)


def test_tokens_far_beyond_the_window(remote: PreTrainedModel, local: PreTrainedModel, swarm: InProcessSwarm) -> None:
    options: dict[str, Any] = {"attention_mask": torch.ones_like(PROMPT), "pad_token_id": 0, "eos_token_id": None}
    for more in ({}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}):
        settings = {**options, "max_new_tokens": 40, "do_sample": False, **more}
        assert torch.equal(remote.generate(PROMPT, **settings), local.generate(PROMPT, **settings))
    assert sessions_left(swarm) == 0


@torch.no_grad()
def test_a_session_that_goes_back_further_is_replayed(
    remote: PreTrainedModel, local: PreTrainedModel, swarm: InProcessSwarm
) -> None:
    first = remote(PROMPT, use_cache=True)
    cache = first.past_key_values
    for token in range(70):
        remote(PROMPT[:, token : token + 1], past_key_values=cache)
    kept = {
        session.cache.first(block)
        for service in swarm.services.values()
        for session in service.sessions._sessions.values()
        for block in session.blocks
        if session.cache.keeps_window(block)
    }
    assert min(kept) > 40
    replays = swarm.connection.peers.counts.replays
    cache.crop(-160)
    found = remote(PROMPT[:, 40:], past_key_values=cache).logits
    assert swarm.connection.peers.counts.replays > replays
    torch.testing.assert_close(found, local(PROMPT).logits[:, 40:], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_memory_of_windows_stops_growing(remote: PreTrainedModel, swarm: InProcessSwarm) -> None:
    cache = remote(PROMPT[:, :20], use_cache=True).past_key_values
    capacities = set()
    for token in range(200):
        remote(PROMPT[:, token % 130][:, None], past_key_values=cache)
        for service in swarm.services.values():
            for session in service.sessions._sessions.values():
                capacities |= {kept.capacity for kept in session.cache._kept if kept.window}
    assert max(capacities) <= kept_by_window(8)
