"""`swarm eval`: names from a repository are text, whatever they look like."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_plugins.cli.eval import _print


def test_names_from_a_repository_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [["version", "qa[hard]/acc", "x[/b]"], ["v1", "0.5 ± 0.1", "\x1b]0;title\x07"]]
    monkeypatch.setattr("swarm_plugins.hub.results_card.results_table", lambda _: rows)
    monkeypatch.setattr("swarm_plugins.hub.results.series_of", lambda _: None)
    done: Any = SimpleNamespace(records=[1], num_new=1, commit=None)
    _print(done, SimpleNamespace(repo_id="me/a", push=False, folder=Path("out")), as_json=False)  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "qa[hard]/acc" in printed
    assert "x[/b]" in printed
    assert "\x1b]" not in printed
