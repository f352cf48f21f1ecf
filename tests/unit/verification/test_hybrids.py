"""Blocks with recurrent and convolution states are recomputed like others: honest servers pass, liars are caught."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lies_kit import CHECKED, HONEST, IDS, OtherMachine, all_checked, finish_checks, train, verifier_of, with_liar
from transformers import PreTrainedModel
from type_models import save_type

from kits.liars import Liar, LyingSwarm
from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.testing import InProcessSwarm
from swarm_plugins.verification import Quarantine

SPANS = [(0, 2), (2, 4)]
MASK = torch.ones_like(IDS)
MASK[1, :5] = 0


@pytest.fixture(scope="module", params=["qwen3_5_moe_text", "nemotron_h", "qwen4_exp_text"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose blocks keep states."""
    return save_type(request.param, tmp_path_factory.mktemp(request.param))


def generated(model: PreTrainedModel) -> list[list[int]]:
    found: torch.Tensor = model.generate(IDS, max_new_tokens=12, do_sample=False)
    return found.tolist()


def test_no_honest_server_is_caught(hybrid: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    liars = {0: OtherMachine(), 1: OtherMachine()}
    with LyingSwarm(hybrid, spans=SPANS, config=CHECKED, liars=liars) as swarm:
        model = all_checked(swarm)
        model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.backward()
        for options in ({}, {"attention_mask": MASK, "num_beams": 2}):
            model.generate(input_ids=IDS, max_new_tokens=6, do_sample=False, **options)
        finish_checks(model)
        assert set(verifier_of(model).checker.checked) == set(swarm.peers)
    assert not Quarantine(cache / "quarantine").peers()
    assert "failed (failure" not in caplog.text


@pytest.mark.slow
def test_lies_of_a_session_are_caught_before_they_are_used(hybrid: Path, cache: Path) -> None:
    with InProcessSwarm(hybrid, spans=SPANS, config=HONEST) as swarm:
        honest = AutoSwarmModelForCausalLM.from_pretrained(hybrid, connection=swarm.connection)
        expected = generated(honest)
    liar = Liar("scaled", honest_calls=2)
    with with_liar(hybrid, liar) as swarm:
        model = AutoSwarmModelForCausalLM.from_pretrained(hybrid, connection=swarm.connection)
        assert generated(model) == expected
        assert list(Quarantine(cache / "quarantine").peers()) == [swarm.peers[1]]


@pytest.mark.slow
def test_wrong_gradients_are_caught(hybrid: Path, cache: Path) -> None:
    with InProcessSwarm(hybrid, spans=SPANS, config=HONEST) as swarm:
        expected = train(swarm)
    with with_liar(hybrid, Liar("flipped_gradients")) as swarm:
        assert train(swarm) == pytest.approx(expected, rel=1e-5)
        assert list(Quarantine(cache / "quarantine").peers()) == [swarm.peers[1]]
