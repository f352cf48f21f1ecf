"""Without the checkpoint, answers are compared with those of other servers."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from lies_kit import CHECKED, HONEST, train

from kits.liars import Liar, Lie, LyingSwarm
from swarm_plugins.errors import CheckpointError
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


def test_alone_a_server_is_believed_and_that_is_said_once(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LyingSwarm(llama, spans=[(0, 4)], config=CHECKED) as swarm:
        train(swarm)
    said = [record for record in caplog.records if "cannot be checked" in record.message]
    assert len(said) == 2  # forwards, backwards
    assert "the Hub cannot be reached; and no other server of the same kind holds these blocks" in said[0].message
