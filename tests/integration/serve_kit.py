"""`swarm serve` as a process of its own."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ADDRESS = r"--initial-peers (\S+)"
"""Where the line of a server that is ready has its address."""


@contextlib.contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Runs `swarm serve` with one thread, its standard error in a file; kills it if it still runs at the end."""
    command = [sys.executable, "-m", "swarm_plugins", "serve", str(model), "--threads", "1", *options]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def found_in_line(process: subprocess.Popen[str], pattern: str, log: Path) -> str:
    """Waits for the next line that a server prints, and returns the group of a pattern in it."""
    assert process.stdout is not None
    found = re.search(pattern, process.stdout.readline())
    assert found is not None, log.read_text()
    return found[1]
