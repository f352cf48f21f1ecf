"""`swarm api --train` as its users have it: a process, real servers, and the unmodified SDK."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from api_kit import api, save_model
from programs import Programs
from safetensors.torch import load_file
from tinker import types
from tinker_kit import client_at, datum
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from web_kit import byte_tokenizer

from swarm_plugins import LocalSwarm, load_adapter
from swarm_plugins.local_swarm import LocalServer

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


def step(training: Any, texts: Sequence[list[int]] = TEXTS, during: Callable[[Any], object] = bool) -> float:
    """Trains on texts; ``during`` is called with the last call, while the step is under way."""
    calls = [training.forward_backward([datum(ids)], "cross_entropy") for ids in texts]
    done = training.optim_step(ADAM)
    during(calls[-1])
    losses = [call.result().metrics["loss:sum"] for call in calls]
    assert done.result()
    return float(sum(losses))


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


class Killer:
    """Kills the server that computes for a call, inside this call.

    Args:
        servers: Of one of them the call has no need.
    """

    def __init__(self, servers: Sequence[LocalServer]) -> None:
        self._servers = servers
        self.killed: LocalServer | None = None

    def __call__(self, call: Any) -> None:
        began = [_cpu_s(one) for one in self._servers]
        while self.killed is None and not call.future().done():
            for server, before in zip(self._servers, began, strict=True):
                if _cpu_s(server) > before + 0.1:
                    self._strike(server, call)
                    return

    def _strike(self, server: LocalServer, call: Any) -> None:
        process = psutil.Process(server.pid)
        process.suspend()  # its answer cannot come between the look and the kill
        if call.future().done():
            process.resume()
        else:
            process.kill()
            self.killed = server


def _cpu_s(server: LocalServer) -> float:
    return float(psutil.Process(server.pid).cpu_times().user)


@pytest.mark.slow
def test_a_server_killed_inside_a_call_changes_nothing(tmp_path: Path, programs: Programs) -> None:
    base = tmp_path / "base"
    LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=8)).save_pretrained(base)  # fmt: skip
    byte_tokenizer().save_pretrained(base)
    texts = torch.randint(5, 100, (4, 128), generator=torch.Generator().manual_seed(1)).tolist()
    options = ("--train", "--state-dir", str(tmp_path / "state"), "--api-key", KEY, "--name", "Org/Tiny")
    with LocalSwarm(base, spans=[(0, 2), (2, 4), (2, 4)], dtype="float32") as swarm:
        place = (str(base), "--initial-peers", swarm.initial_peers[0])
        with api(programs, *place, *options, home=tmp_path) as url, client_at(url, KEY) as client:
            killer = Killer(swarm.servers[1:])
            struck, alone = (
                client.create_lora_training_client(base_model="Org/Tiny", rank=4, seed=1).result() for _ in range(2)
            )
            losses = list[float]()
            while killer.killed is None:  # on a busy machine a step may be over before it is seen
                losses.append(step(struck, texts, killer))
            losses.append(step(struck, texts))
            assert losses == pytest.approx([step(alone, texts) for _ in losses], rel=1e-5)
            found, wanted = (
                load_file(tmp_path / "state" / "runs" / one.model_id / "weights" / "end" / "adapter_model.safetensors")
                for one in (struck, alone)
                if one.save_state("end").result()
            )
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
