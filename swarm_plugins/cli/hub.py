"""``swarm hub``: a Hub on this machine, for trying things out without an account."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from swarm_plugins.cli.support.errors import one_sentence_errors

__all__ = ["hub"]


def hub(
    folder: Annotated[Path, typer.Option("--dir", help="Folder that keeps what is pushed; made if needed.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for a free one.")] = 0,
) -> None:
    """Serve a Hub from a folder until stopped; prints what to export for the libraries of Hugging Face to use it."""
    with one_sentence_errors("hub"):
        from swarm_plugins.local_hub.local_hub import LocalHub

        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        with LocalHub(folder, port=port) as running:
            # Any token will do, but the libraries do not push without one. Xet is the real Hub's own protocol.
            typer.echo(f"export HF_ENDPOINT={running.endpoint} HF_TOKEN=local HF_HUB_DISABLE_XET=1")
            stopped.wait()
