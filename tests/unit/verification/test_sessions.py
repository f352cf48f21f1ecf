"""Steps of sessions are checked too: the first ones before they are used, later ones in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lies_kit import CHECKED, HONEST, IDS, tuned, with_liar
from transformers import PreTrainedModel
from typer.testing import CliRunner

from kits.liars import Liar
from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.cli import app
from swarm_plugins.client import SwarmConfig
from swarm_plugins.server.rpc import session
from swarm_plugins.testing import InProcessSwarm
from swarm_plugins.verification import Quarantine, Verifier, verifier


def model_of(swarm: InProcessSwarm) -> PreTrainedModel:
    return AutoSwarmModelForCausalLM.from_pretrained(swarm.directory, connection=swarm.connection)


def generated(swarm: InProcessSwarm, model: PreTrainedModel | None = None, **options: object) -> list[list[int]]:
    model = model or model_of(swarm)
    found: torch.Tensor = model.generate(IDS, max_new_tokens=20, do_sample=False, **options)
    return found.tolist()


def honest(directory: Path, config: SwarmConfig) -> InProcessSwarm:
    return InProcessSwarm(directory, spans=[(0, 2), (2, 4)], config=config)


@pytest.mark.slow
def test_lies_from_the_first_step_are_caught_before_they_are_used(llama: Path, cache: Path) -> None:
    with honest(llama, HONEST) as swarm:
        expected = generated(swarm)
    for liar in (Liar("echo"), Liar("scaled"), Liar("scaled", honest_calls=2)):
        with with_liar(llama, liar) as swarm:
            assert generated(swarm) == expected
            assert liar.calls == liar.honest_calls + 1
            caught = Quarantine(cache / "quarantine").peers()[swarm.peers[1]]
            assert caught.reason.startswith("wrong session step of blocks 2:4")
            shown = CliRunner().invoke(app, ["audit", swarm.peers[1], "--model", str(llama)])
            assert shown.exit_code == 0
            assert "answered a session step of" in shown.output
            assert "WRONG" in shown.output


def test_first_steps_are_checked_however_many_sessions_are_followed(
    llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Found by chaos with seed 1589812717: with eight sessions open, a new liar's answer to a prompt was believed.
    monkeypatch.setattr(verifier, "_MAX_SHADOWS", 0)
    liar = Liar("scaled")
    with with_liar(llama, liar) as swarm:
        generated(swarm)
        assert liar.calls == 1
        assert list(Quarantine(cache / "quarantine").peers()) == [swarm.peers[1]]


def test_a_lie_in_a_later_step_of_a_followed_session_is_caught(llama: Path, cache: Path) -> None:
    liar = Liar("echo", honest_calls=6)
    with with_liar(llama, liar) as swarm:
        generated(swarm)
        assert liar.calls < 20
        assert list(Quarantine(cache / "quarantine").peers()) == [swarm.peers[1]]


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"num_return_sequences": 2, "num_beams": 2}], ids=str)
def test_honest_servers_pass(mixtral: Path, cache: Path, options: dict[str, object]) -> None:
    with honest(mixtral, HONEST) as swarm:
        expected = generated(swarm, **options)
    with honest(mixtral, CHECKED) as swarm:
        model = model_of(swarm)
        assert generated(swarm, model, **options) == expected
        mask = torch.ones_like(IDS)
        mask[1, :5] = 0
        generated(swarm, model, attention_mask=mask, **options)
    assert not Quarantine(cache / "quarantine").peers()


def test_an_older_server_that_names_no_history_is_caught_without_evidence(
    llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(*_: object) -> bytes:
        return b""

    monkeypatch.setattr(session, "opening_history", none)
    with with_liar(llama, Liar("echo", honest_calls=2)) as swarm:
        generated(swarm)
        ((peer, caught),) = Quarantine(cache / "quarantine").peers().items()
        assert (peer, caught.evidence) == (swarm.peers[1], "")
        shown = CliRunner().invoke(app, ["audit", peer, "--model", str(llama)])
        assert "no evidence against" in shown.output


def test_a_server_that_stops_naming_the_history_is_left(
    llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = session.finished

    async def forgetful(service: Any, *rest: Any) -> Any:
        answer, history = await original(service, *rest)
        return answer, b"" if service.identity.peer_id == swarm.peers[1] else history

    monkeypatch.setattr(session, "finished", forgetful)
    liar = Liar("echo", honest_calls=1 << 30)
    with with_liar(llama, liar) as swarm:
        generated(swarm)
    assert liar.calls == 2
    assert "does not vouch for the session's history any more" in caplog.text
    assert not Quarantine(cache / "quarantine").peers()


def test_adapters_that_change_while_a_step_is_on_its_way_accuse_nobody(
    llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Verifier.examine

    async def late(self: Verifier, *args: Any) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.1)
        await original(self, *args)

    monkeypatch.setattr(Verifier, "examine", late)
    with honest(llama, CHECKED) as swarm:
        model = tuned(swarm)
        model.generate(input_ids=IDS, max_new_tokens=2, do_sample=False)
    assert not Quarantine(cache / "quarantine").peers()
