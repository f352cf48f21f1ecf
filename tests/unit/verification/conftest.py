"""Tiny models, and a cache folder for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_plugins.testing import save_tiny


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of quarantine and evidence; each test has its own."""
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of four blocks."""
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral of four blocks."""
    return save_tiny("mixtral", tmp_path_factory.mktemp("models") / "mixtral")
