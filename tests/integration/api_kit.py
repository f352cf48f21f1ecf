"""`swarm api` as a process."""

from __future__ import annotations

import contextlib
import re
import selectors
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from programs import Programs
from web_kit import byte_tokenizer

from swarm_plugins.local_hub import LocalHub
from swarm_plugins.testing.models import save_tiny

START_S = 300.0
READY = re.compile(r"listening at (http://127\.0\.0\.1:\d+) \(API: \1/v1(; training: TINKER_BASE_URL=\1)?\)\n")


def save_model(family: str, path: Path, **settings: Any) -> Path:
    byte_tokenizer().save_pretrained(save_tiny(family, path, **settings))
    return path


@contextlib.contextmanager
def api(
    programs: Programs,
    *arguments: str,
    hub: LocalHub | None = None,
    home: Path,
    end: signal.Signals = signal.SIGINT,
) -> Iterator[str]:
    """Runs ``swarm api``; yields its address, and leaves by Ctrl-C, or as ``end`` says."""
    command = [sys.executable, "-m", "swarm_plugins", "api", "--port", "0", *arguments]
    environment: dict[str, str | None] = {"SWARM_INITIAL_PEERS": None}
    if hub is not None:
        environment |= {"HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint}
    log = home / "api.log"
    with log.open("w") as errors:
        process = programs.popen(command, errors=errors, environment=environment)
    family: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            assert ready.select(START_S)
        said = process.stdout.readline()
        found = re.fullmatch(
            r"listening at (http://127\.0\.0\.1:\d+) \(API: \1/v1(; training: TINKER_BASE_URL=\1)?\)\n", said
        )
        assert found is not None, said + log.read_text()
        family = psutil.Process(process.pid).children(recursive=True)
        yield found[1]
    finally:
        process.send_signal(end)
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == (130 if end == signal.SIGINT else -end), log.read_text()
    assert not psutil.wait_procs(family, timeout=30)[1]
