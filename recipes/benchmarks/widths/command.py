"""The command of the benchmark ``widths``: servers that keep their weights in 32, 16, 8 and 4 bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recipes.benchmarks.command import Json, ModelFolder, NewTokens, Rounds, measure

if TYPE_CHECKING:
    from rich.progress import Progress

    from recipes.benchmarks.figures import Report


def widths(
    model: ModelFolder,
    width: Annotated[
        list[str] | None, typer.Option(help="float32, bfloat16, float16, int8, int4 or nf4; repeatable.")
    ] = None,
    gguf: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of the same model that llama.cpp decodes in turns; repeatable. Default: the model in F16, Q8_0 "
            "and Q4_0, where the package xllamacpp is installed."
        ),
    ] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Leave llama.cpp out.")] = False,
    prefix: Annotated[int, typer.Option(help="Tokens in the cache before the first one is timed.", min=1)] = 128,
    new_tokens: NewTokens = 32,
    rounds: Rounds = 7,
    json: Json = None,
) -> None:
    """Measure tokens, prompts and training steps through a server of each width, against transformers and llama.cpp."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.widths.run import bench_widths

        return bench_widths(
            model,
            widths=width or ["float32", "bfloat16", "int8", "int4", "nf4"],
            gguf=gguf or (),
            is_alone=alone,
            prefix_tokens=prefix,
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
        )

    measure("widths", run, json)
