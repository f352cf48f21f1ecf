"""The name is registered where Lightning is imported, and nobody else notices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from swarm_plugins import autoload

ROOT = Path(__file__).parent.parent.parent.parent
WATCH = """
import json, sys
import swarm_plugins
heavy = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "transformers"}
before = sorted(heavy & set(sys.modules))
import lightning_fabric.strategies as module
print(json.dumps({
    "before": before,
    "known": "swarm" in module.STRATEGY_REGISTRY,
    "loader": type(module.__loader__).__name__,
    "strategy_loaded": "swarm_plugins.strategy.swarm.standalone_fabric" in sys.modules,
}))
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_later_import_is_watched_and_the_strategy_itself_stays_unloaded() -> None:
    seen = json.loads(run(WATCH))
    assert seen == {"before": [], "known": True, "loader": "SourceFileLoader", "strategy_loaded": False}


EXPERTS = """
import json, sys
import swarm_plugins
from transformers.integrations import moe
from transformers import MixtralModel  # the name is needed when a model is made
print(json.dumps({
    "known": "swarm_table" in moe.ALL_EXPERTS_FUNCTIONS,
    "loader": type(moe.__loader__).__name__,
    "table_loaded": "swarm_plugins.moe.table" in sys.modules,
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False], ids=["transformers later", "transformers first"])
def test_transformers_knows_the_experts_implementation_that_stays_unloaded(is_first: bool) -> None:
    code = EXPERTS if is_first else f"from transformers.integrations import moe\n{EXPERTS}"
    assert json.loads(run(code)) == {"known": True, "loader": "SourceFileLoader", "table_loaded": False}


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """A folder that makes the entry points of pyproject.toml visible, as an installation does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "swarm_plugins-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: swarm_plugins\nVersion: 0\n")
    lines = [f"[{group}]\n{name} = {target}" for group, named in project["entry-points"].items()
             for name, target in named.items()]  # fmt: skip
    (info / "entry_points.txt").write_text("\n".join(lines))
    return f"{tmp_path}{os.pathsep}{ROOT}"


LATE = "import torch; from lightning.fabric.cli import _get_supported_strategies as s; print('swarm' in s())"


@pytest.mark.slow
def test_torch_alone_makes_the_name_known_to_fabric_run(installed: str) -> None:
    assert run(LATE, PYTHONPATH=installed).split() == ["True"]


def test_a_broken_registry_breaks_no_import(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def register(self, *args: object, **kwargs: object) -> None:
            raise RuntimeError("other interface")

    module = ModuleType("lightning_fabric.strategies")
    module.STRATEGY_REGISTRY = Broken()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning_fabric.strategies", module)
    autoload.install()
    assert "could not be registered" in caplog.text


def test_installing_twice_leaves_one_watcher() -> None:
    autoload.install()
    before = len(sys.meta_path)
    autoload.install()
    assert len(sys.meta_path) == before
