"""Commands about mixtures of experts: at other peers, offloaded, dispatched, in few bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recipes.benchmarks.command import PROGRAM, Json, ModelFolder, NewTokens, Rounds, check_json, measure, show
from swarm_plugins.cli.support.arguments import Revision
from swarm_plugins.cli.support.output import one_sentence_errors
from swarm_plugins.noise import quiet_command, quiet_loading

if TYPE_CHECKING:
    from rich.progress import Progress

    from recipes.benchmarks.figures import Report


def experts(
    model: ModelFolder,
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
        from recipes.benchmarks.experts import bench_experts

        return bench_experts(
            model,
            holders=holders or ([] if slices else [1, 2]),
            slices=slices or ([] if holders else [2]),
            rows=rows,
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
        )

    measure("experts", run, json)


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
    policy: Annotated[str, typer.Option(help="Which experts stay: counting, or lru as in the paper.")] = "counting",
    without: Annotated[
        list[str] | None, typer.Option(help="Arm to leave out: resident, no-guesses, bare or accelerate; repeatable.")
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
        from recipes.benchmarks.offload.run import bench_offload

        return bench_offload(
            model,
            random_scale=random_model,
            fast=fast,
            policy=policy,
            without=without or [],
            new_tokens=new_tokens,
            rounds=rounds,
            plot=plot,
            progress=progress,
        )

    measure("offload", run, json)


def dispatch(
    full: Annotated[bool, typer.Option("--full", help="More numbers of experts and tokens: half an hour.")] = False,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """Measure a layer of experts: swarm_table against transformers' implementations and DeepSpeed's padded dispatch."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.dispatch import bench_dispatch

        return bench_dispatch(is_full=full, rounds=rounds, progress=progress)

    measure("dispatch", run, json)


def quality(
    model: Annotated[str, typer.Option(help="Mixture of experts: a directory, or its id on the Hub.")],
    experts: Annotated[list[str] | None, typer.Option(metavar="BITS", help="Width of experts; repeatable.")] = None,
    attention: Annotated[
        list[str] | None, typer.Option(metavar="BITS", help="Width of all other layers; repeatable.")
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="Take the widths of the offloading paper: 16, 4dq, 3dq and 2dq of both.")
    ] = False,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Text to predict, or addresses, python, wikitext2, c4; repeatable. Default: addresses."
        ),
    ] = None,
    pieces: Annotated[int, typer.Option(help="Pieces of each text.", min=2, max=100_000)] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a piece.", min=8, max=100_000)] = 256,
    revision: Revision = None,
    json: Json = None,
) -> None:
    """Measure perplexity and size for each pair of widths of experts and of all other layers."""
    quiet_command()
    with one_sentence_errors("quality", program=PROGRAM):
        from swarm_plugins.offload.text import parse_width

        check_json(json)
        ours, theirs = (("16", "8", "4", "3", "2"), ("16", "8", "4")), (("16", "4dq", "3dq", "2dq"),) * 2
        every, every_other = theirs if paper else ours
        expert_bits = [parse_width("--experts", bits) for bits in experts or every]
        other_bits = [parse_width("--attention", bits) for bits in attention or every_other]
        # What takes seconds to import comes after what may be wrong at once.
        from recipes.benchmarks.quality import bench_quality

        with quiet_loading():
            report = bench_quality(
                model,
                experts=expert_bits,
                attention=other_bits,
                texts=text or ["addresses"],
                num_pieces=pieces,
                length=length,
                revision=revision,
            )
        show(report, json)
