"""Reports of benchmarks: figures and their goals, as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from swarm_plugins import __version__
from swarm_plugins.errors import ConfigError


@dataclass(kw_only=True)
class Report:
    """Results of one run; subclasses add figures and their tables."""

    command: str
    model: str
    notes: list[str] = field(default_factory=list)

    def tables(self) -> Iterator[Table]:
        """Yields the tables."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """Returns the report in JSON types."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    def print_tables(self, console: Console) -> None:
        """Prints the figures and describes the machine."""
        for table in self.tables():
            console.print(table)
        for note in self.notes:
            console.print(f"  {note}", markup=False)
        console.print("  " + ", ".join(f"{key} {value}" for key, value in _machine().items()))

    def write_json(self, path: Path) -> None:
        """Writes the figures to a file; raises ConfigError if the file cannot be written."""
        with _writing(path, "the figures"):
            path.write_text(json.dumps({**self.as_dict(), "machine": _machine()}, indent=1) + "\n")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A figure and its goal."""

    name: str
    value: float
    goal: float
    is_upper_bound: bool = False

    @property
    def reached(self) -> bool:
        """Whether the goal is reached."""
        return self.value <= self.goal if self.is_upper_bound else self.value >= self.goal

    def as_dict(self) -> dict[str, Any]:
        """Returns the goal in JSON types."""
        return {**msgspec.to_builtins(self), "reached": self.reached}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measurement of the swarm, compared with the local model."""

    name: str
    unit: str
    """Unit of ``local`` and ``swarm``: ``ms``, ``tokens/s`` or ``GB``."""
    local: float | None
    """Median of the local model; None without a comparison."""
    swarm: float
    """Median through the swarm."""
    ratio: float
    """Speed relative to the local model (1: as fast); a plain number if ``local`` is None."""
    goal: float | None = None
    goal_is_upper_bound: bool = False
    cpu_ratio: float | None = None
    """CPU time of all the swarm's processes relative to the local model, for the same work."""
    rounds: int = 1
    """Rounds behind the medians."""

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        if self.goal is None:
            return None
        return self.ratio <= self.goal if self.goal_is_upper_bound else self.ratio >= self.goal


@dataclass(kw_only=True)
class SwarmReport(Report):
    """The figures of a swarm."""

    figures: list[Figure] = field(default_factory=list)
    headings: tuple[str, str] = ("local", "swarm")
    """Of the two sides that are compared."""

    def tables(self) -> Iterator[Table]:
        """Yields one table with a row per figure."""
        headings = ("figure", *self.headings, "unit", "ratio", "goal", "", "CPU ratio")
        table = new_table(f"{self.command}: {self.model}", headings, names=("figure", "unit", ""))
        for one in self.figures:
            digits = 2 if one.unit == "GB" else 1
            goal = None if one.goal is None else f"{one.goal:.2f}"
            table.add_row(
                one.name,
                "" if one.local is None else f"{one.local:.{digits}f}",
                f"{one.swarm:.{digits}f}",
                one.unit,
                f"{one.ratio:.2f}",
                *goal_cells(goal, one.reached, is_upper_bound=one.goal_is_upper_bound),
                "" if one.cpu_ratio is None else f"{one.cpu_ratio:.2f}",
            )
        yield table

    def as_dict(self) -> dict[str, Any]:
        """Returns the report in JSON types."""
        figures = [{**msgspec.to_builtins(one), "reached": one.reached} for one in self.figures]
        return {**super().as_dict(), "figures": figures}


def new_table(title: str, headings: Iterable[str], *, names: Collection[str] = ("",)) -> Table:
    """Returns a table without rows, which shows every character: where it is too wide, the widest column is folded.

    Args:
        title: Shown as it is.
        headings: Of the columns.
        names: Headings of columns that are aligned at the left; numbers are at the right.
    """
    table = Table(title=escape(title), title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in names else "right", overflow="fold")
    return table


def goal_cells(goal: str | None, reached: bool | None, *, is_upper_bound: bool) -> tuple[str, str]:
    """Returns the table cells of a goal and its verdict; empty without a goal."""
    if goal is None:
        return "", ""
    verdict = "[green]reached[/green]" if reached else "[yellow]missed[/yellow]"
    return f"{'<=' if is_upper_bound else '>='} {goal}", verdict


def goals_table(goals: Iterable[Goal]) -> Table:
    """Returns a table with a row for each goal."""
    table = new_table("goals", ("figure", "value", "goal", ""), names=("figure", ""))
    for one in goals:
        cells = goal_cells(f"{one.goal:g}", one.reached, is_upper_bound=one.is_upper_bound)
        table.add_row(one.name, f"{one.value:.2f}", *cells)
    return table


def check_writable(file: Path, what: str) -> None:
    """Raises ConfigError if a file cannot be written, so that it is known before what takes minutes to measure."""
    if file.exists() and not file.is_file():
        return  # opening a pipe, and closing it again, would end it for its reader
    is_new = not file.exists()
    with _writing(file, what):
        file.open("ab").close()
        if is_new:
            file.unlink()


@contextmanager
def _writing(file: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise ConfigError(f"cannot write {what} to {file}: {exc.strerror}; give another file") from exc


def _machine() -> dict[str, str]:
    """Describes machine and libraries: figures are comparable only where these agree."""
    found = {"cpu": _cpu_name(), "cores": str(len(os.sched_getaffinity(0))), "python": platform.python_version()}
    found |= {package: metadata.version(package) for package in ("torch", "transformers", "hivemind")}
    found["swarm_plugins"] = __version__
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
