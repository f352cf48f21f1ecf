"""Commands about what a machine computes with: products of its CPU, a GPU."""

from __future__ import annotations


from typing import TYPE_CHECKING, Annotated

import typer

from recipes.benchmarks.command import Json, NewTokens, Rounds, measure

if TYPE_CHECKING:
    from rich.progress import Progress

    from recipes.benchmarks.figures import Report


def kernels(
    rows: Annotated[int, typer.Option(help="Rows of the weight.", min=1, max=65536)] = 1536,
    columns: Annotated[int, typer.Option(help="Columns of the weight.", min=1, max=65536)] = 576,
    rounds: Rounds = 20,
    json: Json = None,
) -> None:
    """Measure every product with a frozen weight that this machine's CPU has: 1, 8, 64 and 512 rows, from memory."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.kernels import bench_kernels

        return bench_kernels((rows, columns), rounds=rounds, progress=progress)

    measure("kernels", run, json)


def device(
    device: Annotated[str, typer.Option(help="cuda, cuda:INDEX, or cpu to try the benchmark itself.")] = "cuda",
    width: Annotated[list[str] | None, typer.Option(help="none, int8, int4 or nf4; repeatable.")] = None,
    small: Annotated[bool, typer.Option(help="Take models of a few thousand weights.")] = False,
    new_tokens: NewTokens = 64,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """Measure a server on a GPU, and experts offloaded from one, against transformers on the same GPU."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.device import bench_device

        return bench_device(
            device,
            widths=width or ["none", "int8", "nf4"],
            is_small=small,
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
        )

    measure("device", run, json)
