"""The benchmark `offload` runs from end to end on a toy; its speeds mean nothing there, its equal tokens do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from programs import Programs
from typer.testing import CliRunner

from recipes.benchmarks.__main__ import app
from swarm_plugins.testing.models import save_tiny


@pytest.mark.slow
def test_offloaded_arms_run_under_the_limit_and_agree(tmp_path: Path, programs: Programs) -> None:
    model = save_tiny("mixtral", tmp_path / "model", num_layers=2)
    file = tmp_path / "figures.json"
    options = ["--fast=50%", "--rounds=1", "--new-tokens=4", "--without=resident", "--without=accelerate"]
    command = [sys.executable, "-m", "recipes.benchmarks", "offload", f"--model={model}", f"--json={file}"]
    result = programs.run([*command, *options], timeout=200)
    assert result.returncode == 0, result.stderr
    content = json.loads(file.read_text())
    assert [one["arm"] for one in content["arms"]] == [
        "offloaded",
        "without speculative loading",
        "without cache and speculation",
    ]
    assert all(one["tokens_per_s"] > 0 for one in content["arms"])
    # A few blocks of the file system: when libraries were first read. The weights have 211 kB.
    assert all(one["written_bytes"] < 1 << 16 for one in content["arms"])
    assert content["forecast"]["tokens_per_s"] > 0
    assert "forecast of swarm plan" in result.stdout
    assert result.stderr.strip() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "give either --model DIR or --random-model SCALE", id="no-model"),
        pytest.param(["--random-model", "2"], "invalid --random-model 2: expected more than 0", id="scale"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["offload", *arguments])
    assert result.exit_code == 2
    assert result.stderr.strip().startswith("python -m recipes.benchmarks offload: ")
    assert message in result.stderr
