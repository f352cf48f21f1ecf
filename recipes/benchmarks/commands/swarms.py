"""Commands that compare a swarm on this machine with the same model run here."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recipes.benchmarks.command import Json, ModelFolder, NewTokens, Rounds, Servers, measure

if TYPE_CHECKING:
    from rich.progress import Progress

    from recipes.benchmarks.figures import Report


def decode(
    model: ModelFolder,
    servers: Annotated[list[int] | None, typer.Option(help="Servers in the chain; repeatable.")] = None,
    prefix: Annotated[int, typer.Option(help="Tokens in the cache before the first one is timed.", min=1)] = 128,
    new_tokens: NewTokens = 32,
    rounds: Rounds = 7,
    json: Json = None,
) -> None:
    """Measure the time per token of one sequence after a prefix, through chains of 1 and 3 servers."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.decode import bench_decode

        return bench_decode(
            model,
            servers=servers or [1, 3],
            prefix_tokens=prefix,
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
        )

    measure("decode", run, json)


def train(model: ModelFolder, servers: Servers = 1, rounds: Rounds = 7, json: Json = None) -> None:
    """Measure forward, and forward with backward of a soft prompt, for 1 x 64 and 8 x 64 tokens."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.train import bench_train

        return bench_train(model, num_servers=servers, rounds=rounds, progress=progress)

    measure("train", run, json)


def sessions(
    model: ModelFolder,
    sessions: Annotated[
        list[int] | None, typer.Option(help="Client processes that run at the same time; repeatable.")
    ] = None,
    width: Annotated[
        str | None,
        typer.Option(help="Instead, compare a step in this width, such as int8, with one session's in float32."),
    ] = None,
    servers: Servers = 1,
    new_tokens: NewTokens = 32,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """Measure the tokens per second of 4 and of 8 client processes together, against one alone."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.sessions.narrow import bench_narrow
        from recipes.benchmarks.sessions.run import bench_sessions

        bench = bench_sessions if width is None else partial(bench_narrow, width=width)
        return bench(
            model,
            sessions=sessions or [4, 8],
            num_servers=servers,
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
        )

    measure("sessions", run, json)


def calls(
    model: ModelFolder,
    servers: Servers = 2,
    group: Annotated[int, typer.Option(help="Samples of a prompt.", min=2, max=32)] = 8,
    new_tokens: NewTokens = 48,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """Measure training by calls on local servers: steps and samples over the same done here, and groups of samples."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.web.calls import bench_calls

        return bench_calls(
            model, num_servers=servers, group=group, new_tokens=new_tokens, rounds=rounds, progress=progress
        )

    measure("calls", run, json)


def curves(
    model: ModelFolder,
    servers: Servers = 2,
    option: Annotated[
        list[str] | None, typer.Option(help="Word for examples/train_by_calls.py, such as --steps=8; repeatable.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the curves to this file, an SVG.", dir_okay=False)
    ] = None,
    json: Json = None,
) -> None:
    """Train by calls on local servers, on texts and by rewards, as the example does; show both curves."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.web.curves import bench_curves
        from recipes.benchmarks.papers.shown import check_plot

        check_plot(plot)
        return bench_curves(model, num_servers=servers, options=option or (), plot=plot, progress=progress)

    measure("curves", run, json)


def api(
    model: ModelFolder,
    servers: Servers = 2,
    clients: Annotated[int, typer.Option(help="Clients that ask at once.", min=2, max=64)] = 8,
    chars: Annotated[int, typer.Option(help="Letters of a conversation's first turn.", min=16, max=100_000)] = 2600,
    new_tokens: NewTokens = 48,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """Measure `swarm api` on local servers: many clients at once over one, and a conversation's second turn."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.web.chats import bench_api

        return bench_api(
            model,
            num_servers=servers,
            clients=clients,
            chars=chars,
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
        )

    measure("api", run, json)


def verify(model: ModelFolder, servers: Servers = 1, rounds: Rounds = 5, json: Json = None) -> None:
    """Measure what receipts and spot checks cost at their floor, against the same calls without them."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.verify import bench_verify

        return bench_verify(model, num_servers=servers, rounds=rounds, progress=progress)

    measure("verify", run, json)
