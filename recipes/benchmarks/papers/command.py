"""The commands that repeat tables and figures of the papers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recipes.benchmarks.command import Json, ModelFolder, NewTokens, Servers, measure

if TYPE_CHECKING:
    from rich.progress import Progress

    from recipes.benchmarks.figures import Report

Plot = Annotated[Path | None, typer.Option(help="Also draw the figures to this file, an SVG.", dir_okay=False)]
Rounds = Annotated[int, typer.Option(help="Rounds, whose mean and interval are shown.", min=1, max=1000)]
Models = Annotated[list[Path], typer.Option(help="Directory of a model; repeatable.", exists=True, file_okay=False)]
PRMoE = Annotated[
    Path | None, typer.Option(help="Folder for a small PR-MoE that is trained first, in minutes.", file_okay=False)
]


def add_commands(app: typer.Typer) -> None:
    """Adds the commands of this module to the benchmarks."""
    for command in (codes, eight_bits, few_bits, reuse, ranks, sizes, read_time, table3, crossing):
        app.command()(command)


def codes(
    model: Models,
    servers: Annotated[int, typer.Option(help="Spans that the blocks are cut into.", min=1, max=64)] = 3,
    pieces: Annotated[int, typer.Option(help="Most pieces of each text.", min=3, max=1000)] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a piece.", min=8, max=100_000)] = 256,
    plot: Plot = None,
    json: Json = None,
) -> None:
    """Measure 8 bits a number on the wire: rotated8 against the dynamic blockwise code of Petals."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.papers.codes import bench_codes
        from recipes.benchmarks.papers.shown import check_plot

        check_plot(plot)
        return bench_codes(model, num_spans=servers, num_pieces=pieces, length=length, plot=plot, progress=progress)

    measure("codes", run, json)


def eight_bits(
    model: Models,
    pieces: Annotated[int, typer.Option(help="Most pieces of each text.", min=3, max=1000)] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a piece.", min=8, max=100_000)] = 256,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences at once; repeatable.", min=1, max=256)] = None,
    losses_only: Annotated[bool, typer.Option("--losses-only", help="Leave the throughput out.")] = False,
    prefix: Annotated[int, typer.Option(help="Tokens of the prompts.", min=1, max=8192)] = 64,
    new_tokens: NewTokens = 16,
    rounds: Rounds = 5,
    plot: Plot = None,
    json: Json = None,
) -> None:
    """Measure weights in 8 bits against 16: losses on two texts, and tokens/s at batch 1, 8 and 32 through a server."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.papers.eight_bits import bench_eight_bits
        from recipes.benchmarks.papers.shown import check_plot

        check_plot(plot)
        return bench_eight_bits(
            model,
            num_pieces=pieces,
            length=length,
            batches=() if losses_only else batch or (1, 8, 32),
            prefix_tokens=prefix,
            new_tokens=new_tokens,
            rounds=rounds,
            plot=plot,
            progress=progress,
        )

    measure("eight-bits", run, json)


def few_bits(
    model: Models,
    prmoe: PRMoE = None,
    bits: Annotated[
        list[str] | None, typer.Option(help="Width; repeatable. Default: 4 and the paper's 4dq, 3dq and 2dq.")
    ] = None,
    pieces: Annotated[int, typer.Option(help="Most pieces of each text.", min=3, max=1000)] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a piece.", min=8, max=100_000)] = 128,
    questions: Annotated[int, typer.Option(help="Most questions of a document.", min=1, max=100)] = 6,
    plot: Plot = None,
    json: Json = None,
) -> None:
    """Measure few bits of experts and of attention: losses on two texts in pairs, and right answers out of four."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.papers.few_bits import FEW, bench_few_bits
        from recipes.benchmarks.papers.shown import check_plot
        from swarm_plugins.offload.text import parse_width

        check_plot(plot)
        few = [parse_width("--bits", one) for one in bits or map(str, FEW)]
        return bench_few_bits(
            model,
            prmoe=prmoe,
            few=few,
            num_pieces=pieces,
            length=length,
            per_document=questions,
            plot=plot,
            progress=progress,
        )

    measure("few-bits", run, json)


def reuse(
    model: Models,
    prmoe: PRMoE = None,
    pieces: Annotated[int, typer.Option(help="Most pieces of each text.", min=2, max=1000)] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a piece.", min=64, max=100_000)] = 256,
    plot: Plot = None,
    json: Json = None,
) -> None:
    """Measure hits of a cache of experts over its size, and recall of experts fetched 1 to 10 layers early."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.papers.reuse import bench_reuse
        from recipes.benchmarks.papers.shown import check_plot

        check_plot(plot)
        return bench_reuse(model, prmoe=prmoe, num_pieces=pieces, length=length, plot=plot, progress=progress)

    measure("reuse", run, json)


def ranks(
    count: Annotated[list[int] | None, typer.Option("--ranks", help="Ranks; repeatable.", min=1, max=64)] = None,
    node: Annotated[int, typer.Option(help="Ranks of a node, which share a batch.", min=2, max=32)] = 2,
    tokens: Annotated[int, typer.Option(help="Rows of all ranks together.", min=64, max=1 << 20)] = 2048,
    seeds: Annotated[int, typer.Option(help="Passes with other rows and experts.", min=3, max=100)] = 5,
    plot: Plot = None,
    json: Json = None,
) -> None:
    """Measure a layer's experts on 1 to 8 ranks by three exchanges: bytes against their formulas, and time."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.papers.ranks import bench_ranks
        from recipes.benchmarks.papers.shown import check_plot

        check_plot(plot)
        return bench_ranks(
            ranks=count or [1, 2, 4, 8], node=node, tokens=tokens, seeds=seeds, plot=plot, progress=progress
        )

    measure("ranks", run, json)


def sizes(plot: Plot = None, json: Json = None) -> None:
    """Count memory and weights read per token of the paper's MoE, PR-MoE and students, and layouts on ranks."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.papers.shown import check_plot
        from recipes.benchmarks.papers.sizes import bench_sizes

        check_plot(plot)
        return bench_sizes(plot=plot, progress=progress)

    measure("sizes", run, json)


def read_time(
    width: Annotated[int, typer.Option(help="Hidden size of the sparse models, a multiple of 64.", min=64)] = 1024,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences at once; repeatable.", min=1, max=256)] = None,
    new_tokens: NewTokens = 8,
    rounds: Rounds = 5,
    plot: Plot = None,
    json: Json = None,
) -> None:
    """Time decoding with MoE, PR-MoE, its student and a dense model, whose weights exceed the caches."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.papers.read_time import bench_read_time
        from recipes.benchmarks.papers.shown import check_plot

        check_plot(plot)
        return bench_read_time(
            width=width,
            batches=tuple(batch or (1, 8, 64)),
            new_tokens=new_tokens,
            rounds=rounds,
            plot=plot,
            progress=progress,
        )

    measure("read-time", run, json)


def table3(
    servers: Annotated[list[int] | None, typer.Option(help="Servers of a chain; repeatable.", min=1, max=12)] = None,
    preset: Annotated[
        list[str] | None, typer.Option(help="1gbit-5ms, 100mbit-5ms or 100mbit-100ms; repeatable. Default: all.")
    ] = None,
    clients: Annotated[int, typer.Option(help="Clients at once, against one.", min=2, max=32)] = 8,
    new_tokens: NewTokens = 12,
    rounds: Rounds = 3,
    small: Annotated[bool, typer.Option("--small", help="Short contexts and few rows, to try the command.")] = False,
    plot: Plot = None,
    json: Json = None,
) -> None:
    """Measure steps and tokens a second through servers that wait, on the three networks of Petals' Table 3."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.papers.shown import check_plot
        from recipes.benchmarks.papers.table3 import Scale, bench_table3, check_chains

        check_plot(plot)
        sizes = Scale(contexts=(16, 32), batches=(1, 2)) if small else Scale()
        scale = replace(sizes, clients=clients, new_tokens=new_tokens, rounds=rounds)
        names = check_chains(servers or [3, 12], preset)
        return bench_table3(chains=servers or [3, 12], networks=names, scale=scale, plot=plot, progress=progress)

    measure("table3", run, json)


def crossing(
    model: ModelFolder,
    servers: Servers = 3,
    new_tokens: NewTokens = 24,
    rounds: Rounds = 3,
    plot: Plot = None,
    json: Json = None,
) -> None:
    """Measure a swarm on three networks against offloading, ours and accelerate's, over model size over memory."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.papers.crossing import bench_crossing
        from recipes.benchmarks.papers.shown import check_plot

        check_plot(plot)
        return bench_crossing(
            model, num_servers=servers, new_tokens=new_tokens, rounds=rounds, plot=plot, progress=progress
        )

    measure("crossing", run, json)
