"""`swarm merge` on a toy: what it prints, and how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llama_cpp_kit import save_model
from merging_kit import load, save_adapter
from typer.testing import CliRunner

from swarm_plugins.cli.main import app
from swarm_plugins.cli.merge import DTYPES, GGUF_TYPES
from swarm_plugins.merging.llama_cpp.file import GgufType
from swarm_plugins.merging.merge import FloatName


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter", save_model("llama", tmp_path / "base"))


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["merge", *map(str, arguments)])
    assert "Traceback" not in result.output
    return result.exit_code, " ".join(result.output.split())


def test_it_writes_each_form(tmp_path: Path, adapter: Path) -> None:
    folder, whole, lora = (tmp_path / name for name in ("merged", "merged.gguf", "lora.gguf"))
    code, output = run(adapter, "--out", folder, "--dtype", "bfloat16")
    assert (code, output.endswith(f"{folder}: {adapter} merged into its base")) == (0, True)
    assert load(folder).dtype == torch.bfloat16
    assert run(adapter, "--out", whole, "--gguf", "q8_0", "--base", tmp_path / "base")[0] == 0
    code, output = run(adapter, "--out", lora, "--gguf-lora")
    assert (code, output.endswith(f"{lora}: {adapter}, to load beside its base")) == (0, True)
    assert [one.read_bytes()[:4] for one in (whole, lora)] == [b"GGUF"] * 2


def test_the_choices_are_those_of_the_library() -> None:
    assert FloatName.__args__ == DTYPES
    assert GgufType.__args__ == GGUF_TYPES


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--out", "m", "--dtype", "fp8"], "invalid --dtype 'fp8': expected float32, bfloat16", id="dtype"),
        pytest.param(["--out", "m.gguf", "--gguf", "Q4_K"], "invalid --gguf 'Q4_K': expected F32, F16", id="gguf"),
        pytest.param(
            ["--out", "m", "--gguf", "F16", "--gguf-lora"], "--gguf and --gguf-lora exclude each other", id="both"
        ),
        pytest.param(["--out", "m", "--gguf", "F16"], "m is not the name of a GGUF file: give NAME.gguf", id="suffix"),
        pytest.param(["--out", "."], ". exists already: give a new name, or remove it", id="taken"),
        pytest.param(["--out", "m"], "there is no directory './none': give the folder of an adapter", id="adapter"),
    ],
)
def test_it_refuses_in_one_sentence(arguments: list[str], words: str) -> None:
    code, output = run("./none", *arguments)
    assert code == 2
    assert words in output
