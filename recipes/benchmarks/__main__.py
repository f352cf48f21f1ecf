"""``python -m recipes.benchmarks``: a swarm, or offloading, compared with the same model in transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm_plugins.cli.support.arguments import Revision
from recipes.benchmarks.network.command import network
from recipes.benchmarks.packs.command import packs
from recipes.benchmarks.papers import command as papers
from recipes.benchmarks.formats.command import formats
from recipes.benchmarks.command import PROGRAM, Json, ModelFolder, NewTokens, Rounds, Servers, check_json, measure, show
from swarm_plugins.cli.support.output import one_sentence_errors
from swarm_plugins.errors import naming_extras
from swarm_plugins.noise import no_bars_in_pipes, quiet_command, quiet_loading

if TYPE_CHECKING:
    from rich.progress import Progress

    from recipes.benchmarks.figures import Report

ROOT = Path(__file__).resolve().parents[2]

app = typer.Typer(
    help="Measure a swarm, or offloading, on this machine against the same model run locally, one thread a side.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
def decode(
    model: ModelFolder,
    servers: Annotated[list[int] | None, typer.Option(help="Servers in the chain; repeatable.")] = None,
    prefix: Annotated[int, typer.Option(help="Tokens in the cache before the first one is timed.", min=1)] = 128,
    new_tokens: NewTokens = 32,
    rounds: Rounds = 7,
    json: Json = None,
) -> None:
    """Measure the time per token of one sequence after a prefix, through chains of 1 and 3 servers."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.decode import bench_decode

        return bench_decode(
            model,
            servers=servers or [1, 3],
            prefix_tokens=prefix,
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
        )

    measure("decode", run, json)


@app.command()
def widths(
    model: ModelFolder,
    width: Annotated[
        list[str] | None, typer.Option(help="float32, bfloat16, float16, int8, int4 or nf4; repeatable.")
    ] = None,
    gguf: Annotated[
        list[Path] | None,
        typer.Option(help="File of the same model that llama.cpp (package xllamacpp) decodes in turns; repeatable."),
    ] = None,
    prefix: Annotated[int, typer.Option(help="Tokens in the cache before the first one is timed.", min=1)] = 128,
    new_tokens: NewTokens = 32,
    rounds: Rounds = 7,
    json: Json = None,
) -> None:
    """Measure the time per token through one server that keeps its weights in 32, 16, 8 and 4 bits."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.widths import bench_widths

        return bench_widths(
            model,
            widths=width or ["float32", "bfloat16", "int8", "int4", "nf4"],
            gguf=gguf or (),
            prefix_tokens=prefix,
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
        )

    measure("widths", run, json)


@app.command()
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


@app.command()
def train(model: ModelFolder, servers: Servers = 1, rounds: Rounds = 7, json: Json = None) -> None:
    """Measure forward, and forward with backward of a soft prompt, for 1 x 64 and 8 x 64 tokens."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.train import bench_train

        return bench_train(model, num_servers=servers, rounds=rounds, progress=progress)

    measure("train", run, json)


@app.command()
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


@app.command()
def sessions(
    model: ModelFolder,
    sessions: Annotated[
        list[int] | None, typer.Option(help="Client processes that run at the same time; repeatable.")
    ] = None,
    servers: Servers = 1,
    new_tokens: NewTokens = 32,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """Measure the tokens per second of 4 and of 8 client processes together, against one alone."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.sessions import bench_sessions

        return bench_sessions(
            model,
            sessions=sessions or [4, 8],
            num_servers=servers,
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
        )

    measure("sessions", run, json)


@app.command()
def calls(
    model: ModelFolder,
    servers: Servers = 2,
    group: Annotated[int, typer.Option(help="Samples of a prompt.", min=2, max=32)] = 8,
    new_tokens: NewTokens = 48,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """Measure training by calls on local servers: steps and samples over the same done here, and groups of samples."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.calls import bench_calls

        return bench_calls(
            model, num_servers=servers, group=group, new_tokens=new_tokens, rounds=rounds, progress=progress
        )

    measure("calls", run, json)


@app.command()
def api(
    model: ModelFolder,
    servers: Servers = 2,
    clients: Annotated[int, typer.Option(help="Clients that ask at once.", min=2, max=64)] = 8,
    chars: Annotated[int, typer.Option(help="Letters of a conversation's first turn.", min=16, max=100_000)] = 2600,
    new_tokens: NewTokens = 48,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """Measure `swarm api` on local servers: many clients at once over one, and a conversation's second turn."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.api import bench_api

        return bench_api(
            model,
            num_servers=servers,
            clients=clients,
            chars=chars,
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
        )

    measure("api", run, json)


@app.command()
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
    policy: Annotated[str, typer.Option(help="Which experts stay: counting, or lru as in the paper.")] = "counting",
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


@app.command()
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
        from recipes.benchmarks.placement import bench_placement

        sizes = servers or [10, 100, 1000]
        return bench_placement(sizes=sizes, churn_h=churn_h, seed=seed, plot=plot, progress=progress)

    measure("placement", run, json)


@app.command()
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


@app.command()
def codec(
    model: ModelFolder,
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
        from recipes.benchmarks.codec import bench_codec

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

    measure("codec", run, json)


@app.command()
def kv(
    model: ModelFolder,
    text: Annotated[
        Path | None, typer.Option(help="Text to predict. Default: presidential addresses.", exists=True, dir_okay=False)
    ] = None,
    pieces: Annotated[int, typer.Option(help="Pieces of text.", min=2, max=100_000)] = 6,
    length: Annotated[int, typer.Option(help="Tokens of a piece.", min=8, max=100_000)] = 512,
    new_tokens: NewTokens = 16,
    json: Json = None,
) -> None:
    """Measure what sessions with keys and values in 8 bits take, and what that changes in predictions of a text."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.kv import bench_kv

        return bench_kv(model, text=text, num_pieces=pieces, length=length, new_tokens=new_tokens, progress=progress)

    measure("kv", run, json)


@app.command()
def together(
    model: ModelFolder,
    peers: Annotated[int, typer.Option(help="Trainers of the run, and as many that train alone.", min=2, max=16)] = 3,
    seconds: Annotated[float, typer.Option(help="How long each trains.", min=1)] = 240.0,
    seeds: Annotated[int, typer.Option(help="Trainings of each kind.", min=1, max=100)] = 3,
    steps_per_round: Annotated[int, typer.Option(help="Local steps between two rounds.", min=1)] = 5,
    documents: Annotated[
        int, typer.Option(help="Texts of all peers together; an eighth is held out.", min=16, max=235)
    ] = 24,
    learning_rate: Annotated[float, typer.Option(help="Of the peers' own optimizers.", min=1e-7)] = 2e-3,
    plot: Annotated[Path | None, typer.Option(help="Draw the losses over time to this file.", dir_okay=False)] = None,
    json: Json = None,
) -> None:
    """Measure held-out loss after equal time: several Trainers that train one adapter, against each alone."""

    def run(progress: Progress) -> Report:
        with naming_extras():
            import lightning.pytorch  # noqa: F401  # the members' processes need it

        from recipes.benchmarks.together.compare import Comparison

        comparison = Comparison(
            directory=model,
            peers=peers,
            seconds=seconds,
            seeds=seeds,
            steps_per_round=steps_per_round,
            documents=documents,
            learning_rate=learning_rate,
        )
        return comparison.report(plot, progress)

    measure("together", run, json)


@app.command()
def verify(model: ModelFolder, servers: Servers = 1, rounds: Rounds = 5, json: Json = None) -> None:
    """Measure what receipts and spot checks cost at their floor, against the same calls without them."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.verify import bench_verify

        return bench_verify(model, num_servers=servers, rounds=rounds, progress=progress)

    measure("verify", run, json)


@app.command()
def privacy(
    model: ModelFolder,
    depth: Annotated[
        list[int] | None, typer.Option(help="Local blocks before the first server; repeatable.", min=0)
    ] = None,
    documents: Annotated[int, typer.Option(help="Addresses; an eighth is held out.", min=16, max=235)] = 128,
    json: Json = None,
) -> None:
    """Measure the share of input tokens that a curious first server recovers from the hidden states it receives."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.privacy import bench_privacy

        return bench_privacy(model, depths=depth or [0, 1, 2, 4, 8], documents=documents, progress=progress)

    measure("privacy", run, json)


app.command()(network)
app.command()(packs)
app.command()(formats)
papers.add_commands(app)


def main() -> None:
    """Runs the command."""
    # Child processes find this folder too, whatever else is called ``recipes``.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    no_bars_in_pipes()
    app(prog_name=PROGRAM)


if __name__ == "__main__":
    main()
