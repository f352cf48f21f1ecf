"""Servers that are asked at random: liars are caught before others believe them, honest ones are not accused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from lies_kit import CHECKED, HONEST, with_liar
from torch import Tensor

from kits.liars import Liar, LyingSwarm
from swarm_plugins.backbone import AutoSwarmModel
from swarm_plugins.backbone.served import stack_of
from swarm_plugins.client.connection import RemoteBlocks
from swarm_plugins.errors import MissingBlocksError, SwarmError
from swarm_plugins.transport.messages import ForwardResponse
from swarm_plugins.transport.receipts import Signer
from swarm_plugins.verification import Quarantine, Verifier
from swarm_plugins.verification.evidence import read_evidence
from swarm_plugins.verification.probing import Probe, probe_servers


def blocks_of(swarm: LyingSwarm) -> RemoteBlocks:
    stack = stack_of(AutoSwarmModel.from_pretrained(swarm.directory, connection=swarm.connection))
    assert stack is not None
    stack.check()
    return stack.remote


def states() -> Sequence[Tensor]:
    return [torch.randn(1, 6, 32) for _ in range(5)]


def asked(
    remote: RemoteBlocks, swarm: LyingSwarm, monkeypatch: pytest.MonkeyPatch, *servers: int
) -> list[tuple[int, Probe]]:
    """Returns what comes of asking these servers, as if chance had picked them."""
    chosen = iter(servers)
    monkeypatch.setattr("swarm_plugins.verification.probing.secrets.choice", lambda _: swarm.peers[next(chosen)])
    return [(swarm.peers.index(one.peer), one) for one in probe_servers(remote, len(servers), states)]


def test_a_liar_is_caught_and_honest_servers_are_not(llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with with_liar(llama, Liar("scaled")) as swarm:
        found = asked(blocks_of(swarm), swarm, monkeypatch, 0, 1, 2, 0)
        liar = swarm.peers[1]
    assert [(server, one.blocks, one.outcome) for server, one in found] == [
        (0, range(2), "right"),
        (1, range(2, 4), "wrong"),
        (2, range(2, 4), "right"),
        (0, range(2), "right"),
    ]
    assert list(Quarantine(cache / "quarantine").reasons()) == [liar]
    (file,) = (cache / "evidence").iterdir()
    assert read_evidence(file).peer == liar


def test_a_server_that_does_not_answer_is_no_liar(llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with with_liar(llama, Liar("scaled", honest_calls=1 << 30)) as swarm:
        remote = blocks_of(swarm)
        swarm.kill(swarm.peers[0])
        ((_, found),) = asked(remote, swarm, monkeypatch, 0)
    assert found.outcome == "unknown"
    assert found.reason
    assert not Quarantine(cache / "quarantine").reasons()


def test_an_answer_of_another_shape_is_no_result(llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sign = Signer.sign

    def sign_shorter(self: Signer, request: Any, answer: Any, *history: bytes) -> Any:
        if isinstance(answer, ForwardResponse):
            answer = msgspec.structs.replace(answer, hidden=answer.hidden[:, 1:].contiguous())
        return sign(self, request, answer, *history)

    monkeypatch.setattr(Signer, "sign", sign_shorter)
    with with_liar(llama, Liar("scaled", honest_calls=1 << 30)) as swarm:
        ((_, found),) = asked(blocks_of(swarm), swarm, monkeypatch, 0)
    assert found.outcome == "unknown"
    assert "returned the hidden states as torch.float32 (1, 5, 32), expected torch.float32 (1, 6, 32)" in found.reason
    assert not Quarantine(cache / "quarantine").reasons()


def test_those_in_quarantine_are_not_asked(llama: Path, cache: Path) -> None:
    with with_liar(llama, Liar("scaled")) as swarm:
        remote = blocks_of(swarm)
        assert isinstance(remote.servers.guard, Verifier)
        for peer in swarm.peers:
            remote.servers.guard.checker.quarantine.add(peer, model="tiny", reason="a lie")
        with pytest.raises(MissingBlocksError, match=r"no server of .* is left to be asked"):
            next(probe_servers(remote, 1, states))


def test_without_checks_there_is_nothing_to_find(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHECKED.verify == "on"
    with (
        with_liar(llama, Liar("scaled"), config=HONEST) as swarm,
        pytest.raises(SwarmError, match=r'load the model with SwarmConfig\(verify="on"\)'),
    ):
        asked(blocks_of(swarm), swarm, monkeypatch, 0)
