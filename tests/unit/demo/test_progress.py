"""Progress is a bar at a terminal and plain lines in a file."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from swarm_plugins.demo import progress as under_test
from swarm_plugins.demo.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_plain_lines_at_the_start_the_end_and_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 2.0, 11.5, 12.0])
    monkeypatch.setattr(under_test, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Progress("training", 4, "steps") as bar:
        for loss in (3.0, 2.5, 2.0, 1.5):
            bar.advance(note=f"loss {loss}")
    said = capsys.readouterr().err
    assert said == (
        "training: 1 of 4 steps (loss 3.0, 1 s)\ntraining: 3 of 4 steps (loss 2.0, 12 s)\n"
        "training: 4 of 4 steps (loss 1.5, 12 s)\n"
    )


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("reading text", 2, "pieces") as bar:
        bar.advance(2, note="loss 3.0")
    assert "reading text" in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
    assert "\r" in terminal.getvalue()
