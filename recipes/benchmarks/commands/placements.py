"""Commands that simulate swarms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recipes.benchmarks.command import Json, measure

if TYPE_CHECKING:
    from rich.progress import Progress

    from recipes.benchmarks.figures import Report


def placement(
    servers: Annotated[list[int] | None, typer.Option(help="Servers of a swarm; repeatable.", min=1, max=5000)] = None,
    churn_h: Annotated[float, typer.Option(help="Simulated hours in which servers come and go.", min=0, max=100)] = 4.0,
    seed: Annotated[int, typer.Option(help="Of the random events.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw throughput and optimum over time, to this file.", dir_okay=False)
    ] = None,
    json: Json = None,
) -> None:
    """Simulate swarms of 10, 100 and 1,000 servers that place themselves, against the best placement."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.places.run import bench_placement

        sizes = servers or [10, 100, 1000]
        return bench_placement(sizes=sizes, churn_h=churn_h, seed=seed, plot=plot, progress=progress)

    measure("placement", run, json)
