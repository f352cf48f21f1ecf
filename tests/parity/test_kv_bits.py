"""Servers whose sessions keep keys and values in 8 bits: whatever generation does with a cache works on codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from session_check import sessions_left
from transformers import AutoModelForCausalLM

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.backbone import served_blocks
from swarm_plugins.client import SwarmConfig
from swarm_plugins.testing import save_tiny
from swarm_plugins.testing.in_process import InProcessSwarm

PROMPT = torch.randint(3, 120, (1, 150), generator=torch.Generator().manual_seed(0))
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "drafts": {"prompt_lookup_num_tokens": 5},
    "several": {"do_sample": True, "num_return_sequences": 3},
}


def generated(model: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    found: torch.Tensor = model.generate(PROMPT, max_new_tokens=12, **options)
    return found


@pytest.fixture(params=["llama", "gpt_oss"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_tiny(request.param, tmp_path / request.param)


@pytest.mark.parametrize("mode", MODES)
def test_generation_has_the_lengths_and_nearly_the_logits_of_the_local_model(directory: Path, mode: str) -> None:
    local = AutoModelForCausalLM.from_pretrained(directory).eval()
    with InProcessSwarm(directory, kv_bits=8) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        found = generated(remote, **MODES[mode])
        assert found.shape == generated(local, **MODES[mode]).shape
        assert sessions_left(swarm) == 0
        # Of the first sequence, whose tokens may be others than the local ones, the logits are near.
        with torch.no_grad():
            first = remote(found[:1, :150], use_cache=True)
            last = remote(found[:1, 150:], past_key_values=first.past_key_values).logits
            expected = local(found[:1]).logits[:, 150:]
        # Of the median token: a router may send some to other experts.
        assert float(((last - expected).norm(dim=-1) / expected.norm(dim=-1)).median()) < 0.02
        assert {one.quantization for one in served_blocks(remote)} == {"kv-int8"}


def test_a_session_goes_on_at_a_server_of_the_other_kind_which_the_client_can_see(tmp_path: Path) -> None:
    """As between servers of different dtypes and quantizations: a client that wants one kind names its servers."""
    directory = save_tiny("llama", tmp_path / "llama")
    config = SwarmConfig(max_retries=4, request_timeout_s=20.0)
    local = AutoModelForCausalLM.from_pretrained(directory).eval()
    with InProcessSwarm(directory, spans=[(0, 4)], kv_bits=8, config=config) as swarm, torch.no_grad():
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        first = remote(PROMPT[:, :140], use_cache=True)
        swarm.kv_bits = None
        swarm.add(1, range(4))
        swarm.kill(swarm.peers[0])
        last = remote(PROMPT[:, 140:], past_key_values=first.past_key_values).logits
        # All tokens were replayed there: nothing of the codes is left.
        torch.testing.assert_close(last, local(PROMPT).logits[:, 140:], atol=1e-4, rtol=1e-4)
        assert {one.quantization for one in served_blocks(remote)} >= {"none"}
