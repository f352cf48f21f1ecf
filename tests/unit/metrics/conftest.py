"""A tiny model in a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_plugins.testing.models import save_tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-llama")
