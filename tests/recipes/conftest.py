"""A swarm for recipes, and ``swarm fit`` in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import huggingface_hub

# Here and not in a run: its log handler keeps the stream that it finds, and that of a run is closed afterwards.
import lightning.pytorch  # noqa: F401
import pytest
import trainer_kit
from typer.testing import CliRunner, Result

from swarm_plugins.cli.main import app

ROOT = Path(__file__).parent.parent.parent
RECIPES = ROOT / "recipes"
# Fixtures.
model, swarm, peers = trainer_kit.model, trainer_kit.swarm, trainer_kit.peers


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Real text that is read in no time."""
    path = tmp_path / "text.txt"
    path.write_text((ROOT / "examples" / "data" / "gettysburg.txt").read_text())
    return path


@pytest.fixture
def fit(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Runs ``swarm fit`` in an empty folder: a recipe's name or path, then options."""
    # Lightning sets these when a recipe says seed_everything.
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    # A Hub that is not there is tried again for a long time.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(recipe: str | Path, *options: object) -> Result:
        path = RECIPES / recipe if isinstance(recipe, str) else recipe
        words = ["fit", "--config", str(path), *map(str, options)]
        if not any(word.startswith("--model.base") for word in words):
            words += ["--model.base", str(model)]
        return CliRunner().invoke(app, words)

    yield run
    monkeypatch.undo()
