"""Tokens a second over the distance: carried by the client, pushed by servers, and with a draft."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.progress import Progress
from rich.table import Table
from transformers import PreTrainedModel

from recipes.benchmarks.figures import Report, new_table
from recipes.benchmarks.measure import Arm, take_turns
from recipes.benchmarks.network.chat import ANSWER, CHAT, Run, answering
from recipes.benchmarks.network.models import load_models, swarm_models
from recipes.benchmarks.pictures import check_picture, picture
from recipes.benchmarks.links import Link, Relay
from recipes.benchmarks.links.relay import check_num_servers
from swarm_plugins.local_swarm import LocalSwarm
from swarm_plugins.speculation import Speculation
from recipes.study.drawing import GOOD, MARK, MUTED, WARM, tidy

_NAMES = {
    "local": "the model here",
    "drafted": "pushed, with a draft",
    "pushed": "pushed by servers",
    "star": "carried by the client",
}
"""Ways to answer, as the table and the picture name them."""
_STYLES = {"local": ("--", MUTED), "drafted": ("^-", GOOD), "pushed": ("s-", MARK), "star": ("o-", WARM)}


@dataclass(frozen=True, kw_only=True)
class Point:
    """Answers at one distance, in tokens a second; prompts count as time."""

    rtt_ms: float
    """Round-trip time between the client and each server."""
    server_rtt_ms: float
    local: float
    star: float
    pushed: float
    drafted: float | None = None
    """Pushed, with a draft; None: none was given."""
    tokens_per_trip: float | None = None
    """Of those with a draft."""


@dataclass(kw_only=True)
class DistanceReport(Report):
    """Answers at some distances."""

    points: list[Point] = field(default_factory=list)

    def tables(self) -> Iterator[Table]:
        """Yields one table with a row per distance."""
        headings = ("round trip, ms", *_NAMES.values(), "tokens a trip")
        table = new_table(f"{self.command}: {self.model}, tokens/s", headings)
        for one in self.points:
            speeds = (getattr(one, way) for way in _NAMES)
            numbers = [None if speed is None else f"{speed:.2f}" for speed in (*speeds, one.tokens_per_trip)]
            table.add_row(f"{one.rtt_ms:g}", *(number or "" for number in numbers))
        yield table


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Compares answers of a chat at some distances.

    Tokens are checked to be equal to the local model's.
    """

    directory: Path
    """The model."""
    links: Sequence[tuple[Link, Link]]
    """Between the client and the servers, and between servers, for each distance."""
    num_servers: int
    draft: str | None
    """Directory of a small model that drafts, or ``lookup``; None: no speculation is measured."""
    new_tokens: int
    """A third of the tokens of an answer, at most."""
    rounds: int
    """Rounds whose medians are shown."""

    def report(self, plot: Path, progress: Progress) -> DistanceReport:
        """Measures all distances, each with servers of its own, and draws them.

        Raises:
            ConfigError: If a directory does not hold a model, the draft has another vocabulary, or ``plot`` cannot be
                written or does not end in ``.svg``.
            MissingExtraError: If matplotlib is not installed.
            SwarmError: If the swarm's tokens differ from the local model's.
        """
        check_picture(plot)
        check_num_servers(self.num_servers)
        # Constructors find settings that are wrong.
        swarms = [self._swarm(*links) for links in self.links]
        report = DistanceReport(command="benchmark network", model=self.directory.resolve().name)
        local, drafter = load_models(self.directory, self.draft)
        run = answering(self.directory, local, CHAT, ANSWER * self.new_tokens)
        for (link, server_link), swarm in zip(self.links, swarms, strict=True):
            speeds = self._speeds(swarm, local, run, drafter, f"{link.rtt_ms:g} ms", progress)
            report.points.append(Point(rtt_ms=link.rtt_ms, server_rtt_ms=server_link.rtt_ms, **speeds))
        draw_distances(report.points, plot)
        return report

    def _swarm(self, link: Link, server_link: Link) -> LocalSwarm:
        return LocalSwarm(
            self.directory,
            num_servers=self.num_servers,
            dtype="float32",
            threads=1,
            link=Relay(link, server_link),
        )

    def _speeds(
        self,
        swarm: LocalSwarm,
        local: PreTrainedModel,
        run: Run,
        drafter: PreTrainedModel | str | None,
        name: str,
        progress: Progress,
    ) -> dict[str, float]:
        """Returns the tokens a second of each way to answer, and the tokens a trip of the draft."""
        with swarm, swarm_models(self.directory, swarm.initial_peers) as (star, pushing):
            speculation = None if drafter is None else Speculation(drafter)
            works: dict[str, tuple[PreTrainedModel, Speculation | None]] = {
                "local": (local, None),
                "star": (star, None),
                "pushed": (pushing, None),
            }
            if speculation is not None:
                works["drafted"] = (pushing, speculation)
            arms = {way: Arm(partial(run, *work), (os.getpid(),)) for way, work in works.items()}
            take_turns(name, arms.values(), rounds=self.rounds, progress=progress)
        speeds = {way: 1 / arm.median_s for way, arm in arms.items()}
        if speculation is not None:
            speeds["tokens_per_trip"] = speculation.counts.tokens_per_round
        return speeds


def draw_distances(points: Sequence[Point], file: Path) -> None:
    """Draws tokens a second over the round-trip time as SVG, a line for each way to answer.

    Raises:
        MissingExtraError: If matplotlib is not installed.
        ConfigError: If the file cannot be written.
    """
    with picture(file, (8.4, 3.8)) as figure:
        axes = figure.subplots()
        for way, name in _NAMES.items():
            found = [(one.rtt_ms, getattr(one, way)) for one in points if getattr(one, way) is not None]
            if found:
                style, color = _STYLES[way]
                axes.plot(*zip(*found, strict=True), style, color=color, label=name, markersize=5)
        axes.set_xticks([one.rtt_ms for one in points])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("round-trip time to each server, ms")
        axes.set_ylabel("tokens/s")
        figure.legend(loc="outside upper left", ncols=len(_NAMES), frameon=False)
        tidy(axes)
