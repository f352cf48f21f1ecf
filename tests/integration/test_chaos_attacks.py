"""Honest clients beside attacks that cost a server much and their sender little: `make chaos` prints what they wait.

Times are printed, not asserted: they depend on the machine, which here also runs the attackers. What they are compared
with is measured right before, beside a process of the attackers' kind that keeps a processor as busy and asks nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attack_kit
import psutil
import pytest
import torch
from chaos_kit import IDS, decode
from torch import Tensor
from transformers import PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm, SwarmConfig
from swarm_plugins.client import connect
from swarm_plugins.testing import save_tiny
from swarm_plugins.testing.models import tiny_model

SECONDS = float(os.environ.get("CHAOS_SECONDS", "15")) / 2
POSITIONS = 4096
pytestmark = [
    pytest.mark.hours,
    pytest.mark.swarm,
    pytest.mark.timeout(300 + 40 * SECONDS),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


_IDLING = "print('nothing has begun', flush=True)\nwhile True: pass"


@contextlib.contextmanager
def attacking(address: str, width: int, names: list[str]) -> Iterator[None]:
    """Runs attacks in a process of their own, which is as busy without any; waits until each has begun."""
    attack = [attack_kit.__file__, address, str(width), *names] if names else ["-c", _IDLING]
    command = ["nice", "-n", "19", sys.executable, *attack]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for _ in names or ["nothing"]:
                assert process.stdout.readline().endswith("has begun\n")
            yield
        finally:
            process.kill()


def gradient(model: PreTrainedModel) -> Tensor:
    """Returns the gradient of the inputs of a training step."""
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model(inputs_embeds=embeds, labels=IDS).loss.backward()
    assert embeds.grad is not None
    return embeds.grad


def rounds(work: Callable[[], Tensor], wanted: Tensor) -> list[float]:
    """Works for some seconds, once at least; asserts that results are the wanted ones. Returns the rounds' seconds."""
    seconds: list[float] = []
    ends = time.monotonic() + SECONDS
    while not seconds or time.monotonic() < ends:
        started = time.monotonic()
        found = work()
        seconds.append(time.monotonic() - started)
        torch.testing.assert_close(found, wanted)
    return seconds


def test_honest_clients_are_served_beside_attacks(tmp_path: Path) -> None:
    tiny_model("llama", num_layers=8).save_pretrained(tmp_path / "model")
    directory = tmp_path / "model"
    for file in save_tiny("llama", tmp_path / "tokenizer").iterdir():
        if not (directory / file.name).exists():
            (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    works = {"generation": decode, "training": gradient}
    with LocalSwarm(directory, num_servers=1) as swarm, connect(swarm.initial_peers, SwarmConfig()) as connection:
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=connection)
        server = psutil.Process(swarm.servers[0].pid)
        wanted = {name: work(model) for name, work in works.items()}

        def waits(names: list[str]) -> dict[str, list[float]]:
            with attacking(swarm.initial_peers[0], config["hidden_size"], names):
                return {name: rounds(lambda work=work: work(model), wanted[name]) for name, work in works.items()}

        for names in ([], *([name] for name in attack_kit.ATTACKS), list(attack_kit.ATTACKS)):
            alone, beside = waits([]), waits(names)
            for name, found in beside.items():
                times = statistics.median(found) / statistics.median(alone[name])
                sys.stdout.write(
                    f"{' and '.join(names) or 'nothing'}: {name} takes {times:.1f} times as long, at most "
                    f"{max(found):.2f} s; the server has {server.memory_info().rss >> 20} MiB\n"
                )
        # Nothing of theirs is left behind.
        assert decode(model).equal(wanted["generation"])
