"""The figures of offloading beside their goals, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from swarm_plugins.bench.figures import machine
from swarm_plugins.bench.offload.arms import ArmName
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.plan.forecast import Forecast, Speeds
from swarm_plugins.sizes import format_bytes

__all__ = ["ArmFigures", "Goal", "OffloadReport", "add_goals"]

# Of the all-resident speed, by the share of experts in memory.
_RESIDENT_GOALS = {1.0: 0.97, 0.75: 0.80, 0.5: 0.45}
_ACCELERATE_GOAL = 8.0
_DISK_GOAL = 0.9
_SPECULATION_GOALS = (0.98, 1.2)
_FEW_HITS = 0.4
# When a file was first read is a block that the file system writes, and counts as this process's: that is no copy of
# weights.
_WRITE_GOAL = 1 << 20
_LOAD_GOAL_S = 3.0
_PEAK_GOAL = 1.1
_FORECAST_GOAL = 0.2


@dataclass(frozen=True, kw_only=True)
class ArmFigures:
    """What one way of running the model does; medians of the rounds."""

    arm: ArmName
    tokens_per_s: float
    spread: tuple[float, float]
    """The slowest and the fastest round."""
    read_bytes: float
    """From the disk, a token."""
    cpu_s: float
    """A token."""
    hit_ratio: float | None
    recall: float | None
    stall_s: float | None
    peak_bytes: int
    """Of memory, beside what the libraries take."""
    load_s: float
    written_bytes: int


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A figure that something is asked of."""

    name: str
    value: float
    goal: float
    is_upper_bound: bool = False

    @property
    def reached(self) -> bool:
        """Whether the goal is reached."""
        return self.value <= self.goal if self.is_upper_bound else self.value >= self.goal


@dataclass(kw_only=True)
class OffloadReport:
    """All figures of one run."""

    command: str
    model: str
    share: float
    expert_bytes: int = 0
    fast_bytes: int = 0
    budget_bytes: int = 0
    """Of weights outside experts and of the experts in memory."""
    limit_bytes: int = 0
    has_group: bool = False
    """Whether the limit is one of all memory with page cache, for all arms but the resident one."""
    rounds: int = 0
    new_tokens: int = 0
    speeds: Speeds | None = None
    forecast: Forecast | None = None
    arms: list[ArmFigures] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find(self, arm: ArmName) -> ArmFigures | None:
        """Returns the figures of an arm; None if it did not run."""
        return next((one for one in self.arms if one.arm is arm), None)

    def print_table(self, console: Console) -> None:
        """Prints the figures, the goals, and the machine they were measured on."""
        console.print(_arms_table(self))
        console.print(_goals_table(self.goals))
        if self.speeds is not None:
            rates = [format_bytes(rate) for rate in (self.speeds.disk_bytes_per_s, self.speeds.expert_bytes_per_s)]
            console.print(
                f"  experts {format_bytes(self.expert_bytes)}, of which {format_bytes(self.fast_bytes)} may be in "
                f"memory; limit {format_bytes(self.limit_bytes)} beside the libraries; disk {rates[0]}/s, experts "
                f"one after the other {rates[1]}/s; medians of {self.rounds} rounds of {self.new_tokens} tokens"
            )
        for note in self.notes:
            console.print(f"  {note}")
        console.print("  " + ", ".join(f"{key} {value}" for key, value in machine().items()))

    def write_json(self, path: Path) -> None:
        """Writes the figures to a file.

        Raises:
            ConfigError: If the file cannot be written.
        """
        goals = [{**asdict(one), "reached": one.reached} for one in self.goals]
        content = {**asdict(self), "goals": goals, "machine": machine()}
        try:
            path.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as exc:
            raise ConfigError(f"cannot write the figures to {path}: {exc.strerror}; name another file") from exc


def add_goals(report: OffloadReport) -> None:
    """Compares the figures of a report with what is asked of them."""
    full = report.find(ArmName.FULL)
    if full is None:
        return
    goals = report.goals
    resident = report.find(ArmName.RESIDENT)
    if resident is not None:
        _speed_goals(report, full, resident)
    accelerate = report.find(ArmName.ACCELERATE)
    if accelerate is not None and report.share == 0.5:
        goals.append(
            Goal(name="over accelerate", value=full.tokens_per_s / accelerate.tokens_per_s, goal=_ACCELERATE_GOAL)
        )
    blind = report.find(ArmName.NO_GUESSES)
    if blind is not None:
        few = blind.hit_ratio is not None and blind.hit_ratio <= _FEW_HITS
        goals.append(
            Goal(
                name="over no speculation",
                value=full.tokens_per_s / blind.tokens_per_s,
                goal=_SPECULATION_GOALS[few],
            )
        )
    goals.append(
        Goal(
            name="peak memory over budget",
            value=full.peak_bytes / report.budget_bytes,
            goal=_PEAK_GOAL,
            is_upper_bound=True,
        )
    )
    goals.append(Goal(name="load, s", value=full.load_s, goal=_LOAD_GOAL_S, is_upper_bound=True))
    written = Goal(name="written while loading, bytes", value=full.written_bytes, goal=_WRITE_GOAL, is_upper_bound=True)
    goals.append(written)
    if report.forecast is not None:
        off = abs(report.forecast.tokens_per_s / full.tokens_per_s - 1)
        goals.append(Goal(name="forecast is off by", value=off, goal=_FORECAST_GOAL, is_upper_bound=True))


def _speed_goals(report: OffloadReport, full: ArmFigures, resident: ArmFigures) -> None:
    goal = _RESIDENT_GOALS.get(report.share)
    if goal is not None:
        report.goals.append(Goal(name="over all resident", value=full.tokens_per_s / resident.tokens_per_s, goal=goal))
    if report.speeds is not None:
        ceiling = resident.tokens_per_s
        # What has to be read: guesses read more.
        blind = report.find(ArmName.NO_GUESSES) or full
        if blind.read_bytes > 0:
            ceiling = min(ceiling, report.speeds.disk_bytes_per_s / blind.read_bytes)
        report.goals.append(
            Goal(name="over what disk and memory allow", value=full.tokens_per_s / ceiling, goal=_DISK_GOAL)
        )


def _arms_table(report: OffloadReport) -> Table:
    table = Table(title=f"{report.command}: {report.model}, {report.share:.0%} of the experts", title_justify="left")
    table.add_column("", no_wrap=True)
    headings = ("tokens/s", "of resident", "read/token", "CPU s/token", "hits", "recall", "waits", "peak", "load")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    resident = report.find(ArmName.RESIDENT)
    for one in report.arms:
        table.add_row(
            one.arm.value,
            f"{one.tokens_per_s:.3g}",
            "" if resident is None else f"{one.tokens_per_s / resident.tokens_per_s:.2f}",
            format_bytes(one.read_bytes),
            f"{one.cpu_s:.3f}",
            "" if one.hit_ratio is None else f"{one.hit_ratio:.2f}",
            "" if one.recall is None else f"{one.recall:.2f}",
            "" if one.stall_s is None else f"{one.stall_s * 1e3:.0f} ms",
            format_bytes(one.peak_bytes),
            f"{one.load_s:.1f} s",
        )
    if report.forecast is not None:
        expected = report.forecast
        table.add_row(
            "forecast of swarm plan",
            f"{expected.tokens_per_s:.3g}",
            f"{expected.tokens_per_s / expected.resident_tokens_per_s:.2f}",
            format_bytes(expected.read_bytes),
            "",
            f"{expected.hit_ratio:.2f}",
            *[""] * 4,
        )
    return table


def _goals_table(goals: list[Goal]) -> Table:
    table = Table(title="goals", title_justify="left")
    table.add_column("figure", no_wrap=True)
    for heading in ("value", "goal", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in goals:
        sign = "<=" if one.is_upper_bound else ">="
        verdict = "[green]reached[/green]" if one.reached else "[yellow]missed[/yellow]"
        table.add_row(one.name, f"{one.value:.2f}", f"{sign} {one.goal:g}", verdict)
    return table
