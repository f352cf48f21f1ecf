"""Servers at a distance: what goes by which link."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm
from swarm_plugins.client import SwarmConfig, connect
from swarm_plugins.errors import ConfigError
from swarm_plugins.links import Link
from swarm_plugins.testing import save_tiny

IDS = torch.arange(5, 13)[None]


@pytest.mark.swarm
def test_clients_and_servers_have_links_of_their_own(tmp_path: Path) -> None:
    directory = save_tiny("llama", tmp_path / "llama")
    local = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    want = local.generate(IDS, max_new_tokens=4, do_sample=False)
    link, server_link = Link(rtt_ms=4, mbit=100), Link(rtt_ms=1)
    with (
        LocalSwarm(directory, spans=[(0, 2), (2, 4)], link=link, server_link=server_link) as swarm,
        connect(swarm.initial_peers, SwarmConfig()) as connection,
    ):
        assert swarm.traffic().between > 0, "the second server has joined by the first"
        before = swarm.traffic()
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=connection)
        assert model.generate(IDS, max_new_tokens=4, do_sample=False).equal(want)
        used = swarm.traffic()
        # Two spans; the last token is chosen, and not sent.
        hidden_bytes = 2 * (want.shape[1] - 1) * local.config.hidden_size * 4
        assert used.to_servers - before.to_servers > hidden_bytes
        assert used.from_servers - before.from_servers > hidden_bytes
        # Still reached by the same port, and by the others.
        swarm.restart(1)
        assert model.generate(IDS, max_new_tokens=4, do_sample=False).equal(want)
        assert swarm.traffic().between > used.between


def test_links_of_too_many_servers_and_traffic_without_links_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="17 servers are too many for links: at most 16"):
        LocalSwarm(tmp_path, num_servers=17, link=Link(rtt_ms=5))
    with pytest.raises(ConfigError, match="has no links"):
        LocalSwarm(tmp_path).traffic()
