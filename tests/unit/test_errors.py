"""An exception is quoted in one line, whatever another library put into it."""

from __future__ import annotations

import pytest

from swarm_plugins.errors import one_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        pytest.param(ValueError("size  mismatch:\n\tfor a.weight.\n"), "size mismatch: for a.weight", id="lines"),
        pytest.param(KeyError(), "KeyError", id="no-text"),
        pytest.param(OSError("\x1b[31mred"), "?[31mred", id="terminal-codes"),
        pytest.param(ValueError("x" * 301), "x" * 297 + "...", id="long"),
    ],
)
def test_an_exception_is_one_line(error: Exception, line: str) -> None:
    assert one_line(error) == line


def test_the_kind_comes_first() -> None:
    assert one_line(ValueError("no"), with_kind=True) == "ValueError: no"
    assert one_line(ValueError(), with_kind=True) == "ValueError"
