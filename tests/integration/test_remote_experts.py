"""Experts at other peers: real server processes, real streams."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm
from swarm_plugins.client import SwarmConfig, connect
from swarm_plugins.testing.models import save_tiny

pytestmark = pytest.mark.swarm

PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("models") / "tiny-mixtral")


@pytest.fixture(scope="module")
def local(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model).eval()


def test_a_client_of_an_owner_whose_experts_are_at_a_holder_gets_the_local_tokens_and_gradients(
    model: Path, local: PreTrainedModel
) -> None:
    expected = local.generate(PROMPT, max_new_tokens=12, do_sample=False)
    spans = [(0, 4), (0, 4)]
    with (
        LocalSwarm(model, spans=spans, experts=["2:4,remote", "0:2"]) as swarm,
        connect(swarm.initial_peers, SwarmConfig()) as connection,
    ):
        remote = AutoSwarmModelForCausalLM.from_pretrained(model, connection=connection)
        found = remote.generate(PROMPT, max_new_tokens=12, do_sample=False)
        embeds = [m.get_input_embeddings()(PROMPT).detach().requires_grad_() for m in (local, remote)]
        for one, given in zip((local, remote), embeds, strict=True):
            one(inputs_embeds=given, labels=PROMPT).loss.backward()
    assert torch.equal(found, expected)
    torch.testing.assert_close(embeds[1].grad, embeds[0].grad, rtol=1e-4, atol=1e-5)
