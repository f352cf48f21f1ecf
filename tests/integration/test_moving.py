"""Servers that choose their blocks and move, over libp2p: a gap is closed, and a client's tokens stay the same."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm, SwarmConfig
from swarm_plugins.client.connection import connect
from swarm_plugins.survey import ModelStatus, survey
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.transport.config import NodeConfig

DEADLINE_S = 120.0
PROMPT = torch.randint(3, 100, (1, 6), generator=torch.Generator().manual_seed(0))


def look(peers: list[str]) -> ModelStatus:
    [found] = asyncio.run(survey(NodeConfig(initial_peers=tuple(peers), host_maddrs=()), None, timeout_s=20.0))
    return found


class KillsTheWeakSpan(LogitsProcessor):
    """After some tokens, kills all servers of the span with the fewest, and waits until others have closed the gap."""

    def __init__(self, swarm: LocalSwarm, after: int) -> None:
        self.swarm = swarm
        self.after = after
        self.num_killed = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.after -= 1
        if self.after == 0:
            servers = look(self.swarm.initial_peers).servers
            starts = [server.info.start for server in servers]
            weak = min((0, 2), key=starts.count)
            victims = {server.peer for server in servers if server.info.start == weak}
            for server in self.swarm.servers:
                if server.peer_id in victims:
                    server.kill()
                    self.num_killed += 1
            deadline = time.monotonic() + DEADLINE_S
            while look(self.swarm.initial_peers).missing:
                assert time.monotonic() < deadline, "the gap was not closed"
        return scores


@pytest.mark.swarm
def test_others_close_a_gap_and_a_running_client_goes_on(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "tiny-llama")
    local = AutoModelForCausalLM.from_pretrained(model).eval()
    expected = local.generate(PROMPT, max_new_tokens=10, do_sample=False)
    options = {"dtype": "float32", "kv_bytes": "16MB", "announce_every_s": 1.0}
    with LocalSwarm(model, num_servers=3, num_blocks=2, **options) as swarm:  # type: ignore[arg-type]
        # Those that join at the same time, and one that joins a lopsided swarm, leave no block out.
        assert {server.span for server in swarm.servers} == {(0, 2), (2, 4)}
        killer = KillsTheWeakSpan(swarm, after=4)
        with connect(swarm.initial_peers, SwarmConfig()) as connection:
            remote = AutoSwarmModelForCausalLM.from_pretrained(model, connection=connection)
            found = remote.generate(PROMPT, max_new_tokens=10, do_sample=False, logits_processor=[killer])
        assert killer.num_killed == 1
        assert torch.equal(found, expected)
