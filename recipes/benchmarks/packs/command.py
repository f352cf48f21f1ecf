"""The command of the benchmark ``packs``: sessions of a server in one forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from recipes.benchmarks.command import Json, ModelFolder, NewTokens, Rounds, measure

if TYPE_CHECKING:
    from rich.progress import Progress

    from recipes.benchmarks.figures import Report


def packs(
    model: ModelFolder,
    sessions: Annotated[int, typer.Option(help="Sessions in a pack.", min=2, max=64)] = 8,
    prefix: Annotated[int, typer.Option(help="Most tokens in the cache of a session.", min=1)] = 32,
    new_tokens: NewTokens = 8,
    rounds: Rounds = 7,
    json: Json = None,
) -> None:
    """Measure decoding steps of several sessions in one forward of a server's blocks, against one after another."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.packs.run import bench_packs

        return bench_packs(
            model, num_sessions=sessions, prefix=prefix, new_tokens=new_tokens, rounds=rounds, progress=progress
        )

    measure("packs", run, json)
