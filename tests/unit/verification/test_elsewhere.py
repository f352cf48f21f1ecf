"""Without the checkpoint, answers are compared with those of other servers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lies_kit import CHECKED, HONEST, train

from kits.liars import Liar, Lie, LyingSwarm
from swarm_plugins.book import judging
from swarm_plugins.client.peers import Peers
from swarm_plugins.errors import CheckpointError
from swarm_plugins.transport.messages import BackwardRequest, ForwardRequest
from swarm_plugins.verification import Quarantine


@functools.cache
def clean_losses(directory: Path) -> list[float]:
    with LyingSwarm(directory, spans=[(0, 2), (2, 4)], config=HONEST) as swarm:
        return train(swarm)


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise CheckpointError("the Hub cannot be reached")

    monkeypatch.setattr("swarm_plugins.backbone.stack._open_checkpoint", missing)


@pytest.mark.parametrize("lie", ["scaled", "stale_adapter", "flipped_gradients"])
def test_a_server_that_two_others_contradict_is_not_believed(llama: Path, cache: Path, lie: Lie) -> None:
    spans = [(0, 2), (0, 2), (2, 4), (2, 4), (2, 4)]
    with LyingSwarm(llama, spans=spans, config=CHECKED, liars={2: Liar(lie)}) as swarm:
        assert train(swarm) == clean_losses(llama)
    # No one else could tell who was right, so no one is quarantined.
    assert not Quarantine(cache / "quarantine").peers()


DAMAGES: dict[str, Callable[[Any], Any]] = {
    "shape": lambda answer: msgspec.structs.replace(answer, hidden=answer.hidden[:, 1:]),
    "nan": lambda answer: msgspec.structs.replace(answer, hidden=answer.hidden / 0),
    "gradients": lambda answer: msgspec.structs.replace(answer, grad_adapters=answer.grad_adapters[1:]),
    "no gradient": lambda answer: msgspec.structs.replace(answer, grad_hidden=None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_answer_that_cannot_be_compared_accuses_nobody(
    llama: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    kind = ForwardRequest if damage in ("shape", "nan") else BackwardRequest
    original, damaged = Peers.request, []

    async def request(self: Peers, peer: str, rpc: str, message: Any, *args: Any, **options: Any) -> Any:
        answer = await original(self, peer, rpc, message, *args, **options)
        # Training asks for graphs and names them; who only checks does not.
        is_training = getattr(message, "keep", False) or getattr(message, "ticket", None)
        if is_training or not isinstance(message, kind):
            return answer
        damaged.append(peer)
        return DAMAGES[damage](answer)

    with LyingSwarm(llama, spans=[(0, 2), (2, 4), (2, 4)], config=CHECKED) as swarm:
        monkeypatch.setattr(Peers, "request", request)
        assert train(swarm) == clean_losses(llama)
        assert swarm.connection.peers is not None
        assert not judging.bans(swarm.connection.peers.book)
    assert damaged


def test_alone_a_server_is_believed_and_that_is_said_once(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LyingSwarm(llama, spans=[(0, 4)], config=CHECKED) as swarm:
        train(swarm)
    said = [record for record in caplog.records if "cannot be checked" in record.message]
    assert len(said) == 2  # forwards, backwards
    assert "the Hub cannot be reached; and no other server of the same kind holds these blocks" in said[0].message
