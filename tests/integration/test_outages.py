"""Outages of real servers and their libp2p daemons: a running client says so soon, and works again soon after them."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lightning.pytorch as pl
import psutil
import pytest
import torch
from trainer_kit import ROWS, Tuner, quiet_trainer
from transformers import PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm
from swarm_plugins.client import SwarmConfig, connect
from swarm_plugins.errors import MissingBlocksError
from swarm_plugins.fallback.stand_in import StandIn
from swarm_plugins.local_swarm import LocalServer

pytestmark = pytest.mark.swarm

IDS = torch.arange(5, 10)[None]
CURE_S = 60.0
"""Deadline of a call after an outage; it takes a second or two on an idle machine."""
ERROR_S = 60.0
"""Deadline of an error in an outage; it is 8 s on an idle machine. Who waits for the request needs 120 s."""

LEAVING = """
import sys, torch
from swarm_plugins import AutoSwarmModelForCausalLM
model = AutoSwarmModelForCausalLM.from_pretrained(sys.argv[1], initial_peers=[sys.argv[2]])
print(model(torch.arange(5, 10)[None]).logits.shape)
"""


@contextlib.contextmanager
def client_of(swarm: LocalSwarm, model: Path) -> Iterator[PreTrainedModel]:
    with connect(swarm.initial_peers[:1], SwarmConfig()) as connection:
        yield AutoSwarmModelForCausalLM.from_pretrained(model, connection=connection)


@contextlib.contextmanager
def frozen(servers: Sequence[LocalServer], part: str = "both") -> Iterator[None]:
    """Stops servers, their daemons or both, as a paused machine does."""
    processes = [one for server in servers for one in processes_of(server)[part]]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def processes_of(server: LocalServer) -> dict[str, list[psutil.Process]]:
    process = psutil.Process(server.pid)
    daemons = process.children(recursive=True)
    return {"server": [process], "daemon": daemons, "both": [process, *daemons]}


def tokens(client: PreTrainedModel) -> list[int]:
    found = client.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return [int(token) for token in found[0]]


def check_works(client: PreTrainedModel, expected: list[int], *, within_s: float = CURE_S) -> None:
    """Calls until a call works, which must be soon."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            assert tokens(client) == expected
        except MissingBlocksError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return


def check_fails(client: PreTrainedModel) -> None:
    started = time.monotonic()
    with pytest.raises(MissingBlocksError, match="no living server holds blocks"):
        tokens(client)
    assert time.monotonic() - started < ERROR_S


def test_a_client_says_that_all_servers_are_frozen_and_goes_on_after_that_and_after_lost_daemons(
    tiny_llama: Path,
) -> None:
    with LocalSwarm(tiny_llama, num_servers=2, dtype="float32") as swarm, client_of(swarm, tiny_llama) as client:
        expected = tokens(client)
        with frozen(swarm.servers):
            check_fails(client)
        check_works(client, expected)
        for server in swarm.servers:
            [daemon] = processes_of(server)["daemon"]
            daemon.kill()
            check_works(client, expected)
            assert server.is_alive


class _AtStep(pl.Callback):
    """Does something before a training step."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step = step
        self.action = action

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            self.action()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of Lightning
def test_a_trainer_and_a_generation_go_on_here_while_blocks_have_no_server(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SwarmConfig(local_fallback=True, refresh_s=0.2)
    with (
        LocalSwarm(tiny_llama, num_servers=2, dtype="float32") as swarm,
        connect(swarm.initial_peers[:1], config) as client,
    ):
        loader = functools.partial(AutoSwarmModelForCausalLM.from_pretrained, connection=client)

        def losses(*callbacks: pl.Callback) -> list[float]:
            tuner = Tuner(tiny_llama, types.SimpleNamespace(from_pretrained=loader))
            trainer = quiet_trainer(max_steps=4, callbacks=list(callbacks), enable_checkpointing=False)
            trainer.fit(tuner, torch.utils.data.DataLoader(ROWS, batch_size=2))
            return tuner.losses

        generating = loader(tiny_llama)
        [host] = [one for one in client._helpers if isinstance(one, StandIn)]
        expected = losses(), tokens(generating)
        assert (losses(_AtStep(2, swarm.servers[1].kill)), tokens(generating)) == expected
        assert host._hosted
        swarm.restart(1)
        monkeypatch.setattr("swarm_plugins.fallback.stand_in._IDLE_S", 0.5)
        monkeypatch.setattr("swarm_plugins.fallback.stand_in._LOOK_S", 0.05)
        deadline = time.monotonic() + 3 * CURE_S
        while host._hosted:
            assert tokens(generating) == expected[1]
            assert time.monotonic() < deadline
        assert losses() == expected[0]


@pytest.mark.parametrize(("part", "seconds"), [("both", 30), ("both", 60), ("server", 20), ("daemon", 20)])
def test_servers_frozen_for_long_are_found_again(tiny_llama: Path, part: str, seconds: float) -> None:
    with (
        LocalSwarm(tiny_llama, num_servers=2, replicas=2, dtype="float32") as swarm,
        client_of(swarm, tiny_llama) as client,
    ):
        expected = tokens(client)
        until = time.monotonic() + seconds
        with frozen(swarm.servers, part):
            while time.monotonic() < until:
                check_fails(client)
                time.sleep(0.5)
        check_works(client, expected)


def test_an_outage_before_the_first_request_is_an_error_soon(tiny_llama: Path) -> None:
    with (
        LocalSwarm(tiny_llama, num_servers=2, replicas=2, dtype="float32") as swarm,
        client_of(swarm, tiny_llama) as client,
    ):
        with frozen(swarm.servers):
            check_fails(client)
        for server in swarm.servers:
            server.kill()
        check_fails(client)


def test_a_program_that_closes_nothing_ends_without_a_traceback(tiny_llama: Path) -> None:
    with LocalSwarm(tiny_llama, num_servers=1, dtype="float32") as swarm:
        command = [sys.executable, "-c", LEAVING, str(tiny_llama), swarm.initial_peers[0]]
        left = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert "torch.Size" in left.stdout
        assert "Traceback" not in left.stderr
