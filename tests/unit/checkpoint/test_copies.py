"""Copies of announced models: found by their content, and read once, whatever strangers announce."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_plugins.checkpoint.copies import LocalCopies
from swarm_plugins.checkpoint.source import Checkpoint
from swarm_plugins.testing.models import save_tiny


def test_a_directory_is_read_once_for_all_versions_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = save_tiny("llama", tmp_path / "tiny")
    version = Checkpoint.open(model).version.revision
    opened: list[Path] = []
    open_one = Checkpoint.open

    def open_noted(directory: Path) -> Checkpoint:
        opened.append(directory)
        return open_one(directory)

    monkeypatch.setattr(Checkpoint, "open", open_noted)
    copies = LocalCopies()
    assert all(copies.find("tiny", f"local-{index:040x}") is None for index in range(20))
    assert copies.find("tiny", version) == model
    assert opened == [model]


def test_a_directory_that_is_no_model_yet_is_looked_at_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    version = Checkpoint.open(save_tiny("llama", tmp_path / "elsewhere")).version.revision
    copies = LocalCopies()
    assert copies.find("tiny", version) is None
    (tmp_path / "tiny").mkdir()
    assert copies.find("tiny", version) is None
    save_tiny("llama", tmp_path / "tiny")
    assert copies.find("tiny", version) == tmp_path / "tiny"
