"""`swarm api --train` as its users have it: a process, real servers, and the unmodified SDK."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from api_kit import api, save_model
from programs import Programs
from tinker import types
from tinker_kit import client_at, datum
from transformers import AutoModelForCausalLM

from swarm_plugins import load_adapter

# The SDK leaves connections to the collector of garbage.
pytestmark = [
    pytest.mark.swarm,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
KEY = "tml-anna"
TEXTS = [[5, 9, 17, 33, 4], [8, 61, 7, 90, 12, 13, 99, 20]]
ADAM = types.AdamParams(learning_rate=0.02)


@pytest.fixture(autouse=True)
def _says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def step(training: Any) -> float:
    calls = [training.forward_backward([datum(ids)], "cross_entropy") for ids in TEXTS]
    done = training.optim_step(ADAM)
    losses = [call.result().metrics["loss:sum"] for call in calls]
    assert done.result()
    return sum(losses)


def test_a_killed_gateway_goes_on_from_the_last_checkpoint(tmp_path: Path, programs: Programs) -> None:
    base = save_model("mixtral", tmp_path / "base", num_layers=2)
    state = tmp_path / "state"
    training_options = ("--train", "--state-dir", str(state), "--api-key", KEY, "--name", "Org/Tiny")
    place = (str(base), "--local-swarm", "2")
    with api(programs, *place, *training_options, home=tmp_path) as url, client_at(url, KEY) as client:
        training = client.create_lora_training_client(base_model="Org/Tiny", rank=4, seed=1).result()
        assert step(training) > step(training)
        path = training.save_state("two").result().path
        wanted = [step(training), step(training)]
        run = training.model_id
    # The same run on experts on disk: where the blocks are makes no difference.
    offloaded = (str(base), "--offload", "fast=1MB")
    with (
        api(programs, *offloaded, *training_options, home=tmp_path, end=signal.SIGKILL) as url,
        client_at(url, KEY) as client,
    ):
        training = client.create_training_client_from_state_with_optimizer(path).result()
        assert step(training) == pytest.approx(wanted[0], rel=1e-4)
        later = training.save_state("three").result().path
        step(training)
    with api(programs, *offloaded, *training_options, home=tmp_path) as url, client_at(url, KEY) as client:
        training = client.create_training_client_from_state_with_optimizer(later).result()
        assert step(training) == pytest.approx(wanted[1], rel=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(base)
    tuned = load_adapter(plain, state / "runs" / run / "weights" / "two")
    ids = torch.tensor(TEXTS[0])
    logits = tuned(ids[None, :-1]).logits[0].log_softmax(-1)
    assert -float(logits.gather(1, ids[1:, None]).sum()) < wanted[0]
