"""Placement in simulated swarms with churn, compared with the best placement of the servers that are there.

The optimum of few servers is found by integer programming: each server at one start, the coverage of the slowest block
as large as possible; where that is not proven in time, its proven upper bound counts. Of many servers it is bounded by
the capacity spread evenly over all blocks, which no placement can exceed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import Progress, TaskID
from rich.table import Table
from scipy.optimize import Bounds, LinearConstraint, milp

from recipes.benchmarks.figures import Report, new_table
from recipes.benchmarks.pictures import check_picture, picture
from swarm_plugins.routing.placement import Placed
from recipes.benchmarks.places.simulation import Course, Scenario, mean_coverage, simulate
from swarm_plugins.routing.span_table import Floats
from recipes.study.drawing import GOOD, MARK, MUTED, tidy

Swarm = tuple[Placed, ...]
_EXACT_UP_TO = 16
"""Servers whose optimum is found by integer programming."""
_SOLVE_S = 10.0
_GOAL = 0.9
_DRAWN = 150
"""Points of a curve, each the mean of its stretch: a large swarm changes thousands of times."""


def scenario_of(num_servers: int, *, churn_h: float, seed: int) -> Scenario:
    """Returns a scenario in which more servers share more blocks."""
    if num_servers <= _EXACT_UP_TO:
        shape: tuple[int, tuple[int, ...]] = (16, (2, 3, 4, 6, 8))
    elif num_servers < 500:
        shape = (32, (4, 6, 8, 12, 16))
    else:
        shape = (80, (4, 8, 10, 16, 24))
    return Scenario(num_servers=num_servers, num_blocks=shape[0], lengths=shape[1], churn_h=churn_h, seed=seed)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides what C code writes to standard output: HiGHS prints names of its functions, whatever its options say."""
    sys.stdout.flush()
    shown = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(shown, 1)
        os.close(shown)


class _Bound(NamedTuple):
    value: float
    is_proven: bool
    """Whether it is the optimum, and not only more."""


@functools.cache
def _optimum(num_blocks: int, servers: tuple[tuple[int, float], ...]) -> _Bound:
    """Returns an upper bound of the slowest block's coverage, of servers by length and rate; the optimum if proven."""
    places = [(index, start) for index, (length, _) in enumerate(servers) for start in range(num_blocks - length + 1)]
    coverage = np.zeros((num_blocks, len(places) + 1))
    choices = np.zeros((len(servers), len(places) + 1))
    for column, (index, start) in enumerate(places):
        length, rate = servers[index]
        coverage[start : start + length, column] = rate
        choices[index, column] = 1
    coverage[:, -1] = -1
    with _quiet():
        result = milp(
            np.append(np.zeros(len(places)), -1.0),
            constraints=[LinearConstraint(coverage, 0, np.inf), LinearConstraint(choices, 1, 1)],
            integrality=np.append(np.ones(len(places)), 0),
            bounds=Bounds(0, np.append(np.ones(len(places)), np.inf)),
            options={"time_limit": _SOLVE_S, "mip_rel_gap": 0.005},
        )
    even = sum(length * rate for length, rate in servers) / num_blocks
    value = even if result.mip_dual_bound is None else min(even, -float(result.mip_dual_bound))
    return _Bound(value, result.status == 0)


def _solved(num_blocks: int, servers: Swarm) -> _Bound:
    return _optimum(num_blocks, tuple(sorted((len(one.blocks), one.rate) for one in servers)))


def upper_bound(num_blocks: int) -> Callable[[Swarm], float]:
    """Returns a function that bounds the throughput of any placement of some servers."""

    def bound(servers: Swarm) -> float:
        if len(servers) > _EXACT_UP_TO:
            return mean_coverage(num_blocks, servers)
        return _solved(num_blocks, servers).value

    return bound


def _num_unproven(course: Course) -> int:
    """Returns for how many swarms of a course the solver had not proven the optimum in time."""
    swarms = {one for one in course.swarms if len(one) <= _EXACT_UP_TO}
    return sum(not _solved(course.scenario.num_blocks, one).is_proven for one in swarms)


@dataclass(frozen=True, kw_only=True)
class PlacementFigure:
    """One simulated swarm."""

    num_servers: int
    num_blocks: int
    share: float
    """Throughput over time as a share of the optimum, from the end of the warm-up to the end."""
    final_share: float
    moves_per_server_hour: float
    rest_min: float
    """Minutes from the last arrival or departure to the last move."""
    num_uncovered: int
    """Blocks that lost their last server by a move."""


@dataclass(kw_only=True)
class PlacementReport(Report):
    """Figures of simulated swarms."""

    figures: list[PlacementFigure] = field(default_factory=list)

    def tables(self) -> Iterator[Table]:
        """Yields one table with a row per swarm."""
        headings = (
            "servers",
            "blocks",
            "of the optimum",
            "goal",
            "at the end",
            "moves/server/h",
            "rest, min",
            "uncovered",
        )
        table = new_table(f"{self.command}: {self.model}", headings)
        for one in self.figures:
            verdict = "[green]>= 0.90[/green]" if one.share >= _GOAL else "[yellow]>= 0.90 missed[/yellow]"
            table.add_row(
                f"{one.num_servers}",
                f"{one.num_blocks}",
                f"{one.share:.3f}",
                verdict,
                f"{one.final_share:.3f}",
                f"{one.moves_per_server_hour:.2f}",
                f"{one.rest_min:.1f}",
                f"{one.num_uncovered}",
            )
        yield table


def bench_placement(
    *, sizes: Sequence[int], churn_h: float, seed: int, plot: Path | None, progress: Progress
) -> PlacementReport:
    """Simulates swarms of some sizes; ``plot`` is a file to draw them to."""
    if plot is not None:
        check_picture(plot)
    report = PlacementReport(command="benchmark placement", model=f"{churn_h:g} h of churn, seed {seed}")
    courses = []
    for size in sizes:
        task = progress.add_task(f"{size} servers", total=1.0)

        def show(done: float, task: TaskID = task) -> None:
            progress.update(task, completed=done)

        course = simulate(scenario_of(size, churn_h=churn_h, seed=seed), show)
        courses.append(course)
        report.figures.append(_figure(course))
    report.notes.append("the optimum: of up to 16 servers by integer programming, of more the mean coverage, a bound")
    if unproven := sum(map(_num_unproven, courses)):
        report.notes.append(
            f"{unproven} optima were not proven within {_SOLVE_S:g} s each, and are bounds above them: the shares of "
            "few servers come out too low; an idle machine proves more"
        )
    if plot is not None:
        draw_courses(courses, plot)
    return report


def _figure(course: Course) -> PlacementFigure:
    scenario = course.scenario
    bound = upper_bound(scenario.num_blocks)
    most = bound(course.swarms[-1])
    return PlacementFigure(
        num_servers=scenario.num_servers,
        num_blocks=scenario.num_blocks,
        share=course.share_of(bound),
        final_share=course.throughputs[-1] / most if most else 1.0,
        moves_per_server_hour=course.moves_per_server_hour,
        rest_min=course.rest_s / 60,
        num_uncovered=course.num_uncovered,
    )


def draw_courses(courses: Sequence[Course], file: Path) -> None:
    """Draws throughput and optimum over time as SVG, a panel for each swarm, with a tick for each move.

    Raises:
        MissingExtraError: If matplotlib is not installed.
        ConfigError: If the file cannot be written.
    """
    with picture(file, (8.4, 0.6 + 2.2 * len(courses))) as figure:
        panels: Any = figure.subplots(len(courses), 1, sharex=True, squeeze=False)
        for panel, course in zip(panels[:, 0], courses, strict=True):
            _draw_course(course, panel)
        panels[0, 0].legend(loc="lower right", frameon=False)
        panels[-1, 0].set_xlabel("hours; ticks: servers begin to move; line: the last arrival or departure")


def _means(times_s: Sequence[float], values: Sequence[float], edges: Floats) -> Floats:
    """Returns the mean in each stretch of a value that holds from its time to the next."""
    lengths = np.diff(np.append(times_s, edges[-1]))
    areas = np.concatenate([[0.0], np.cumsum(lengths * np.asarray(values))])
    found: Floats = np.diff(np.interp(edges, np.append(times_s, edges[-1]), areas)) / np.diff(edges)
    return found


def _draw_course(course: Course, panel: Any) -> None:
    bound = upper_bound(course.scenario.num_blocks)
    edges = np.linspace(course.times_s[0], course.scenario.end_s, _DRAWN + 1)
    hours = (edges[:-1] + edges[1:]) / 7200
    optimum = [bound(one) for one in course.swarms]
    found = _means(course.times_s, course.throughputs, edges)
    panel.plot(hours, _means(course.times_s, optimum, edges), color=MUTED, label="optimum")
    panel.plot(hours, found, color=GOOD, label="placement by the servers")
    moving = hours[np.histogram(course.moves_s, edges)[0] > 0]
    panel.plot(moving, np.zeros_like(moving), "|", color=MARK)
    panel.axvline(course.last_churn_s / 3600, color=MUTED, linewidth=0.8)
    panel.set_title(f"{course.scenario.num_servers} servers", loc="left", fontsize=10)
    panel.set_ylim(bottom=-0.03 * float(found.max()))
    panel.set_ylabel("tokens/s")
    tidy(panel)
