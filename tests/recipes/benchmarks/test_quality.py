"""The benchmark `quality` on a toy: what it prints, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipes.benchmarks.__main__ import app
from swarm_plugins.testing.models import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("model"), num_layers=2)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["quality", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


def test_quality_names_a_directory_that_is_none(tmp_path: Path) -> None:
    code, output = run("--model", tmp_path / "none")
    assert code == 2
    assert "there is no directory" in output


def test_quality_compares_each_pair_of_widths_with_the_widest(model: Path, tmp_path: Path) -> None:
    text, figures = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text("we came over the pass in the late afternoon when the wind had dropped " * 4)
    widths = ["--experts", 16, "--experts", "nf4", "--attention", 16, "--attention", 4]
    code, output = run(
        "--model", model, *widths, "--text", text, "--text", "python", "--pieces", 3, "--length", 16, "--json", figures
    )
    assert code == 0
    assert "48 tokens of text.txt, 48 tokens of Python modules" in output
    found = json.loads(figures.read_text())
    assert {row["text"] for row in found["rows"]} == {"text.txt", "Python modules"}
    rows = {
        (row["attention_bits"], row["expert_bits"]): row for row in found["rows"] if row["text"] == "Python modules"
    }
    assert rows[16, 16]["bits_per_expert_weight"] >= 16
    assert rows.keys() == {(16, 16), (16, "nf4"), (4, 16), (4, "nf4")}
    assert rows[16, 16]["loss_change"]["mean"] == 0.0
    assert all(abs(row["loss_change"]["mean"]) > 1e-4 for key, row in rows.items() if key != (16, 16))
    # The same experts, so the same difference between the rests.
    sizes = {key: row["num_bytes"] for key, row in rows.items()}
    assert sizes[16, 16] - sizes[4, 16] == sizes[16, "nf4"] - sizes[4, "nf4"]


def test_the_papers_widths_are_one_word(model: Path, tmp_path: Path) -> None:
    text, figures = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text("we came over the pass in the late afternoon when the wind had dropped")
    size = ["--text", text, "--pieces", 2, "--length", 8]
    assert run("--model", model, "--paper", "--attention", 16, *size, "--json", figures)[0] == 0
    rows = json.loads(figures.read_text())["rows"]
    widths = [16, "4dq", "3dq", "2dq"]
    assert [(row["expert_bits"], row["attention_bits"]) for row in rows] == [(width, 16) for width in widths]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--experts", 7], "invalid --experts '7': expected 2, 3, 4, 8, 16", id="experts"),
        pytest.param(["--text", "wikitext"], "give a file in UTF-8, or one of addresses, python, wiki", id="text"),
        pytest.param(["--length", 4000], "tokens, at least 8000 are needed: give a longer one", id="short"),
    ],
)
def test_quality_refuses_in_one_sentence(model: Path, tmp_path: Path, arguments: list[object], words: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("we came over the pass")
    code, output = run("--model", model, *arguments, "--text", text)
    assert code == 2
    assert words in output
