"""Experts at other peers: real server processes, real streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedModel
from typer.testing import CliRunner

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm, load_remote_experts
from swarm_plugins.cli import app
from swarm_plugins.client import SwarmConfig, connect
from swarm_plugins.errors import MissingBlocksError, RemoteError
from swarm_plugins.local_swarm import LocalServer
from swarm_plugins.testing.models import save_tiny

pytestmark = pytest.mark.swarm

PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10]])
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("models") / "tiny-mixtral")


@pytest.fixture(scope="module")
def local(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model).eval()


@pytest.fixture(scope="module")
def swarm(model: Path) -> Iterator[LocalSwarm]:
    """An owner without experts, two holders of half of them, and two with slices of the other half."""
    with LocalSwarm(
        model,
        spans=[(0, 4)] * 5,
        experts=["remote", "0:2", "0:2", "2:4", "2:4"],
        slices=[None, None, None, "0/2", "1/2"],
    ) as swarm:
        yield swarm


class KillAt(LogitsProcessor):
    """Kills a server with SIGKILL after some tokens."""

    def __init__(self, num_tokens: int, victim: LocalServer) -> None:
        self.num_left = num_tokens
        self.victim = victim

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.num_left -= 1
        if not self.num_left:
            self.victim.kill()
        return scores


def tokens_of(model: PreTrainedModel, *processors: LogitsProcessor) -> Tensor:
    found: Tensor = model.generate(  # type: ignore[operator]
        PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False, logits_processor=list(processors)
    )
    return found


def gradient_of(model: PreTrainedModel) -> Tensor:
    embeds = model.get_input_embeddings()(PROMPT).detach().requires_grad_()
    model(inputs_embeds=embeds, labels=PROMPT).loss.backward()
    assert embeds.grad is not None
    return embeds.grad


def test_clients_and_local_models_get_tokens_and_gradients_whoever_dies(
    model: Path, local: PreTrainedModel, swarm: LocalSwarm
) -> None:
    expected, gradient = tokens_of(local), gradient_of(local)
    with connect(swarm.initial_peers, SwarmConfig(max_retries=4)) as connection:
        clients = (
            AutoSwarmModelForCausalLM.from_pretrained(model, connection=connection),
            load_remote_experts(model, connection=connection),
        )
        for client in clients:
            torch.testing.assert_close(gradient_of(client), gradient, rtol=1e-4, atol=1e-5)
        assert torch.equal(tokens_of(clients[0], KillAt(4, swarm.servers[1])), expected)
        assert torch.equal(tokens_of(clients[1]), expected)
        swarm.servers[3].kill()
        with pytest.raises(
            (RemoteError, MissingBlocksError), match=r"experts 2:4 of block 0 of .* --blocks 0:1 --experts 2:4 "
        ):
            clients[0](PROMPT.repeat(4, 4))
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["status", "--initial-peers", swarm.servers[0].addresses[0], "--timeout", "2"]
    )
    assert shown.exit_code == 0, shown.output
    for words in (
        "fetches experts 0:4 of blocks 0:4",
        "holds experts 0:2 of blocks 0:4",
        "holds experts 2:4 of blocks 0:4, slice 1/2 of each",
        "coverage: 0:4 x1",
        "missing experts 2:4 of blocks 0:4; serve them with:",
    ):
        assert words in " ".join(shown.output.split())
