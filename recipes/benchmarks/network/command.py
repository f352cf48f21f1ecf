"""The command of the benchmark ``network``: servers at a distance."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recipes.benchmarks.command import Json, ModelFolder, NewTokens, Rounds, measure

if TYPE_CHECKING:
    from rich.progress import Progress

    from recipes.benchmarks.figures import Report
    from recipes.benchmarks.links import Link

_MBIT = 100.0


def network(
    model: ModelFolder,
    rtt: Annotated[
        float | None, typer.Option(help="Round-trip time between client and servers, ms. Default: 100.", min=0)
    ] = None,
    mbit: Annotated[float | None, typer.Option(help="Rate of each connection, Mbit/s. Default: 100.")] = None,
    server_rtt: Annotated[
        float | None, typer.Option(help="Round-trip time between servers, ms. Default: as --rtt.", min=0)
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Instead of --rtt and --mbit: 1gbit-5ms, 100mbit-5ms or 100mbit-100ms.")
    ] = None,
    servers: Annotated[int, typer.Option(help="Servers in the chain.", min=1, max=16)] = 3,
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
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Instead, measure answers of a chat at several distances, and draw tokens/s to this file.",
            dir_okay=False,
        ),
    ] = None,
    rtts: Annotated[
        str, typer.Option(metavar="MS,MS...", help="Round-trip times of --plot between client and servers.")
    ] = "5,20,50,100,150",
    prefix: Annotated[int, typer.Option(help="Tokens in the cache before the first one is timed.", min=1)] = 128,
    new_tokens: NewTokens = 16,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """Measure servers at a distance: a token, the first token and a training step against the link's bound."""

    def run(progress: Progress) -> Report:
        from recipes.benchmarks.links import Link

        link = _parse_link(rtt, mbit, preset)
        _check_draft(draft)
        # What takes seconds to import comes after what may be wrong at once.
        from recipes.benchmarks.network.pipeline import Pipeline
        from recipes.benchmarks.network.run import bench_network

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
            pipeline = Pipeline(model, link=link, waiting_s=waiting, rounds=rounds, progress=progress)
            report.figures += pipeline.figures()
        return report

    def run_plot(file: Path, progress: Progress) -> Report:
        from swarm_plugins.errors import ConfigError

        if (rtt, preset, waiting) != (None, None, None):
            raise ConfigError("--plot measures answers at --rtts: leave out --rtt, --preset and --waiting")
        links = parse_links(rtts, mbit=_MBIT if mbit is None else mbit, server_rtt=server_rtt)
        _check_draft(draft)
        # What takes seconds to import comes after what may be wrong at once.
        from recipes.benchmarks.network.distances import Distances

        distances = Distances(
            directory=model,
            links=links,
            num_servers=servers,
            draft=draft,
            new_tokens=new_tokens,
            rounds=rounds,
        )
        return distances.report(file, progress)

    measure("network", run if plot is None else partial(run_plot, plot), json)


def _parse_link(rtt: float | None, mbit: float | None, preset: str | None) -> Link:
    """Returns the link between the client and the servers."""
    from swarm_plugins.errors import ConfigError
    from recipes.benchmarks.links import NETWORKS, Link

    if preset is None:
        return Link(rtt_ms=100.0 if rtt is None else rtt, mbit=_MBIT if mbit is None else mbit)
    if preset not in NETWORKS:
        raise ConfigError(f"unknown --preset {preset!r}: choose from {', '.join(NETWORKS)}")
    if (rtt, mbit) != (None, None):
        raise ConfigError(f"--preset {preset} sets the round-trip time and the rate: leave out --rtt and --mbit")
    return NETWORKS[preset]


def _check_draft(draft: str | None) -> None:
    from swarm_plugins.errors import ConfigError

    if draft not in (None, "lookup") and not Path(str(draft)).is_dir():
        raise ConfigError(f"there is no directory {draft!r}: give that of a small model with --draft, or lookup")


def parse_links(rtts: str, *, mbit: float, server_rtt: float | None) -> list[tuple[Link, Link]]:
    """Parses round-trip times such as ``5,20``; returns links to the client and between servers, nearest first.

    Servers are at most as far from each other as from the client: packets could take the way through it otherwise.

    Raises:
        ConfigError: If a time is not a number of 0 or more, or the rate is wrong.
    """
    from swarm_plugins.errors import ConfigError
    from recipes.benchmarks.links import Link

    try:
        times = sorted({float(one) for one in rtts.split(",")})
    except ValueError as exc:
        raise ConfigError(f"invalid --rtts {rtts!r}: expected round-trip times in ms, such as 5,20,50") from exc
    between = [time if server_rtt is None else min(time, server_rtt) for time in times]
    return [
        (Link(rtt_ms=time, mbit=mbit), Link(rtt_ms=near, mbit=mbit)) for time, near in zip(times, between, strict=True)
    ]
