"""Servers at a distance: what goes by which link."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.benchmarks.links import Link, Relay
from recipes.benchmarks.links.network import Traffic
from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm
from swarm_plugins.book import judging
from swarm_plugins.client import SwarmConfig, SwarmConnection, connect
from swarm_plugins.errors import ConfigError
from swarm_plugins.local_swarm.server import LocalServer
from swarm_plugins.testing import save_tiny

# Many rows, as servers talk of other things meanwhile.
IDS = torch.arange(5, 13)[None].repeat(256, 1)
NEW_TOKENS = 4
SOON_S = 60.0
PATIENT_SERVER = Path(__file__).parents[1] / "kits" / "patient_server.py"


class PatientSwarm(LocalSwarm):
    """A swarm in which nothing expires on a busy machine."""

    def _spawn(self, index: int, options: Mapping[str, object], **settings: Any) -> LocalServer:
        return super()._spawn(index, options, **{**settings, "program": [str(PATIENT_SERVER)]})


@pytest.mark.swarm
def test_clients_and_servers_have_links_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "push_wait_s", lambda *_: SOON_S)  # nothing is sent twice on a busy machine
    directory = save_tiny("llama", tmp_path / "llama")
    local = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    want = local.generate(IDS, max_new_tokens=NEW_TOKENS, do_sample=False)
    # The last token is chosen, and not sent.
    hop_bytes = IDS.shape[0] * (want.shape[1] - 1) * local.config.hidden_size * 4
    relay = Relay(Link(rtt_ms=20, mbit=100), Link(rtt_ms=1))

    def used(connection: SwarmConnection) -> Traffic:
        """Returns the bytes by which a client gets its tokens."""
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=connection)
        before = relay.traffic()
        assert model.generate(IDS, max_new_tokens=NEW_TOKENS, do_sample=False).equal(want)
        return since(before, relay)

    # Round trips are told soon.
    with PatientSwarm(directory, spans=[(0, 2), (2, 4)], link=relay, announce_every_s=1.0) as swarm:
        assert relay.traffic().between > 0, "the second server has joined by the first"
        # It knows by which port, nearer than theirs, it has called the other one, and tells clients.
        knowing = swarm.servers[1].addresses
        with connect(knowing, SwarmConfig(push="off")) as connection:
            sent = used(connection)
            assert min(sent.to_servers, sent.from_servers) > 2 * hop_bytes
            assert sent.between < hop_bytes
            before = relay.traffic()
            swarm.restart(1)
            assert relay.traffic().between > before.between, "it has joined by the other one again"
            sent = used(connection)
            assert min(sent.to_servers, sent.from_servers) > 2 * hop_bytes
        with connect(knowing, SwarmConfig(push="on")) as connection:
            sent = used(connection)
            assert sent.between > hop_bytes
            assert hop_bytes < sent.to_servers < 2 * hop_bytes
            # In training too, each batch and each gradient goes up once, and on from server to server.
            sent, step_bytes = trained(relay, directory, connection), IDS.numel() * local.config.hidden_size * 4
            assert step_bytes < sent.between < 4 * step_bytes
            assert step_bytes < sent.to_servers < 3 * step_bytes
            assert sent.from_servers > 2 * step_bytes
            one, two = (server.peer_id for server in swarm.servers)
            assert neighbors(connection, one)[two] >= 1e-3
            assert neighbors(connection, two)[one] >= 1e-3


def since(before: Traffic, relay: Relay) -> Traffic:
    """Returns the bytes that have gone by each kind of link meanwhile."""
    after = relay.traffic()
    return Traffic(*(getattr(after, name) - getattr(before, name) for name in Traffic.__struct_fields__))


def trained(relay: Relay, directory: Path, connection: SwarmConnection) -> Traffic:
    """Returns the bytes of a training step."""
    model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=connection)
    weight = model.get_input_embeddings().weight.requires_grad_(True)
    before = relay.traffic()
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    assert float(weight.grad.norm()) > 0
    return since(before, relay)


def neighbors(connection: SwarmConnection, peer: str) -> Mapping[str, float]:
    """Returns the round trips that a server announces, once it does."""
    assert connection.peers is not None
    deadline = time.monotonic() + SOON_S
    while not (found := dict(connection.loop.run(connection.peers.info(peer)).round_trips)):
        assert time.monotonic() < deadline, "no round trips announced"
        time.sleep(0.1)
    return found


def test_links_of_too_many_servers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="17 servers are too many for links: at most 16"):
        LocalSwarm(tmp_path, num_servers=17, link=Relay(Link(rtt_ms=5))).start()
