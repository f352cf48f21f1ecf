"""`swarm bench`: how fast the swarm is against the same model run by transformers here, in one run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm_plugins.cli.support.errors import one_sentence_errors
from swarm_plugins.noise import quiet_command, quiet_loading

if TYPE_CHECKING:
    from rich.progress import Progress

    from swarm_plugins.bench.figures import Report

__all__ = ["app"]

app = typer.Typer(
    name="bench",
    help="Measure a swarm, or offloading, on this machine against the same model run locally, one thread a side.",
    no_args_is_help=True,
)

Model = Annotated[
    Path, typer.Option(help="Directory of the model: config.json and safetensors files.", exists=True, file_okay=False)
]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.", dir_okay=False)]
Rounds = Annotated[int, typer.Option(help="Rounds whose medians are shown, after one to warm up.", min=1, max=1000)]
Servers = Annotated[int, typer.Option(help="Servers in the chain.", min=1, max=64)]
NewTokens = Annotated[int, typer.Option(help="Tokens decoded in each round.", min=4, max=4096)]


@app.command()
def decode(
    model: Model,
    servers: Annotated[list[int] | None, typer.Option(help="Servers in the chain; may be given several times.")] = None,
    new_tokens: NewTokens = 32,
    rounds: Rounds = 7,
    json: Json = None,
) -> None:
    """Time per token of one sequence after a prefix of 128 tokens, through chains of 1 and of 3 servers."""

    def run(report: Report, progress: Progress) -> None:
        from swarm_plugins.bench.decode import bench_decode

        chains = servers or [1, 3]
        bench_decode(report, model, servers=chains, new_tokens=new_tokens, rounds=rounds, progress=progress)

    _measure("decode", model, json, run)


@app.command()
def train(model: Model, servers: Servers = 1, rounds: Rounds = 7, json: Json = None) -> None:
    """Time of forward, and of forward with backward of a soft prompt, for 1 x 64 and 8 x 64 tokens."""

    def run(report: Report, progress: Progress) -> None:
        from swarm_plugins.bench.train import bench_train

        bench_train(report, model, num_servers=servers, rounds=rounds, progress=progress)

    _measure("train", model, json, run)


@app.command()
def sessions(
    model: Model,
    sessions: Annotated[
        list[int] | None, typer.Option(help="Client processes that decode together; may be given several times.")
    ] = None,
    servers: Servers = 1,
    new_tokens: NewTokens = 32,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """Tokens per second of 4 and of 8 client processes together, against one alone."""

    def run(report: Report, progress: Progress) -> None:
        from swarm_plugins.bench.sessions import bench_sessions

        bench_sessions(
            report,
            model,
            sessions=sessions or [4, 8],
            num_servers=servers,
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
        )

    _measure("sessions", model, json, run)


@app.command()
def offload(
    model: Annotated[
        Path | None, typer.Option(help="Directory of a mixture of experts: config.json and safetensors files.")
    ] = None,
    random_model: Annotated[
        float | None,
        typer.Option(
            metavar="SCALE",
            help="Instead of --model, one of OLMoE-1B-7B's shape with random weights: 1 for all 16 layers (13.8 GB).",
        ),
    ] = None,
    fast: Annotated[str, typer.Option(help="Share of the bytes of all experts that may be in memory.")] = "25%",
    without: Annotated[
        list[str] | None, typer.Option(help="Arm to leave out: resident or accelerate; may be given several times.")
    ] = None,
    new_tokens: NewTokens = 32,
    rounds: Rounds = 5,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw which experts the tokens use, to this file.", dir_okay=False)
    ] = None,
    json: Json = None,
) -> None:
    """Tokens per second with offloaded experts, against all in memory and accelerate's disk offload, under a limit."""
    _quiet_start()
    with one_sentence_errors("bench offload"):
        from swarm_plugins.bench.offload.command import run_offload

        run_offload(
            model,
            random_scale=random_model,
            fast=fast,
            without=without or [],
            new_tokens=new_tokens,
            rounds=rounds,
            plot=plot,
            json=json,
        )


@app.command()
def quality(
    model: Annotated[str, typer.Option(help="Mixture of experts: a directory, or its id on the Hub.")],
    experts: Annotated[
        list[str] | None, typer.Option(metavar="BITS", help="Width of experts; may be given several times.")
    ] = None,
    attention: Annotated[
        list[str] | None, typer.Option(metavar="BITS", help="Width of all other layers; may be given several times.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text to predict. Default: presidential addresses.", exists=True, dir_okay=False)
    ] = None,
    pieces: Annotated[int, typer.Option(help="Pieces of text.", min=2, max=100_000)] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a piece.", min=8, max=100_000)] = 256,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the model.")] = None,
    json: Json = None,
) -> None:
    """Perplexity and size for each pair of widths of experts and of all other layers."""
    quiet_command()
    with one_sentence_errors("bench quality"):
        from swarm_plugins.bench.quality.command import run_quality

        run_quality(
            model,
            experts=experts or ["16", "8", "4", "3", "2"],
            attention=attention or ["16", "8", "4"],
            text=text,
            num_pieces=pieces,
            length=length,
            revision=revision,
            json=json,
        )


def _quiet_start() -> None:
    # Read when torch is loaded, so before that; one thread a side keeps the two from competing for cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    quiet_command()


def _measure(what: str, model: Path, json: Path | None, run: Callable[[Report, Progress], None]) -> None:
    _quiet_start()
    from rich.console import Console
    from rich.progress import Progress

    from swarm_plugins.bench.figures import Report
    from swarm_plugins.bench.measure import Bystanders

    bystanders = Bystanders()
    report = Report(command=f"swarm bench {what}", model=model.resolve().name)
    with one_sentence_errors(f"bench {what}"):
        with quiet_loading(), Progress(console=Console(stderr=True), transient=True) as progress:
            run(report, progress)
        report.notes.append(f"other processes kept {bystanders.cores():.2f} cores busy meanwhile")
        if json is not None:
            report.write_json(json)
    console = Console()
    # A pipe has no width of its own; 80 columns would fold the table.
    report.print_table(console if console.is_terminal else Console(width=120))
