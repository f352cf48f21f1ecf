"""A run of ``swarm fit`` that ends early keeps what was trained, and says where."""

from __future__ import annotations

import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Programs
from typer.testing import Result

from swarm_plugins import LocalSwarm
from swarm_plugins.recipes.fitting import KeepTrained
from tests.recipes.conftest import RECIPES

START_S, END_S = 120.0, 120.0
LORA = RECIPES / "lora_sotu.yaml"


class Run:
    """Stands for a trainer in its third step."""

    global_step = 3
    fast_dev_run = False
    world_size = 1
    log_dir = None

    def __init__(self, folder: Path, fault: Exception | None = None) -> None:
        self.default_root_dir = str(folder)
        self.fault = fault

    def save_checkpoint(self, path: Path, *, weights_only: bool) -> None:
        assert weights_only is False
        path.write_text("half")
        if self.fault is not None and Path(self.default_root_dir) in path.parents:
            raise self.fault


def test_a_second_interruption_does_not_write_over_the_first(tmp_path: Path) -> None:
    kept = []
    for _ in range(2):
        keeper = KeepTrained()
        keeper.on_exception(Run(tmp_path), None, RuntimeError())
        kept.append(keeper.kept)
    assert kept == [tmp_path / "interrupted-step=3.ckpt", tmp_path / "interrupted-step=3-2.ckpt"]


@pytest.mark.parametrize(
    "fault", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")], ids=["os", "torch"]
)
def test_a_full_disk_of_the_run_is_avoided(fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spare = tmp_path / "it's spare"
    spare.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spare))
    keeper, folder = KeepTrained(), tmp_path / "full"
    folder.mkdir()
    keeper.on_exception(Run(folder, fault), None, RuntimeError())
    assert not list(folder.iterdir())
    assert keeper.kept == spare / "interrupted-step=3.ckpt"
    assert keeper.advice is not None
    assert shlex.split(keeper.advice.partition("go on with ")[2]) == ["--ckpt-path", str(keeper.kept)]


def test_nothing_is_written_before_the_first_step(tmp_path: Path) -> None:
    run: Any = Run(tmp_path)
    run.global_step = 0
    keeper = KeepTrained()
    keeper.on_exception(run, None, RuntimeError())
    assert not list(tmp_path.iterdir())
    assert keeper.advice is None


@pytest.mark.swarm
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.usefixtures("peers")
def test_ctrl_c_leaves_a_checkpoint_that_is_gone_on_from(
    model: Path, swarm: LocalSwarm, text: Path, tmp_path: Path, fit: Callable[..., Result], programs: Programs
) -> None:
    options = [
        *("--model.base", model, "--data.dataset", text, "--data.length", 16),
        *("--trainer.accelerator", "cpu", "--trainer.val_check_interval", "1.0"),
    ]
    command = [sys.executable, "-m", "swarm_plugins", "fit", "--config", LORA, *options, "--trainer.max_epochs", "9999"]
    environment = {"SWARM_INITIAL_PEERS": " ".join(swarm.initial_peers), "PYTHONUNBUFFERED": "1"}
    process = programs.popen(command, cwd=tmp_path, environment=environment)
    try:
        deadline = time.monotonic() + START_S
        # The first epoch has ended: the run is in the middle of a later one.
        while not list(tmp_path.rglob("epoch=*.ckpt")):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        heard, _ = process.communicate(timeout=END_S)
        assert process.returncode == 130, heard
    finally:
        process.kill()
        process.wait(END_S)
    assert "Traceback" not in heard
    advice = re.search(r"what was trained is in (.*); go on with --ckpt-path", heard)
    assert advice is not None, heard[-3000:]
    checkpoint = tmp_path / advice[1]
    state = torch.load(checkpoint, weights_only=True)
    steps = state["global_step"]
    assert steps > 0

    result = fit(
        LORA, *options, "--trainer.max_steps", steps + 2, "--trainer.max_epochs", -1, "--ckpt-path", checkpoint
    )
    assert result.exit_code == 0, result.output[-3000:]
    last = max(tmp_path.rglob("epoch=*.ckpt"), key=lambda path: path.stat().st_mtime)
    assert torch.load(last, weights_only=True)["global_step"] == steps + 2
