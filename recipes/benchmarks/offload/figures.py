"""The figures of offloading, and their goals."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rich.table import Table

from recipes.benchmarks.figures import Goal, Report, goals_table, new_table
from recipes.study.verdicts import paired, verdict
from swarm_plugins.sizes import format_bytes

if TYPE_CHECKING:
    from swarm_plugins.offload.plan.forecast import Forecast, Speeds

# Of the all-resident speed, by the share of experts in memory.
_RESIDENT_GOALS = {1.0: 0.97, 0.75: 0.80, 0.5: 0.45}
_ACCELERATE_GOAL = 8.0
_DISK_GOAL = 0.9
_SPECULATION_GOALS = (0.98, 1.2)
_FEW_HITS = 0.4
# The file system writes a block when a file is first read, and counts it for this process; copied weights are larger.
_WRITE_GOAL = 1 << 20
_LOAD_GOAL_S = 3.0
_PEAK_GOAL = 1.1
_FORECAST_GOAL = 0.2


class ArmName(StrEnum):
    """One way to run the model, as named in the tables."""

    RESIDENT = "all resident (transformers)"
    FULL = "offloaded"
    NO_GUESSES = "without speculative loading"
    BARE = "without cache and speculation"
    ACCELERATE = "accelerate disk offload"
    NAIVE = "every expert of a layer for each token"
    """What naive offloading reads, where accelerate cannot load the model: one in few bits."""

    @property
    def is_ours(self) -> bool:
        """Whether this package offloads the experts.

        Without a control group only these arms run under a limit, on private memory: accelerate maps the files it
        reads, which such a limit counts although they are page cache. Its cache is dropped between tokens.
        """
        return self in (ArmName.FULL, ArmName.NO_GUESSES, ArmName.BARE, ArmName.NAIVE)


@dataclass(frozen=True, kw_only=True)
class ArmFigures:
    """Figures of one way to run the model; medians of the rounds."""

    arm: ArmName
    tokens_per_s: float
    spread: tuple[float, float]
    """The slowest and the fastest round."""
    rates: tuple[float, ...]
    """Tokens a second of each round, in order."""
    read_bytes: float
    """Bytes read from disk per token."""
    cpu_s: float
    """CPU seconds per token."""
    hit_ratio: float | None
    recall: float | None
    stall_s: float | None
    peak_bytes: int
    """Peak memory, without the libraries."""
    load_s: float
    written_bytes: int


@dataclass(kw_only=True)
class OffloadReport(Report):
    """All figures of one run."""

    share: float
    policy: str = "counting"
    expert_bytes: int = 0
    fast_bytes: int = 0
    budget_bytes: int = 0
    """Bytes of all other weights and of the experts in memory."""
    limit_bytes: int = 0
    has_group: bool = False
    """Whether the limit covers all memory with page cache, for all arms but the resident one."""
    rounds: int = 0
    new_tokens: int = 0
    speeds: Speeds | None = None
    forecast: Forecast | None = None
    arms: list[ArmFigures] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    def find(self, arm: ArmName) -> ArmFigures | None:
        """Returns the figures of an arm; None if it did not run."""
        return next((one for one in self.arms if one.arm is arm), None)

    def tables(self) -> Iterator[Table]:
        """Yields the tables of arms, of goals, and of verdicts on the order of the arms."""
        yield _arms_table(self)
        yield goals_table(self.goals)
        verdicts = new_table("", ("verdict",), names=("verdict",))
        for sentence in order_verdicts(self):
            verdicts.add_row(sentence)
        yield verdicts

    def as_dict(self) -> dict[str, Any]:
        """Returns the report in JSON types."""
        return {**asdict(self), "goals": [one.as_dict() for one in self.goals]}


def order_verdicts(report: OffloadReport) -> list[str]:
    """Returns a sentence for each step from naive offloading to the full algorithm, over rounds of the same prompts.

    As Table 2 of Eliseev and Mazur (2023), which adds one part after another.
    """
    naive = ArmName.NAIVE if report.find(ArmName.NAIVE) else ArmName.ACCELERATE
    order = (ArmName.FULL, ArmName.NO_GUESSES, ArmName.BARE, naive)
    arms = [one for name in order if (one := report.find(name)) is not None]
    return [
        verdict(
            f"{faster.arm.value!r} is faster than {slower.arm.value!r}",
            paired(slower.rates, faster.rates),
            unit=" tokens/s",
            digits=2,
        )
        for faster, slower in itertools.pairwise(arms)
    ]


def add_goals(report: OffloadReport) -> None:
    """Compares a report's figures with their goals."""
    full = report.find(ArmName.FULL)
    if full is None:
        return
    blind = report.find(ArmName.NO_GUESSES)
    accelerate = report.find(ArmName.ACCELERATE)
    resident = report.find(ArmName.RESIDENT)
    if resident is not None:
        _speed_goals(report, full, blind or full, resident)
    if accelerate is not None and report.share == 0.5:
        _at_least(report, "over accelerate", full.tokens_per_s / accelerate.tokens_per_s, _ACCELERATE_GOAL)
    if blind is not None:
        few = blind.hit_ratio is not None and blind.hit_ratio <= _FEW_HITS
        _at_least(report, "over no speculation", full.tokens_per_s / blind.tokens_per_s, _SPECULATION_GOALS[few])
    _at_most(report, "peak memory over budget", full.peak_bytes / report.budget_bytes, _PEAK_GOAL)
    _at_most(report, "load, s", full.load_s, _LOAD_GOAL_S)
    _at_most(report, "written while loading, bytes", full.written_bytes, _WRITE_GOAL)
    if report.forecast is not None:
        off = abs(report.forecast.tokens_per_s / full.tokens_per_s - 1)
        _at_most(report, "forecast is off by", off, _FORECAST_GOAL)


def _speed_goals(report: OffloadReport, full: ArmFigures, blind: ArmFigures, resident: ArmFigures) -> None:
    goal = _RESIDENT_GOALS.get(report.share)
    if goal is not None:
        _at_least(report, "over all resident", full.tokens_per_s / resident.tokens_per_s, goal)
    if report.speeds is not None:
        ceiling = resident.tokens_per_s
        # Only necessary reads: speculation reads more.
        if blind.read_bytes > 0:
            ceiling = min(ceiling, report.speeds.disk_bytes_per_s / blind.read_bytes)
        _at_least(report, "over what disk and memory allow", full.tokens_per_s / ceiling, _DISK_GOAL)


def _at_least(report: OffloadReport, name: str, value: float, goal: float) -> None:
    report.goals.append(Goal(name=name, value=value, goal=goal))


def _at_most(report: OffloadReport, name: str, value: float, goal: float) -> None:
    report.goals.append(Goal(name=name, value=value, goal=goal, is_upper_bound=True))


def _arms_table(report: OffloadReport) -> Table:
    headings = ("", "tokens/s", "of resident", "read/token", "CPU s/token", "hits", "recall", "waits", "peak", "load")
    table = new_table(f"{report.command}: {report.model}, {report.share:.0%} of the experts, {report.policy}", headings)
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
