"""`swarm quantize` on a toy: what it prints, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm_plugins import load_offloaded
from swarm_plugins.cli.main import app
from swarm_plugins.testing.models import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("model"), num_layers=2)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert "Traceback" not in result.output
    return result.exit_code, " ".join(result.output.split())


def test_quantize_writes_what_load_offloaded_loads_and_says_how_large_it_is(model: Path, tmp_path: Path) -> None:
    code, output = run("quantize", model, "--out", tmp_path / "q", "--experts", 4, "--attention", 8)
    assert code == 0
    assert "experts" in output
    assert "at 4 bits (" in output
    assert "at 8 bits" in output
    assert load_offloaded(tmp_path / "q", device="cpu").config.model_type == "mixtral"


def test_quantize_writes_nf4(model: Path, tmp_path: Path) -> None:
    code, output = run("quantize", model, "--out", tmp_path / "q", "--experts", "nf4", "--attention", "nf4")
    assert code == 0
    assert "at nf4 (" in output
    about = json.loads((tmp_path / "q" / "swarm_quantized.json").read_text())
    assert (about["expert_bits"], about["other_bits"], about["group_sizes"]) == ("nf4", "nf4", {"nf4": 64})
    code, output = run("plan", tmp_path / "q", "--memory", "1GB", "--disk-rate", "1GB")
    assert code == 0
    assert "nf4, as stored" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--experts", 5], "invalid --experts '5': expected 2, 3, 4, 8, 16", id="experts"),
        pytest.param(
            ["--attention", 6], "invalid --attention '6': expected 2, 3, 4, 8, 16, nf4, 2dq, 3dq or 4dq", id="attention"
        ),
        pytest.param(["--revision", "v1"], "revision='v1' was given for the directory", id="revision"),
    ],
)
def test_quantize_refuses_in_one_sentence(model: Path, tmp_path: Path, arguments: list[object], words: str) -> None:
    code, output = run("quantize", model, "--out", tmp_path / "q", *arguments)
    assert code == 2
    assert words in output
    assert not (tmp_path / "q").exists()


def test_quantize_refuses_a_place_below_a_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("")
    code, output = run("quantize", model, "--out", tmp_path / "notes" / "q")
    assert code == 2
    assert "notes is a file: give another directory" in output


def test_quantize_refuses_a_model_without_experts(tmp_path: Path) -> None:
    code, output = run("quantize", save_tiny("llama", tmp_path / "llama"), "--out", tmp_path / "q")
    assert code == 1
    assert "has no experts" in output
