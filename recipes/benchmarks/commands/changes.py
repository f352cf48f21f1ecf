"""Commands about what travels or is kept, and what that changes in predictions and in training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recipes.benchmarks.command import Json, ModelFolder, NewTokens, Servers, measure
from swarm_plugins.errors import naming_extras

if TYPE_CHECKING:
    from rich.progress import Progress

    from recipes.benchmarks.figures import Report


def codec(
    model: ModelFolder,
    servers: Servers = 3,
    text: Annotated[
        Path | None, typer.Option(help="Text to predict. Default: presidential addresses.", exists=True, dir_okay=False)
    ] = None,
    pieces: Annotated[int, typer.Option(help="Pieces of text.", min=2, max=100_000)] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a piece.", min=8, max=100_000)] = 256,
    steps: Annotated[int, typer.Option(help="Also train an adapter for so many steps; 0: do not.", min=0)] = 0,
    seeds: Annotated[int, typer.Option(help="Trainings with each codec.", min=1, max=100)] = 3,
    json: Json = None,
) -> None:
    """Measure loss, greedy tokens, bytes and processor time of each codec of hidden states, through a chain."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.changes.codec import bench_codec

        return bench_codec(
            model,
            num_servers=servers,
            text=text,
            num_pieces=pieces,
            length=length,
            num_steps=steps,
            num_seeds=seeds,
            progress=progress,
        )

    measure("codec", run, json)


def kv(
    model: ModelFolder,
    text: Annotated[
        Path | None, typer.Option(help="Text to predict. Default: presidential addresses.", exists=True, dir_okay=False)
    ] = None,
    pieces: Annotated[int, typer.Option(help="Pieces of text.", min=2, max=100_000)] = 6,
    length: Annotated[int, typer.Option(help="Tokens of a piece.", min=8, max=100_000)] = 512,
    new_tokens: NewTokens = 16,
    json: Json = None,
) -> None:
    """Measure what sessions with keys and values in 8 bits take, and what that changes in predictions of a text."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.changes.kv import bench_kv

        return bench_kv(model, text=text, num_pieces=pieces, length=length, new_tokens=new_tokens, progress=progress)

    measure("kv", run, json)


def together(
    model: ModelFolder,
    peers: Annotated[int, typer.Option(help="Trainers of the run, and as many that train alone.", min=2, max=16)] = 3,
    seconds: Annotated[float, typer.Option(help="How long each trains.", min=1)] = 240.0,
    seeds: Annotated[int, typer.Option(help="Trainings of each kind.", min=1, max=100)] = 3,
    steps_per_round: Annotated[int, typer.Option(help="Local steps between two rounds.", min=1)] = 5,
    documents: Annotated[
        int, typer.Option(help="Texts of all peers together; an eighth is held out.", min=16, max=235)
    ] = 24,
    learning_rate: Annotated[float, typer.Option(help="Of the peers' own optimizers.", min=1e-7)] = 2e-3,
    plot: Annotated[Path | None, typer.Option(help="Draw the losses over time to this file.", dir_okay=False)] = None,
    json: Json = None,
) -> None:
    """Measure held-out loss after equal time: several Trainers that train one adapter, against each alone."""

    def run(progress: Progress) -> Report:
        with naming_extras():
            import lightning.pytorch  # noqa: F401  # the members' processes need it

        from recipes.benchmarks.together.compare import Comparison

        comparison = Comparison(
            directory=model,
            peers=peers,
            seconds=seconds,
            seeds=seeds,
            steps_per_round=steps_per_round,
            documents=documents,
            learning_rate=learning_rate,
        )
        return comparison.report(plot, progress)

    measure("together", run, json)


def privacy(
    model: ModelFolder,
    depth: Annotated[
        list[int] | None, typer.Option(help="Local blocks before the first server; repeatable.", min=0)
    ] = None,
    documents: Annotated[int, typer.Option(help="Addresses; an eighth is held out.", min=16, max=235)] = 128,
    json: Json = None,
) -> None:
    """Measure the share of input tokens that a curious first server recovers from the hidden states it receives."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.changes.privacy import bench_privacy

        return bench_privacy(model, depths=depth or [0, 1, 2, 4, 8], documents=documents, progress=progress)

    measure("privacy", run, json)
