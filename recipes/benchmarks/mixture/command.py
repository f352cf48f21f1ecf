"""The command of the benchmark ``mixture``: offloaded experts in 4 bits against llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from recipes.benchmarks.command import Json, ModelFolder, NewTokens, Rounds, measure

if TYPE_CHECKING:
    from rich.progress import Progress

    from recipes.benchmarks.figures import Report


def mixture(
    model: ModelFolder,
    fast: Annotated[str, typer.Option(help="Share of the experts that may be in memory under the limit.")] = "50%",
    dtype: Annotated[str, typer.Option(help="Type that we compute in: float32 or bfloat16.")] = "float32",
    new_tokens: NewTokens = 32,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """Measure a mixture of experts in 4 bits, in memory and under a memory limit, against llama.cpp with Q4_0."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.mixture.run import Mixture

        mixture = Mixture(directory=model, fast=fast, dtype=dtype, new_tokens=new_tokens, rounds=rounds)
        return mixture.report(progress)

    measure("mixture", run, json)
