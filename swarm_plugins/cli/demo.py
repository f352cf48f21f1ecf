"""``swarm demo`` and ``swarm demo-model``: every step on this machine, on a real model and real text."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from swarm_plugins.cli.support.output import one_sentence_errors
from swarm_plugins.noise import quiet_command


def demo(
    method: Annotated[
        Literal["lora", "prompt"], typer.Option(help="Adapter to tune: low-rank updates or a soft prompt.")
    ] = "lora",
    steps: Annotated[int | None, typer.Option(help="Steps of training.", min=1, max=10_000)] = None,
    short: Annotated[bool, typer.Option("--short", help="Take a few steps on little text.")] = False,
    folder: Annotated[
        Path, typer.Option("--dir", help="Folder for the Hub and the adapter; made if needed.", file_okay=False)
    ] = Path("swarm-demo"),
    model: Annotated[
        Path | None,
        typer.Option(help="Another model, a directory. Default: the one of `swarm demo-model`.", exists=True),
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
        from swarm_plugins.demo.tour import SHORT, Tour, TourSettings
        from swarm_plugins.demo.tuning import tune

        # A service manager or CI ends commands with this signal: the servers then end as on Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        length = (SHORT if short else {}) | ({} if steps is None else {"steps": steps})
        settings = TourSettings(method=method, threads=cores, model=model, **length)
        Tour(settings, folder, tune=tune, write=partial(typer.echo, nl=False)).run()


def demo_model(
    variant: Annotated[str, typer.Option(help="Experts x neurons: 4x1536 (exact) or 8x1152.")] = "4x1536",
    out: Annotated[Path | None, typer.Option(help="Folder to write to. Default: the cache.", file_okay=False)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the routers.", min=0)] = 0,
) -> None:
    """Make a real mixture-of-experts model from SmolLM2-135M-Instruct: an ordinary checkpoint in Mixtral's format."""
    quiet_command()
    with one_sentence_errors("demo-model"):
        from swarm_plugins.demo.model import default_folder, find_variant
        from swarm_plugins.demo.model import demo_model as make

        chosen = find_variant(variant)
        folder = default_folder(chosen) if out is None else out
        built = make(chosen, folder, seed=seed)
        typer.echo(
            f"{folder}: {built.variant}, loss {built.loss:.4f} (dense model {built.dense_loss:.4f}), logits differ by "
            f"at most {built.logit_difference:.1e}, use of the experts even to {built.load_entropy:.2f} of 1"
        )
