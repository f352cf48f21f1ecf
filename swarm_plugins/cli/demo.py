"""``swarm demo``: the whole way on this machine, on a real model and real text."""

from __future__ import annotations

import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from swarm_plugins.cli.support.errors import one_sentence_errors
from swarm_plugins.noise import quiet_command

__all__ = ["demo"]


class Method(StrEnum):
    """What is tuned."""

    lora = "lora"
    prompt = "prompt"


def demo(
    method: Annotated[Method, typer.Option(help="What is tuned: low-rank updates or a soft prompt.")] = Method.lora,
    steps: Annotated[int | None, typer.Option(help="Steps of training.", min=1, max=10_000)] = None,
    short: Annotated[bool, typer.Option("--short", help="A few steps and little text: shows that it works.")] = False,
    folder: Annotated[
        Path, typer.Option("--dir", help="Folder for the Hub and the adapter; made if needed.", file_okay=False)
    ] = Path("swarm-demo"),
    model: Annotated[
        Path | None, typer.Option(help="Model to use. Default: that of `swarm demo-model`.", exists=True)
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each process. Default: the cores.", min=1)] = None,
) -> None:
    """Make a model, serve it with three servers, tune an adapter, talk through it, publish it and load it back."""
    cores = threads or min(os.cpu_count() or 1, 8)
    # Read when torch is imported. The servers of a chain work one after the other: each may use all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    quiet_command()
    with one_sentence_errors("demo"):
        from swarm_plugins.demo.tour import Tour, TourSettings

        # A service manager or CI ends commands with this one: the servers then end as on Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        settings = TourSettings.make(method=method.value, steps=steps, is_short=short, threads=cores, model=model)
        Tour(settings, folder, write=_write).run()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
