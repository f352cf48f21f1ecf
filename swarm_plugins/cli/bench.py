"""``swarm bench``: speed of a swarm, or of offloading, compared with the same model in transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm_plugins.cli.support.arguments import Revision
from swarm_plugins.cli.support.output import one_sentence_errors, wide_console
from swarm_plugins.noise import quiet_command, quiet_loading

if TYPE_CHECKING:
    from rich.progress import Progress

    from swarm_plugins.bench.figures import Report

app = typer.Typer(
    name="bench",
    help="Measure a swarm, or offloading, on this machine against the same model run locally, one thread a side.",
    no_args_is_help=True,
)

_COLUMNS = 140

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
    servers: Annotated[list[int] | None, typer.Option(help="Servers in the chain; repeatable.")] = None,
    prefix: Annotated[int, typer.Option(help="Tokens in the cache before the first one is timed.", min=1)] = 128,
    new_tokens: NewTokens = 32,
    rounds: Rounds = 7,
    json: Json = None,
) -> None:
    """Measure the time per token of one sequence after a prefix, through chains of 1 and 3 servers."""

    def run(progress: Progress) -> Report:
        from swarm_plugins.bench.decode import bench_decode

        return bench_decode(
            model,
            servers=servers or [1, 3],
            prefix_tokens=prefix,
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
        )

    _measure("decode", run, json)


@app.command()
def train(model: Model, servers: Servers = 1, rounds: Rounds = 7, json: Json = None) -> None:
    """Measure forward, and forward with backward of a soft prompt, for 1 x 64 and 8 x 64 tokens."""

    def run(progress: Progress) -> Report:
        from swarm_plugins.bench.train import bench_train

        return bench_train(model, num_servers=servers, rounds=rounds, progress=progress)

    _measure("train", run, json)


@app.command()
def network(
    model: Model,
    rtt: Annotated[float, typer.Option(help="Round-trip time between client and servers, ms.", min=0)] = 100.0,
    mbit: Annotated[float, typer.Option(help="Rate of each connection, Mbit/s.")] = 100.0,
    server_rtt: Annotated[
        float | None, typer.Option(help="Round-trip time between servers, ms. Default: as --rtt.", min=0)
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Instead of --rtt and --mbit: 1gbit-5ms, 100mbit-5ms or 100mbit-100ms.")
    ] = None,
    servers: Servers = 3,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|lookup",
            help="Measure speculation too, with the small model in this directory, or from the text alone.",
        ),
    ] = None,
    waiting: Annotated[
        float | None,
        typer.Option(help="Measure chunks of 16 x 64 tokens too, through servers that wait so many seconds.", min=0.01),
    ] = None,
    prefix: Annotated[int, typer.Option(help="Tokens in the cache before the first one is timed.", min=1)] = 128,
    new_tokens: NewTokens = 16,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """Measure servers at a distance: a token, the first token and a training step against the link's bound."""

    def run(progress: Progress) -> Report:
        from swarm_plugins.bench.network import bench_network
        from swarm_plugins.bench.pipeline import Pipeline
        from swarm_plugins.errors import ConfigError
        from swarm_plugins.links import NETWORKS, Link
        from swarm_plugins.testing.in_process import InProcessSwarm

        if preset is not None and preset not in NETWORKS:
            raise ConfigError(f"unknown --preset {preset!r}: choose from {', '.join(NETWORKS)}")
        link = Link(rtt_ms=rtt, mbit=mbit) if preset is None else NETWORKS[preset]
        report = bench_network(
            model,
            link=link,
            server_link=link if server_rtt is None else Link(rtt_ms=server_rtt, mbit=link.mbit),
            num_servers=servers,
            prefix_tokens=prefix,
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
            draft=draft,
        )
        if waiting is not None:
            pipeline = Pipeline(
                model, link=link, swarm=InProcessSwarm, waiting_s=waiting, rounds=rounds, progress=progress
            )
            report.figures += pipeline.figures()
        return report

    _measure("network", run, json)


@app.command()
def sessions(
    model: Model,
    sessions: Annotated[
        list[int] | None, typer.Option(help="Client processes that decode at the same time; repeatable.")
    ] = None,
    servers: Servers = 1,
    new_tokens: NewTokens = 32,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """Measure the tokens per second of 4 and of 8 client processes together, against one alone."""

    def run(progress: Progress) -> Report:
        from swarm_plugins.bench.sessions import bench_sessions

        return bench_sessions(
            model,
            sessions=sessions or [4, 8],
            num_servers=servers,
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
        )

    _measure("sessions", run, json)


@app.command()
def experts(
    model: Model,
    holders: Annotated[
        list[int] | None, typer.Option(help="Holders that share the experts; repeatable.", min=1, max=64)
    ] = None,
    slices: Annotated[
        list[int] | None, typer.Option(help="Holders that have a slice of each expert; repeatable.", min=2, max=64)
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of 64 tokens in the larger passes.", min=2, max=64)] = 8,
    new_tokens: NewTokens = 32,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """Measure a mixture whose experts are at 1 and 2 holders, or cut into 2 slices, against all of it here."""

    def run(progress: Progress) -> Report:
        from swarm_plugins.bench.experts import bench_experts

        return bench_experts(
            model,
            holders=holders or ([] if slices else [1, 2]),
            slices=slices or ([] if holders else [2]),
            rows=rows,
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
        )

    _measure("experts", run, json)


@app.command()
def offload(
    model: Annotated[
        Path | None, typer.Option(help="Directory of a mixture of experts: config.json and safetensors files.")
    ] = None,
    random_model: Annotated[
        float | None,
        typer.Option(
            metavar="SCALE",
            help="Instead of --model, use OLMoE-1B-7B's shape with random weights: 1 for all 16 layers (13.8 GB).",
        ),
    ] = None,
    fast: Annotated[str, typer.Option(help="Share of the bytes of all experts that may be in memory.")] = "25%",
    without: Annotated[
        list[str] | None, typer.Option(help="Arm to leave out: resident or accelerate; repeatable.")
    ] = None,
    new_tokens: NewTokens = 32,
    rounds: Rounds = 5,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw which experts the tokens use, to this file.", dir_okay=False)
    ] = None,
    json: Json = None,
) -> None:
    """Measure offloaded experts under a memory limit, against all in memory and accelerate's disk offload."""

    def run(progress: Progress) -> Report:
        from swarm_plugins.bench.offload.run import bench_offload

        return bench_offload(
            model,
            random_scale=random_model,
            fast=fast,
            without=without or [],
            new_tokens=new_tokens,
            rounds=rounds,
            plot=plot,
            progress=progress,
        )

    _measure("offload", run, json)


@app.command()
def dispatch(
    full: Annotated[bool, typer.Option("--full", help="More numbers of experts and tokens: half an hour.")] = False,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """Measure a layer of experts: swarm_table against transformers' implementations and DeepSpeed's padded dispatch."""

    def run(progress: Progress) -> Report:
        from swarm_plugins.bench.dispatch import bench_dispatch

        return bench_dispatch(is_full=full, rounds=rounds, progress=progress)

    _measure("dispatch", run, json)


@app.command()
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
        from swarm_plugins.bench.placement import bench_placement

        sizes = servers or [10, 100, 1000]
        return bench_placement(sizes=sizes, churn_h=churn_h, seed=seed, plot=plot, progress=progress)

    _measure("placement", run, json)


@app.command()
def quality(
    model: Annotated[str, typer.Option(help="Mixture of experts: a directory, or its id on the Hub.")],
    experts: Annotated[list[str] | None, typer.Option(metavar="BITS", help="Width of experts; repeatable.")] = None,
    attention: Annotated[
        list[str] | None, typer.Option(metavar="BITS", help="Width of all other layers; repeatable.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text to predict. Default: presidential addresses.", exists=True, dir_okay=False)
    ] = None,
    pieces: Annotated[int, typer.Option(help="Pieces of text.", min=2, max=100_000)] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a piece.", min=8, max=100_000)] = 256,
    revision: Revision = None,
    json: Json = None,
) -> None:
    """Measure perplexity and size for each pair of widths of experts and of all other layers."""
    quiet_command()
    with one_sentence_errors("bench quality"):
        from swarm_plugins.cli.support.options import parse_width
        from swarm_plugins.offload.widths import EXPERT_BITS, OTHER_BITS

        expert_bits = [parse_width("--experts", bits, EXPERT_BITS) for bits in experts or ("16", "8", "4", "3", "2")]
        other_bits = [parse_width("--attention", bits, OTHER_BITS) for bits in attention or ("16", "8", "4")]
        # What takes seconds to import comes after what may be wrong at once.
        from swarm_plugins.bench.quality import bench_quality

        with quiet_loading():
            report = bench_quality(
                model,
                experts=expert_bits,
                attention=other_bits,
                text=text,
                num_pieces=pieces,
                length=length,
                revision=revision,
            )
        _show(report, json)


@app.command()
def codec(
    model: Model,
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
        from swarm_plugins.bench.codec import bench_codec

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

    _measure("codec", run, json)


@app.command()
def verify(model: Model, servers: Servers = 1, rounds: Rounds = 5, json: Json = None) -> None:
    """Measure what receipts and spot checks cost at their floor, against the same calls without them."""

    def run(progress: Progress) -> Report:
        from swarm_plugins.bench.verify import bench_verify

        return bench_verify(model, num_servers=servers, rounds=rounds, progress=progress)

    _measure("verify", run, json)


@app.command()
def privacy(
    model: Model,
    depth: Annotated[
        list[int] | None, typer.Option(help="Local blocks before the first server; repeatable.", min=0)
    ] = None,
    documents: Annotated[int, typer.Option(help="Addresses; an eighth is held out.", min=16, max=235)] = 128,
    json: Json = None,
) -> None:
    """Measure the share of input tokens that a curious first server recovers from the hidden states it receives."""

    def run(progress: Progress) -> Report:
        from swarm_plugins.bench.privacy import bench_privacy

        return bench_privacy(model, depths=depth or [0, 1, 2, 4, 8], documents=documents, progress=progress)

    _measure("privacy", run, json)


def _measure(what: str, run: Callable[[Progress], Report], json: Path | None) -> None:
    # Read when torch is imported; one thread a side keeps the two from competing for cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    quiet_command()
    from rich.console import Console
    from rich.progress import Progress

    from swarm_plugins.bench.measure import Bystanders

    bystanders = Bystanders()
    with one_sentence_errors(f"bench {what}"):
        with quiet_loading(), Progress(console=Console(stderr=True), transient=True) as progress:
            report = run(progress)
        report.notes.append(f"other processes kept {bystanders.cores():.2f} cores busy meanwhile")
        _show(report, json)


def _show(report: Report, json: Path | None) -> None:
    if json is not None:
        report.write_json(json)
    report.print_tables(wide_console(_COLUMNS))
