"""A server finds out itself which of its blocks other versions have too, and follows a branch that moves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.server import other_versions
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.other_versions import OtherVersions
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.versions import ModelVersion

NAME = "alice/tiny"


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model, and two later versions: block 3 has changed in both, block 1 in the second."""
    folders = [save_tiny("llama", tmp_path_factory.mktemp("version")) for _ in range(3)]
    for folder, blocks in ((folders[1], [3]), (folders[2], [1, 3])):
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            for block in blocks:
                model.get_submodule(f"model.layers.{block}").input_layernorm.weight[0] += 1
        model.save_pretrained(folder)
    return folders


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))
    with LocalHub() as running:
        opened = Checkpoint.open

        def here(name: str, *, revision: str | None = None) -> Checkpoint:
            return opened(name, revision=revision, endpoint=running.endpoint, cache_dir=tmp_path / "hub")

        monkeypatch.setattr(other_versions.Checkpoint, "open", here)
        yield running


def others(checkpoint: Checkpoint, *names: str) -> OtherVersions:
    return OtherVersions(ServeConfig(model=checkpoint.name, also_versions=names), checkpoint, checkpoint.version)


def test_directories_are_compared(versions: list[Path]) -> None:
    checkpoint, keys = Checkpoint.open(versions[0]), [Checkpoint.open(folder).version.key for folder in versions]
    found = others(checkpoint, *map(str, versions)).look(range(4))
    assert found == {keys[1]: {0, 1, 2}, keys[2]: {0, 2}}


def test_a_branch_that_moves_is_followed(versions: list[Path], hub: LocalHub) -> None:
    first, second = hub.add(NAME, versions[0]), hub.add(NAME, versions[1])
    mine = others(other_versions.Checkpoint.open(NAME, revision=first), "main")
    assert mine.look(range(2)) == {second: {0, 1}}
    # The server has moved; what was compared is not compared again.
    assert mine.look(range(1, 4)) == {second: {0, 1, 2}}
    third = hub.add(NAME, versions[2])
    assert mine.look(range(1, 4)) == {third: {2}}


def test_a_store_in_few_bits_stands_for_the_weights_that_it_was_made_from(
    versions: list[Path], hub: LocalHub, tmp_path: Path
) -> None:
    first, second = hub.add(NAME, versions[0]), hub.add(NAME, versions[1])
    store = Checkpoint.open(shutil.copytree(versions[2], tmp_path / "store"))
    config = ServeConfig(model=store.name, also_versions=("main",))
    assert OtherVersions(config, store, ModelVersion(NAME, first)).look(range(4)) == {second: {0, 1, 2}}
    of_a_directory = OtherVersions(config, store, ModelVersion("tiny", "local-" + "0" * 40))
    with pytest.raises(ConfigError, match=r"was made from a directory, .* not here to be compared: serve that"):
        of_a_directory.check()


def test_what_is_not_there_is_told(versions: list[Path], hub: LocalHub) -> None:
    hub.add(NAME, versions[0])
    with pytest.raises(CheckpointError, match="v9"):
        others(other_versions.Checkpoint.open(NAME), "v9").check()
    with pytest.raises(ConfigError, match=r"a directory, which has no revisions: give another directory, or REPO@REV"):
        others(Checkpoint.open(versions[0]), "v9").check()
    with pytest.raises(ConfigError, match=r"also_versions names '/no/dir', a directory that does not exist"):
        others(other_versions.Checkpoint.open(NAME), "/no/dir").check()
