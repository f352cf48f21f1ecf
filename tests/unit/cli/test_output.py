"""Messages name what was typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from swarm_plugins.cli.main import app
from swarm_plugins.cli.support.output import in_options
from swarm_plugins.offload.text import OFFLOAD_WORDS

NO_HOME = "~no-such-user/x"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param("fast_bytes is 1; raise fast_bytes", "--offload fast is 1; raise --offload fast", id="field"),
        pytest.param("a lower expert_bits.", "a lower --offload bits.", id="end-of-sentence"),
        pytest.param("/data/fast_bytes is no model", "/data/fast_bytes is no model", id="path"),
        pytest.param("OffloadConfig(expert_bits=...)", "OffloadConfig(expert_bits=...)", id="call"),
        pytest.param("my_fast_bytes_too", "my_fast_bytes_too", id="longer-name"),
    ],
)
def test_fields_become_options_and_nothing_else_does(message: str, expected: str) -> None:
    assert in_options(message, OFFLOAD_WORDS) == expected


def test_without_words_a_message_stays() -> None:
    assert in_options("fast_bytes is 1", {}) == "fast_bytes is 1"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["run", "m", "--offload", "bits=5"], "swarm run: invalid --offload bits=5: expected", id="run"),
        pytest.param(["serve", "m", "--offload", "readers=0"], "swarm serve: --offload readers is 0;", id="offload"),
        pytest.param(
            ["serve", "m", "--allowed-peers", ""],
            "swarm serve: --allowed-peers is empty, so no peer could be used; leave it out to allow any",
            id="nobody",
        ),
        pytest.param(["serve", "m", "--kv-bytes", "0"], "swarm serve: --kv-bytes must be above 0, got 0", id="serve"),
        pytest.param(
            ["serve", "m", "--blocks", "1/2", "--num-blocks", "3"],
            "swarm serve: --blocks 1/2 and --num-blocks 3 exclude each other",
            id="two-spans",
        ),
        pytest.param(
            ["quantize", "m", "--out", "o", "--experts", "5"],
            "swarm quantize: invalid --experts '5': expected",
            id="experts",
        ),
        pytest.param(
            ["serve", "m", "--blocks", "all"], "swarm serve: invalid --blocks 'all': expected A:B such as", id="blocks"
        ),
        pytest.param(["serve", "m", "--blocks", f"1:{'9' * 5000}"], "9': expected A:B such as 0:10", id="huge-blocks"),
        pytest.param(["serve", "m", "--offload", f"fast={'9' * 400}"], "number of up to 18 digits", id="huge-size"),
        *(
            pytest.param(arguments, f"'{NO_HOME}' is in a home directory that is not known here", id=name)
            for name, arguments in {
                "model": ["serve", NO_HOME],
                "adapter": ["merge", NO_HOME, "--out", "o"],
                "out": ["merge", "m", "--out", NO_HOME],
                "quantized": ["quantize", "m", "--out", NO_HOME],
                "repo": ["eval", NO_HOME, "--task", "t", "--local"],
                "task": ["eval", "me/a", "--task", NO_HOME, "--local"],
                "base": ["eval", "me/a", "--task", "t", "--local", "--base", NO_HOME],
            }.items()
        ),
    ],
)
def test_commands_speak_of_their_options(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_help_of_every_command_begins_with_an_imperative() -> None:
    todo, first_words = [typer.main.get_command(app)], set()
    while todo:
        commands = getattr(todo.pop(), "commands", {})
        todo += commands.values()
        first_words |= {(one.help or "").split()[0] for one in commands.values()}
    verbs = {
        "Evaluate",
        "Host",
        "Let",
        "Make",
        "Merge",
        "Print",
        "Publish",
        "Serve",
        "Show",
        "Talk",
        "Train",
        "Write",
    }
    assert first_words == verbs


def test_help_shows_every_command_in_a_group() -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--help"]).output
    groups = dict.fromkeys(re.findall(r"^╭─ (.+?) ─", shown, re.MULTILINE))
    names = ["Serve and join", "Use", "Train and publish", "Offload experts", "Inspect", "Try"]
    assert list(groups) == ["Options", *names], "commands without a group stand under Commands"


@pytest.mark.parametrize("name", sorted(typer.main.get_command(app).commands))  # type: ignore[attr-defined]
def test_help_cuts_no_word_in_a_narrow_terminal(name: str) -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [name, "--help"])
    assert shown.exit_code == 0
    assert "…" not in shown.output


def test_help_hides_no_default_as_markup() -> None:
    # rich takes [words] for markup; typer escapes its own.
    todo = [typer.main.get_command(app)]
    for command in todo:
        todo += getattr(command, "commands", {}).values()
        helps = [getattr(parameter, "help", None) or "" for parameter in command.params]
        assert not [text for text in helps if "[" in text]
