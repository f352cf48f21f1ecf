"""`swarm serve` as a process of its own."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from programs import Programs

ADDRESS = r"--initial-peers (\S+)"
"""Where the line of a server that is ready has its address."""


@contextlib.contextmanager
def serving(programs: Programs, model: Path, log: Path, *options: str) -> Iterator[Any]:
    """Runs `swarm serve` with one thread, its standard error in a file; kills it if it still runs at the end."""
    command = [sys.executable, "-m", "swarm_plugins", "serve", model, "--threads", "1", *options]
    with log.open("w") as errors:
        process = programs.popen(command, errors=errors, swarms=False)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def found_in_line(process: Any, pattern: str, log: Path) -> str:
    """Waits for the next line that a server prints, and returns the group of a pattern in it."""
    assert process.stdout is not None
    found = re.search(pattern, process.stdout.readline())
    assert found is not None, log.read_text()
    return found[1]
