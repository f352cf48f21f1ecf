"""Trains with several Trainers together, then with as many alone, on the same parts of the data and as long."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress
from rich.table import Table

from recipes.benchmarks.arms import check_directory
from recipes.benchmarks.figures import Report, new_table
from recipes.benchmarks.pictures import check_picture, picture
from recipes.benchmarks.together.records import Job, Ready, Trained
from swarm_plugins.child import Child
from swarm_plugins.errors import SwarmError
from swarm_plugins.local_swarm import LocalSwarm
from recipes.study.drawing import GOOD, MUTED, tidy
from recipes.study.verdicts import plus_minus

_LOOKS = 6
_LATE_S = 3600.0
"""Time for loading and evaluation, beyond the time for training."""
_MEMBER = "recipes.benchmarks.together.member"


@dataclass(frozen=True, kw_only=True)
class Seed:
    """What one seed gave."""

    seed: int
    together: Trained
    alone: tuple[Trained, ...]

    @property
    def best_alone(self) -> float:
        """Lowest held-out loss of those who trained alone, at the end."""
        return min(one.losses[-1] for one in self.alone)

    @property
    def gain(self) -> float:
        """Loss of the best alone minus that together."""
        return self.best_alone - self.together.losses[-1]


@dataclass(kw_only=True)
class TogetherReport(Report):
    """Held-out losses after equal time."""

    peers: int
    seconds: float
    seeds: list[Seed] = field(default_factory=list)

    def tables(self) -> Iterator[Table]:
        """Yields one table with a row per seed, and their mean."""
        title = f"{self.command}: {self.model}, held-out loss per token after {self.seconds:g} s"
        headings = ("seed", "before", "together", "best alone", "mean alone", "gain", "rounds", "steps of a peer")
        table = new_table(title, headings, names=("seed",))
        for one in self.seeds:
            ends = [trained.losses[-1] for trained in one.alone]
            losses = (one.together.losses[0], one.together.losses[-1], one.best_alone, statistics.fmean(ends), one.gain)
            steps = (one.together.rounds, one.together.steps)
            table.add_row(str(one.seed), *(f"{loss:.4f}" for loss in losses), *map(str, steps))
        table.add_row("mean", "", "", "", "", plus_minus([one.gain for one in self.seeds]), "", "")
        yield table


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Compares members of a run with Trainers that train alone, all at the same time and on the same machine."""

    directory: Path
    peers: int
    seconds: float
    seeds: int
    steps_per_round: int
    documents: int
    learning_rate: float

    def report(self, plot: Path | None, progress: Progress) -> TogetherReport:
        """Trains, and draws the losses over time if ``plot`` is given.

        Raises:
            ConfigError: If the directory does not hold a model, or ``plot`` cannot be written.
            SwarmError: If peers of the run have different adapters after the same round.
        """
        check_directory(self.directory)
        if plot is not None:
            check_picture(plot)
        report = TogetherReport(
            command="benchmark together",
            model=self.directory.resolve().name,
            peers=self.peers,
            seconds=self.seconds,
        )
        bar = progress.add_task("arms", total=2 * self.seeds)
        with LocalSwarm(self.directory, num_servers=1, dtype="float32", threads=1) as swarm:
            for seed in range(self.seeds):
                together = self._train(seed, swarm, f"bench/{seed}")
                progress.advance(bar)
                alone = self._train(seed, swarm, None)
                progress.advance(bar)
                # One that was the first to end may lack the last round.
                if len({(one.rounds, one.digest) for one in together}) > len({one.rounds for one in together}):
                    raise SwarmError(f"peers of seed {seed} have ended a round with different adapters: report this")
                report.seeds.append(Seed(seed=seed, together=together[0], alone=tuple(alone)))
        report.notes.append(
            f"{self.peers} Trainers at once in both arms, each on a part of {self.documents} documents; a LoRA on the "
            f"attention, {self.steps_per_round} steps a round; gain: loss of the best alone minus that "
            "together"
        )
        if plot is not None:
            draw_losses(report, plot)
        return report

    def _train(self, seed: int, swarm: LocalSwarm, run_id: str | None) -> list[Trained]:
        with contextlib.ExitStack() as stack:
            members = [stack.enter_context(Child(_MEMBER, f"member {number}")) for number in range(self.peers)]
            jobs = [self._job(seed, number, swarm.initial_peers, run_id) for number in range(self.peers)]
            for member, job in zip(members, jobs, strict=True):
                member.send(job)
            for member in members:
                member.receive(Ready)
            # All begin at the same time.
            for member, job in zip(members, jobs, strict=True):
                member.send(job)
            return [member.receive(Trained, timeout_s=self.seconds + _LATE_S) for member in members]

    def _job(self, seed: int, number: int, initial_peers: Sequence[str], run_id: str | None) -> Job:
        return Job(
            directory=str(self.directory),
            initial_peers=tuple(initial_peers),
            run_id=run_id,
            steps_per_round=self.steps_per_round,
            part=f"{number + 1}/{self.peers}",
            documents=self.documents,
            seed=seed,
            seconds=self.seconds,
            looks=_LOOKS,
            learning_rate=self.learning_rate,
            evaluates=run_id is None or number == 0,
        )


def draw_losses(report: TogetherReport, file: Path) -> None:
    """Draws the losses over time: a line for each seed together, thin ones for all that trained alone.

    The first look, before any training, is left out: it is the same for all, and far above the others.
    """
    with picture(file, (6.0, 3.4)) as figure:
        axes = figure.subplots()
        for seed in report.seeds:
            for one in seed.alone:
                axes.plot(one.seconds[1:], one.losses[1:], "-", color=MUTED, linewidth=0.8)
            axes.plot(seed.together.seconds[1:], seed.together.losses[1:], "o-", color=GOOD, markersize=3)
        axes.plot([], [], "o-", color=GOOD, markersize=3, label=f"{report.peers} together")
        axes.plot([], [], "-", color=MUTED, linewidth=0.8, label="each alone")
        axes.set_xlabel("seconds")
        axes.set_ylabel("held-out loss per token")
        axes.legend(frameon=False)
        tidy(axes)
