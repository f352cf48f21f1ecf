"""``generate()`` over real servers in processes of their own: the same tokens as the local model."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from generation_modes import MODES
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm
from swarm_plugins.testing.models import save_tiny, tiny_model

pytestmark = pytest.mark.swarm

SOME_MODES = ("greedy_padded", "beam_padded", "assisted", "several_turns", "copied_cache")
CLOSE_S = 30.0


class Served:
    """One family's toy on two servers, and the local model."""

    def __init__(self, directory: Path, swarm: LocalSwarm) -> None:
        self.local = AutoModelForCausalLM.from_pretrained(directory).eval()
        self.remote = AutoSwarmModelForCausalLM.from_pretrained(directory, initial_peers=swarm.initial_peers)
        self.remote_blocks = self.remote.model.layers[0].swarm_stack.remote
        self.peers = [server.peer_id for server in swarm.servers]

    def cached_tokens(self) -> int:
        """Tokens in the caches of all sessions on all servers."""
        connection = self.remote_blocks.connection
        infos = [connection.loop.run(self.remote_blocks.servers.peers.info(peer)) for peer in self.peers]
        return sum(info.total_kv_tokens - info.free_kv_tokens for info in infos)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = save_tiny(request.param, tmp_path_factory.mktemp(request.param))
    with LocalSwarm(directory, num_servers=2) as swarm:
        served = Served(directory, swarm)
        yield served
        served.remote_blocks.connection.close()


@pytest.fixture(scope="module")
def assistant() -> PreTrainedModel:
    return tiny_model("llama", seed=1, num_layers=1)


@pytest.mark.parametrize("served", ["llama"], indirect=True)
@pytest.mark.parametrize("name", MODES)
def test_llama_on_servers_says_what_local_says(served: Served, assistant: PreTrainedModel, name: str) -> None:
    compare(served, assistant, name)


@pytest.mark.parametrize("served", ["mixtral"], indirect=True)
@pytest.mark.parametrize("name", SOME_MODES)
def test_mixtral_on_servers_says_what_local_says(served: Served, assistant: PreTrainedModel, name: str) -> None:
    compare(served, assistant, name)


@torch.no_grad()
def compare(served: Served, assistant: PreTrainedModel, name: str) -> None:
    """Compares the tokens, and waits until the servers' caches are empty."""
    assert MODES[name](served.remote, assistant) == MODES[name](served.local, assistant)
    gc.collect()
    deadline = time.monotonic() + CLOSE_S
    while served.cached_tokens() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert served.cached_tokens() == 0
