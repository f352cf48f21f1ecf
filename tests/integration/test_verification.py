"""A lying server beside honest ones, over real connections: caught, left out, and convicted by its own signature."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from programs import Programs
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from kits.faulty_swarm import LYING_SERVER, FaultySwarm
from recipes.benchmarks.links import Link
from swarm_plugins import load_remote_experts
from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.cli import app
from swarm_plugins.client import SwarmConfig, connect
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.verification import user_quarantine

IDS = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(1))


def slow_down(swarm: FaultySwarm) -> None:
    """Makes the honest servers slower than the liar, also on a busy machine."""
    for index in range(len(swarm.servers)):
        for line in swarm.lines_to(index):
            line.link = Link(rtt_ms=300)


@contextlib.contextmanager
def liar(programs: Programs, model: Path, address: str, *options: str) -> Iterator[str]:
    """Runs a lying server of the whole model, which clients prefer to honest ones; yields its peer id."""
    arguments = ["serve", str(model), "--blocks", "0:4", "--threads", "1", "--initial-peers", address, *options]
    with model.with_name("liar.log").open("w") as log:
        process = programs.popen([sys.executable, LYING_SERVER, *arguments], errors=log, swarms=False)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1].rpartition("/")[2]
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.mark.swarm
def test_a_liar_is_caught_over_real_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Programs
) -> None:
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))
    model = save_tiny("llama", tmp_path / "llama")
    with (
        FaultySwarm(model, num_servers=2) as swarm,
        liar(programs, model, swarm.initial_peers[0]) as peer,
        contextlib.ExitStack() as connections,
    ):

        def load(config: SwarmConfig) -> PreTrainedModel:
            connection = connections.enter_context(connect(swarm.initial_peers, config))
            return AutoSwarmModelForCausalLM.from_pretrained(model, connection=connection)

        slow_down(swarm)
        # The loss would not show this lie: the final norm hides the scale of the last block's output.
        checking = load(SwarmConfig(verify="on"))
        losses = [checking(input_ids=IDS, labels=IDS).loss.item()]
        # An answer may still be late enough for the honest servers' to come first.
        while not user_quarantine().peers() and len(losses) < 20:
            losses.append(checking(input_ids=IDS, labels=IDS).loss.item())
        trusting = load(SwarmConfig(allowed_peers=tuple(one.peer_id for one in swarm.servers)))
        assert set(losses) == {trusting(input_ids=IDS, labels=IDS).loss.item()}
        tokens = checking.generate(IDS, max_new_tokens=8, do_sample=False)
        assert tokens.equal(trusting.generate(IDS, max_new_tokens=8, do_sample=False))
        _check_evidence(model, peer, "answered a forward of")
        # The same liar in a session: the steps before the wrong one are part of the evidence.
        user_quarantine().forgive(peer)
        generating = load(SwarmConfig(verify="on"))
        for _ in range(20):
            assert generating.generate(IDS, max_new_tokens=8, do_sample=False).equal(tokens)
            if user_quarantine().peers():
                break
        _check_evidence(model, peer, "answered a session step of")
        user_quarantine().forgive(peer)
        joining = ["--initial-peers", swarm.initial_peers[0]]
        probed = CliRunner().invoke(app, ["audit", "--probe", "30", "--model", str(model), *joining])
        assert probed.exit_code == 1, probed.output
        assert f"{peer} is quarantined until" in probed.output
        assert list(user_quarantine().peers()) == [peer]


def _check_evidence(model: Path, peer: str, what: str) -> None:
    assert list(user_quarantine().peers()) == [peer]
    shown = CliRunner().invoke(app, ["audit", peer, "--model", str(model)])
    assert shown.exit_code == 0
    assert what in shown.output
    assert f"signed by {peer}: yes" in shown.output
    assert "WRONG" in shown.output


@pytest.mark.swarm
def test_a_lying_holder_of_experts_is_caught_over_real_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Programs
) -> None:
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))
    model = save_tiny("mixtral", tmp_path / "mixtral")
    expected = AutoModelForCausalLM.from_pretrained(model)(IDS).logits
    with (
        FaultySwarm(model, spans=[(0, 4)], experts=["0:4"]) as swarm,
        liar(programs, model, swarm.initial_peers[0], "--experts", "0:4") as peer,
        connect(swarm.initial_peers, SwarmConfig(verify="on")) as connection,
    ):
        slow_down(swarm)
        owner = load_remote_experts(model, connection=connection)
        # An answer may still be late enough for the honest holder's to come first.
        for _ in range(20):
            torch.testing.assert_close(owner(IDS).logits, expected, atol=1e-4, rtol=1e-4)
            if user_quarantine().peers():
                break
        ((caught, why),) = user_quarantine().peers().items()
        assert caught == peer
        assert why.reason.startswith("wrong experts")
        shown = CliRunner().invoke(app, ["status", "--initial-peers", swarm.initial_peers[0]])
        assert "quarantined" in shown.output
