"""`swarm identity`: the peer id of a key file, known before a server has started."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from swarm_plugins.cli.main import app
from swarm_plugins.transport.identity import load_identity


def test_it_makes_a_key_once_and_prints_its_peer_id(tmp_path: Path) -> None:
    key = tmp_path / "first.key"
    first, second = (CliRunner().invoke(app, ["identity", str(key)]) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert first.stdout == second.stdout == f"{load_identity(key).peer_id}\n"
    assert key.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_does_not_exist_is_told(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["identity", str(tmp_path / "none" / "first.key")])
    assert result.exit_code == 2
    assert "give a file in a directory that exists" in " ".join(result.output.split())
