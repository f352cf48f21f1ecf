"""Options that benchmarks share, and what is done before and after measuring."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm_plugins.cli.support.output import one_sentence_errors, wide_console
from swarm_plugins.noise import quiet_command, quiet_loading

if TYPE_CHECKING:
    from rich.progress import Progress

    from recipes.benchmarks.figures import Report

PROGRAM = "python -m recipes.benchmarks"
_COLUMNS = 150

ModelFolder = Annotated[
    Path, typer.Option(help="Directory of the model: config.json and safetensors files.", exists=True, file_okay=False)
]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.", dir_okay=False)]
Rounds = Annotated[int, typer.Option(help="Rounds whose medians are shown, after one to warm up.", min=1, max=1000)]
Servers = Annotated[int, typer.Option(help="Servers in the chain.", min=1, max=64)]
NewTokens = Annotated[int, typer.Option(help="Tokens decoded in each round.", min=4, max=4096)]


def measure(what: str, run: Callable[[Progress], Report], json: Path | None) -> None:
    """Runs a bench with a progress bar, and prints its report."""
    # Read when torch is imported; one thread a side keeps the two from competing for cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    quiet_command()
    from rich.console import Console
    from rich.progress import Progress

    from recipes.benchmarks.measure import Bystanders

    bystanders = Bystanders()
    with one_sentence_errors(what, program=PROGRAM):
        check_json(json)
        with quiet_loading(), Progress(console=Console(stderr=True), transient=True) as progress:
            report = run(progress)
        report.notes.append(f"other processes kept {bystanders.cores():.2f} cores busy meanwhile")
        show(report, json)


def check_json(json: Path | None) -> None:
    """Raises ConfigError if the figures could not be written after measuring."""
    from recipes.benchmarks.figures import check_writable

    if json is not None:
        check_writable(json, "the figures")


def show(report: Report, json: Path | None) -> None:
    """Writes a report to a file, if one is given, and prints it."""
    if json is not None:
        report.write_json(json)
    report.print_tables(wide_console(_COLUMNS))
