"""Experts at other peers: real server processes, real streams."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm, load_remote_experts
from swarm_plugins.book.rules import Rules
from swarm_plugins.cli import app
from swarm_plugins.client import SwarmConfig, SwarmConnection, connect
from swarm_plugins.errors import MissingExpertsError
from swarm_plugins.local_swarm import LocalServer
from swarm_plugins.remote_experts.module import RemoteExpertsModule
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import ExpertsRequest, Message

pytestmark = pytest.mark.swarm

PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10]])
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def local(tiny_mixtral: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_mixtral).eval()


@pytest.fixture(scope="module")
def swarm(tiny_mixtral: Path) -> Iterator[LocalSwarm]:
    """An owner without experts, three holders of half of them, and two with slices of the other half."""
    with LocalSwarm(
        tiny_mixtral,
        spans=[(0, 4)] * 6,
        experts=["remote", "0:2", "0:2", "0:2", "2:4", "2:4"],
        slices=[None, None, None, None, "0/2", "1/2"],
    ) as swarm:
        yield swarm


@contextmanager
def frozen(*servers: LocalServer) -> Iterator[None]:
    """Stops processes as a debugger, a full disk or a sleeping laptop does: connections stay open, no answer comes."""
    for server in servers:
        os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for server in servers:
            if server.is_alive:
                os.kill(server.pid, signal.SIGCONT)


@contextmanager
def killed_while_computing(client: PreTrainedModel, connection: SwarmConnection, victim: LocalServer) -> Iterator[None]:
    """Makes a holder the nearest of all, holds up the requests that come, and kills it when one has."""
    view = next(one for one in client.modules() if isinstance(one, RemoteExpertsModule))._remote.holders.view
    connection.loop.run(view.refresh(force=True))
    for peer, entry in view.entries.items():
        view.entries[peer] = replace(entry, round_trip_s=0.0 if peer == victim.peer_id else 1.0)
    assert connection.peers is not None
    post, is_asked = connection.peers.post, threading.Event()

    async def posting(channel: Channel, message: Message, **work: Any) -> None:
        await post(channel, message, **work)
        if channel.remote_peer == victim.peer_id and isinstance(message, ExpertsRequest):
            is_asked.set()

    with (
        frozen(victim),
        ThreadPoolExecutor(1) as pool,
        mock.patch.object(connection.peers, "post", posting),
    ):
        death = pool.submit(lambda: (is_asked.wait(60), victim.kill()))
        yield
        death.result()


def tokens_of(model: PreTrainedModel) -> Tensor:
    found: Tensor = model.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False)  # type: ignore[operator]
    return found


def gradient_of(model: PreTrainedModel) -> Tensor:
    embeds = model.get_input_embeddings()(PROMPT).detach().requires_grad_()
    model(inputs_embeds=embeds, labels=PROMPT).loss.backward()
    assert embeds.grad is not None
    return embeds.grad


def outcome(client: PreTrainedModel, **around: AbstractContextManager[None]) -> tuple[Tensor, Tensor]:
    """Logits of two rows, and the gradient of their embeddings; ``forward`` and ``backward`` run in these contexts."""
    tokens = torch.cat([PROMPT, PROMPT + 40])
    embeds = client.get_input_embeddings()(tokens).detach().requires_grad_()
    with around.get("forward", nullcontext()):
        logits = client(inputs_embeds=embeds).logits
    with around.get("backward", nullcontext()):
        logits.square().sum().backward()
    assert embeds.grad is not None
    return logits.detach(), embeds.grad


def test_clients_and_local_models_compute_the_same_also_while_holders_are_frozen(
    tiny_mixtral: Path, local: PreTrainedModel, swarm: LocalSwarm
) -> None:
    expected, gradient = tokens_of(local), gradient_of(local)
    with connect(swarm.initial_peers, SwarmConfig()) as connection:
        for client in (
            AutoSwarmModelForCausalLM.from_pretrained(tiny_mixtral, connection=connection),
            load_remote_experts(tiny_mixtral, connection=connection),
        ):
            torch.testing.assert_close(gradient_of(client), gradient, rtol=1e-4, atol=1e-5)
            before = outcome(client)
            with frozen(*swarm.servers[1:3]):
                assert torch.equal(tokens_of(client), expected)
                assert all(torch.equal(one, two) for one, two in zip(outcome(client), before, strict=True))


def test_holders_killed_in_mid_forward_and_in_mid_backward_cost_no_bit(
    tiny_mixtral: Path, swarm: LocalSwarm, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No replica answers before the holder's death is noticed.
    monkeypatch.setattr("swarm_plugins.client.peers.Rules", partial(Rules, holder_late_s=60.0))
    first, second = swarm.servers[1:3]
    # Asked once what they serve: a frozen holder would not say it.
    with connect(swarm.initial_peers, SwarmConfig(refresh_s=3600.0)) as connection:
        client = load_remote_experts(tiny_mixtral, connection=connection)
        expected = outcome(client)
        found = outcome(
            client,
            forward=killed_while_computing(client, connection, first),
            backward=killed_while_computing(client, connection, second),
        )
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    for victim in (first, second):
        assert f"server {victim.peer_id} failed" in caplog.text


def test_experts_of_a_frozen_holder_without_a_replica_are_reported_with_the_cure(
    tiny_mixtral: Path, swarm: LocalSwarm
) -> None:
    holder = swarm.servers[4]
    with connect(swarm.initial_peers, SwarmConfig(max_retries=1)) as connection:
        client = AutoSwarmModelForCausalLM.from_pretrained(tiny_mixtral, connection=connection)
        client(PROMPT)
        words = (
            rf"no living server holds experts 2:4 of block 0 of .*left out after failures: .*{holder.peer_id}.*"
            r"; serve them with: swarm serve .* --blocks 0:1 --experts 2:4 --initial-peers /"
        )
        with frozen(holder), pytest.raises(MissingExpertsError, match=words):
            client(PROMPT.repeat(4, 4))
    holder.kill()
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["status", "--initial-peers", swarm.servers[0].addresses[0], "--timeout", "20"]
    )
    assert shown.exit_code == 0, shown.output
    for words in (
        "fetches experts 0:4 of blocks 0:4",
        "holds experts 0:2 of blocks 0:4",
        "holds experts 2:4 of blocks 0:4, slice 1/2 of each",
        "coverage: 0:4 x1",
        "missing experts 2:4 of blocks 0:4; serve them with",
    ):
        assert words in " ".join(shown.output.split())
