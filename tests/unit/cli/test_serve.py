"""`swarm serve`: which swarm it joins, and that a slip costs no time."""

from __future__ import annotations

import json
import subprocess
import sys
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


SLIPS = {
    "blocks": ["serve", "m", "--blocks", "all"],
    "size": ["serve", "m", "--kv-bytes", "lots"],
    "offload": ["serve", "m", "--offload", "fast=lots"],
    "dtype": ["serve", "m", "--dtype", "float8"],
    "secret": ["serve", "m", "--secret-file", "empty"],
    "identity": ["serve", "m", "--identity", "empty"],
    "identity-nowhere": ["serve", "m", "--identity", "none/key"],
    "relay": ["serve", "m", "--relay", "/ip4/1.2.3.4/tcp/5"],
    "allowed-peers": ["serve", "m", "--allowed-peers", "bob"],
    "initial-peers": ["serve", "m", "--initial-peers", "1.2.3.4:5"],
    "chat": ["chat", "m", "--initial-peers", FIRST, "--secret-file", "empty"],
    "status": ["status", "--initial-peers", FIRST, "--identity", "empty"],
    "drain": ["drain", FIRST, "--identity", "empty"],
    "identity-of-nothing": ["identity", "empty"],
    "identity-folder": ["identity", "."],
    "run": ["run", "m", "--offload", "bits=5"],
    "plan": ["plan", "m", "--memory", "lots"],
    "quantize": ["quantize", "m", "--out", "o", "--experts", "5"],
    "serve-no-model": ["serve", "."],
    "serve-nowhere": ["serve", "./none"],
    "chat-nowhere": ["chat", "./none", "--initial-peers", FIRST],
    "draft": ["chat", "m", "--initial-peers", FIRST, "--draft", "look"],
    "run-nowhere": ["run", "./none"],
    "api-nowhere": ["api", "./none", "--local-swarm", "1"],
    "adapter": ["run", "m", "--adapter", "./none"],
    "plan-name": ["plan", "two words"],
    "quantize-file": ["quantize", "empty", "--out", "o"],
    "audit": ["audit", "peer", "--model", "./none"],
}
RUN_ALL = """
import json, os, sys
from typer.testing import CliRunner
from swarm_plugins.cli.main import app

found = {}
for name, arguments in json.loads(sys.argv[1]).items():
    code = CliRunner().invoke(app, arguments).exit_code
    found[name] = [code, *(heavy for heavy in ("torch", "transformers", "hivemind") if heavy in sys.modules)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """For each slip its exit status, and which heavy modules are there then: all are made in one process, in turn."""
    folder = tmp_path_factory.mktemp("slips")
    (folder / "empty").touch(0o600)
    command = [sys.executable, "-c", RUN_ALL, json.dumps(SLIPS)]
    done = subprocess.run(command, cwd=folder, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_told_before_torch_is_imported(name: str, told: dict[str, list[Any]]) -> None:
    assert told[name] == [2]


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
