"""Checkpoints to read: written once, copied by tests that damage them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm_plugins.local_hub import LocalHub
from swarm_plugins.testing.models import save_tiny


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one file."""
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "single")


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture-of-experts checkpoint in several files with an index."""
    return save_tiny("mixtral", tmp_path_factory.mktemp("models") / "sharded", max_shard_size="60KB")


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Copies a checkpoint, to be damaged."""

    def copy(source: Path) -> Path:
        return Path(shutil.copytree(source, tmp_path / f"copy-of-{source.name}"))

    return copy


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    """A running local Hub."""
    with LocalHub() as running:
        yield running
