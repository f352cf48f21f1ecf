"""The command of the benchmark ``formats``: what few bits cost a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from recipes.benchmarks.command import Json, ModelFolder, measure

if TYPE_CHECKING:
    from rich.progress import Progress

    from recipes.benchmarks.figures import Report


def formats(
    model: ModelFolder,
    format: Annotated[
        list[str] | None,
        typer.Option(help="fp8, pack-quantized, Q8_0, Q4_K, Q4_0, MXFP4, int8, int4 or nf4; repeatable."),
    ] = None,
    pieces: Annotated[int, typer.Option(help="Pieces of each text.", min=2, max=1000)] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a piece.", min=8, max=100_000)] = 256,
    dtype: Annotated[str, typer.Option(help="What servers of packed blocks compute in.")] = "float32",
    json: Json = None,
) -> None:
    """Measure losses on English and on Python, with blocks in each published format and in our own few bits."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.formats.run import bench_formats

        return bench_formats(model, formats=format, num_pieces=pieces, length=length, progress=progress, dtype=dtype)

    measure("formats", run, json)
