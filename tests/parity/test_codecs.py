"""Packed hidden states over whole swarms: near the exact results, also where a server does not know the codec."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.client import SwarmConfig
from swarm_plugins.testing import InProcessSwarm
from swarm_plugins.testing.transports import LocalChannel
from swarm_plugins.transport.messages import BackwardRequest, Codec, ForwardRequest, Message, PushedHidden, SessionStep
from swarm_plugins.transport.server_info import ServerInfo

IDS = torch.arange(4, 24)[None].repeat(2, 1)  # 2 x 20 tokens of width 32: just large enough to be packed
SPANS = [(0, 1), (1, 2), (2, 4)]
OLD = "peer1"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Codec, Codec]]:
    """Receiver, codec, and the codec wanted for the answer, of all requests with hidden states."""
    found: list[tuple[str, Codec, Codec]] = []
    send = LocalChannel.send

    async def noted(self: LocalChannel, message: Message, *, codec: Codec = "none") -> None:
        if isinstance(message, ForwardRequest | BackwardRequest | SessionStep):
            found.append((self.remote_peer, codec, message.reply_codec))
        elif isinstance(message, PushedHidden):
            found.append((self.remote_peer, codec, "none"))
        await send(self, message, codec=codec)

    monkeypatch.setattr(LocalChannel, "send", noted)
    return found


def outdate(swarm: InProcessSwarm, peer: str) -> None:
    """Makes a server look like one of an older release, and a slow one."""
    service = swarm.services[peer]
    info: Callable[[], ServerInfo] = service.info
    service.info = lambda: msgspec.structs.replace(info(), codecs=(), throughput=0.01, decode_s=100.0)


@pytest.mark.parametrize("push", ["on", "off"])
def test_a_server_that_does_not_know_the_codec_gets_everything_unpacked(
    tiny_llama: Path, push: str, sent: list[tuple[str, Codec, Codec]], caplog: pytest.LogCaptureFixture
) -> None:
    config = SwarmConfig(codec="rotated8", push=push)  # type: ignore[arg-type]
    local = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with InProcessSwarm(tiny_llama, spans=SPANS, config=config) as swarm, caplog.at_level(logging.WARNING):
        outdate(swarm, OLD)
        remote = AutoSwarmModelForCausalLM.from_pretrained(tiny_llama, connection=swarm.connection)
        logits = remote(IDS, use_cache=False).logits
        tokens = remote.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, min_new_tokens=4)
    assert tokens.shape == (2, 24)
    error = (logits - local(IDS).logits).norm() / local(IDS).logits.norm()
    assert 0 < error < 0.03
    for peer in swarm.peers:
        mine = {(codec, reply) for receiver, codec, reply in sent if receiver == peer}
        assert mine, f"{peer} was not asked"
        # Where outputs are pushed, that of the server before goes to the old one.
        if peer == OLD or (push == "on" and peer == "peer0"):
            assert mine <= {("none", "none")}
        else:
            assert ("rotated8", "rotated8") in mine
    said = [record.getMessage() for record in caplog.records if "codec" in record.getMessage()]
    assert said == [f"server {OLD} does not know codec 'rotated8': nothing is packed for it; upgrade that server"]


def test_a_training_step_survives_a_server_that_does_not_know_the_codec(
    tiny_llama: Path, sent: list[tuple[str, Codec, Codec]]
) -> None:
    """The replica that repeats a lost server's work gets the forward in a way that it knows."""
    local = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    embedded = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0))
    gradients = []
    with InProcessSwarm(tiny_llama, spans=[(0, 4), (0, 4)], config=SwarmConfig(codec="rotated8")) as swarm:
        outdate(swarm, OLD)
        remote = AutoSwarmModelForCausalLM.from_pretrained(tiny_llama, connection=swarm.connection)
        for one in (local, remote):
            inputs = embedded.clone().requires_grad_()
            loss = one(inputs_embeds=inputs, use_cache=False).logits.square().mean()
            if one is remote:
                assert {peer for peer, _, _ in sent} == {"peer0"}
                swarm.kill("peer0")
            gradients.append(torch.autograd.grad(loss, inputs)[0])
    assert sent[0] == ("peer0", "rotated8", "rotated8")
    assert set(sent[1:]) == {(OLD, "none", "none")}
    assert (gradients[1] - gradients[0]).norm() / gradients[0].norm() < 0.05
