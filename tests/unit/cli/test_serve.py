"""`swarm serve`: which swarm it joins, and that a slip costs no time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm_plugins.cli.main import app
from swarm_plugins.cli.serve import parse_experts
from swarm_plugins.cli.support.config_options import parsed
from swarm_plugins.errors import ConfigError
from swarm_plugins.server.config import ServeConfig

PEER = "12D3KooWHTzWXxbE9AWiBme5J3Az76rw2KWvTFW2nRUwFGLbbjDn"
FIRST, SECOND = (f"/ip4/192.0.2.{number}/tcp/5/p2p/{PEER}" for number in (1, 2))


class Parent:
    """What an embedded server is told."""

    def read_peers(self) -> list[str]:
        return [SECOND]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The addresses that each server would have joined by."""
    found: list[tuple[str, ...]] = []
    process = "swarm_plugins.server.process"
    monkeypatch.setattr(f"{process}.prepare_process", lambda *_, **__: None)
    monkeypatch.setattr(f"{process}.run_server", lambda server, _: found.append(server.config.initial_peers))
    monkeypatch.setattr("swarm_plugins.server.embedding.Embedding.take_over", Parent)
    return found


@pytest.mark.parametrize(
    ("environment", "arguments", "expected"),
    [
        pytest.param("", [], (), id="alone"),
        pytest.param(FIRST, [], (FIRST,), id="environment"),
        pytest.param(f"{FIRST} {SECOND}", [], (FIRST, SECOND), id="blanks"),
        pytest.param(f"{FIRST},{SECOND}", [], (FIRST, SECOND), id="commas"),
        pytest.param(FIRST, ["--initial-peers", SECOND], (SECOND,), id="option-wins"),
        pytest.param(FIRST, ["--embedded"], (SECOND,), id="embedded"),
    ],
)
def test_the_swarm_is_that_of_the_option_or_of_the_environment(
    environment: str, arguments: list[str], expected: tuple[str, ...], joined: list[Any]
) -> None:
    result = CliRunner(env={"SWARM_INITIAL_PEERS": environment}).invoke(app, ["serve", "m", *arguments])
    assert result.exit_code == 0, result.output
    assert joined == [expected]


def test_help_names_the_environment_variable() -> None:
    assert "SWARM_INITIAL_PEERS" in CliRunner(env={"COLUMNS": "200"}).invoke(app, ["serve", "--help"]).output


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["serve", "m", "--blocks", "all"], id="blocks"),
        pytest.param(["serve", "m", "--kv-bytes", "lots"], id="size"),
        pytest.param(["serve", "m", "--offload", "fast=lots"], id="offload"),
        pytest.param(["serve", "m", "--dtype", "float8"], id="dtype"),
        pytest.param(["serve", "m", "--secret-file", "empty"], id="secret"),
        pytest.param(["serve", "m", "--identity", "empty"], id="identity"),
        pytest.param(["serve", "m", "--identity", "none/key"], id="identity-nowhere"),
        pytest.param(["serve", "m", "--relay", "/ip4/1.2.3.4/tcp/5"], id="relay"),
        pytest.param(["serve", "m", "--allowed-peers", "bob"], id="allowed-peers"),
        pytest.param(["serve", "m", "--initial-peers", "1.2.3.4:5"], id="initial-peers"),
        pytest.param(["chat", "m", "--initial-peers", FIRST, "--secret-file", "empty"], id="chat"),
        pytest.param(["status", "--initial-peers", FIRST, "--identity", "empty"], id="status"),
        pytest.param(["drain", FIRST, "--identity", "empty"], id="drain"),
        pytest.param(["identity", "empty"], id="identity-of-nothing"),
        pytest.param(["identity", "."], id="identity-folder"),
        pytest.param(["run", "m", "--offload", "bits=5"], id="run"),
        pytest.param(["plan", "m", "--memory", "lots"], id="plan"),
        pytest.param(["quantize", "m", "--out", "o", "--experts", "5"], id="quantize"),
        pytest.param(["serve", "."], id="serve-no-model"),
        pytest.param(["serve", "./none"], id="serve-nowhere"),
        pytest.param(["chat", "./none", "--initial-peers", FIRST], id="chat-nowhere"),
        pytest.param(["chat", "m", "--initial-peers", FIRST, "--draft", "look"], id="draft"),
        pytest.param(["run", "./none"], id="run-nowhere"),
        pytest.param(["api", "./none", "--local-swarm", "1"], id="api-nowhere"),
        pytest.param(["run", "m", "--adapter", "./none"], id="adapter"),
        pytest.param(["plan", "two words"], id="plan-name"),
        pytest.param(["quantize", "empty", "--out", "o"], id="quantize-file"),
        pytest.param(["audit", "peer", "--model", "./none"], id="audit"),
    ],
)
def test_a_slip_is_told_before_torch_is_imported(arguments: list[str], tmp_path: Path) -> None:
    code = """
import sys
from typer.testing import CliRunner
from swarm_plugins.cli.main import app
code = CliRunner().invoke(app, sys.argv[1:]).exit_code
heavy = [name in sys.modules for name in ("torch", "transformers", "hivemind")]
sys.exit(code + 10 * sum(heavy))
"""
    (tmp_path / "empty").touch(0o600)
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(None, (None, False), id="whole-blocks"),
        pytest.param("0:32", (range(32), False), id="holder"),
        pytest.param("remote", (None, True), id="owner"),
        pytest.param("32:64,remote", (range(32, 64), True), id="owner-with-some"),
        pytest.param("32:64, remote", (range(32, 64), True), id="blank"),
    ],
)
def test_experts_are_held_fetched_or_both(text: str | None, expected: tuple[range | None, bool]) -> None:
    assert parse_experts(text) == expected


@pytest.mark.parametrize("text", ["", "all", "0-4", "0:4,", ",remote", "remote,0:4", "0:4,0:8", "remote,", "1/2"])
def test_other_words_for_experts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid --experts .*: expected A:B such as 0:32, remote, or A:B,remote"):
        parse_experts(text)


@pytest.mark.parametrize("text", ["", "2", "0:2", "a/b", "-1/2"])
def test_a_slice_is_two_numbers(text: str) -> None:
    assert parsed(ServeConfig, {"slice": "0/2"}) == {"slice": (0, 2)}
    with pytest.raises(ConfigError, match=r"invalid --slice .*: expected K/N such as 0/2"):
        parsed(ServeConfig, {"slice": text})
