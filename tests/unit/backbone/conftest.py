"""One small model over a swarm in this process, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.checkpoint.files import LocalFiles, Piece
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module")
def swarm(directory: Path) -> Iterator[InProcessSwarm]:
    with InProcessSwarm(directory) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def local(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory).eval()


@pytest.fixture
def remote(directory: Path, swarm: InProcessSwarm) -> PreTrainedModel:
    """A model of the test's own: it may be changed."""
    return AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all pieces that are read of checkpoints."""
    found: list[int] = []
    plain_read = LocalFiles.read

    def counted(self: LocalFiles, file: str, pieces: Sequence[Piece], progress: object) -> None:
        found.extend(len(piece.buffer) for piece in pieces)
        plain_read(self, file, pieces, progress)

    monkeypatch.setattr(LocalFiles, "read", counted)
    return found
