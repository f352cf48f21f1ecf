"""A user's own script with LightningCLI: the strategy by name and by class, with settings, from YAML."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from swarm_plugins import LocalSwarm, SwarmConfig
from swarm_plugins.client import connect
from tests.recipes.conftest import ROOT

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

# Nothing of swarm_plugins in it, as in a script that was there before: the classes are named by the YAML.
SCRIPT = """
from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(auto_configure_optimizers=False)
"""


def run(folder: Path, *words: object, peers: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "SWARM_INITIAL_PEERS": peers}
    command = [sys.executable, "script.py", *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def written(folder: Path, model: Path, strategy: object) -> Path:
    recipe = {
        "seed_everything": 0,
        "trainer": {"strategy": strategy, "accelerator": "cpu", "max_epochs": 1, "default_root_dir": str(folder)},
        "model": {
            "class_path": "swarm_plugins.recipes.AdapterTuner",
            "init_args": {"base": str(model), "adapter": {"peft_type": "LORA", "target_modules": ["q_proj"]}},
        },
        "data": {
            "class_path": "swarm_plugins.recipes.TextData",
            "init_args": {"dataset": str(ROOT / "examples" / "data" / "gettysburg.txt"), "length": 16},
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def by_class(peers: list[str]) -> dict[str, object]:
    return {
        "class_path": "swarm_plugins.SwarmStrategy",
        "init_args": {
            "initial_peers": peers,
            "swarm": {
                "class_path": "swarm_plugins.SwarmConfig",
                "init_args": {"request_timeout_s": 60.0, "local_blocks": [1, 1]},
            },
        },
    }


def check_trained(folder: Path) -> None:
    [checkpoint] = folder.rglob("*.ckpt")
    state = torch.load(checkpoint, weights_only=True)
    assert state["global_step"] > 1
    assert all("lora_" in name for name in state["state_dict"])


def test_yaml_names_the_strategy(model: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    done = run(tmp_path, "fit", "--config", written(tmp_path, model, "swarm"), peers=" ".join(swarm.initial_peers))
    assert done.returncode == 0, done.stderr[-4000:]
    check_trained(tmp_path)


def cli_here(*words: object) -> None:
    # A class is found wherever it is named: no process of its own shows more.
    LightningCLI(auto_configure_optimizers=False, args=[*map(str, words)])


@pytest.mark.usefixtures("fit")  # for its environment
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_yaml_names_the_class_of_the_strategy(
    model: Path, swarm: LocalSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWARM_INITIAL_PEERS", raising=False)
    try:
        cli_here("fit", "--config", written(tmp_path, model, by_class(swarm.initial_peers)))
    finally:
        connect(swarm.initial_peers, SwarmConfig(request_timeout_s=60.0, local_blocks=(1, 1))).close()
    check_trained(tmp_path)


@pytest.mark.usefixtures("fit")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_settings_of_the_strategy_are_shown_and_checked(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = written(tmp_path, model, by_class(["/ip4/127.0.0.1/tcp/1/p2p/12D3KooW"]))
    with pytest.raises(SystemExit, match="0"):
        cli_here("fit", "--config", recipe, "--print_config")
    settings = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]["init_args"]
    assert settings["initial_peers"] == ["/ip4/127.0.0.1/tcp/1/p2p/12D3KooW"]
    assert "request_timeout_s" in str(settings["swarm"])

    recipe.write_text(recipe.read_text().replace("initial_peers", "inital_peers"))
    with pytest.raises(SystemExit, match="2"):
        cli_here("fit", "--config", recipe)
    assert "inital_peers" in capsys.readouterr().err
