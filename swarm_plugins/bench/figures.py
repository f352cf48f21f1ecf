"""What a benchmark finds: figures beside their goals, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from swarm_plugins import __version__
from swarm_plugins.errors import ConfigError

__all__ = ["Figure", "Report", "machine"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number, the swarm's against the local model's."""

    name: str
    unit: str
    """Of ``local`` and ``swarm``: ``ms``, ``tokens/s`` or ``GB``."""
    local: float | None
    """Median of the local model; None where there is nothing to compare with."""
    swarm: float
    """Median through the swarm."""
    ratio: float
    """How good the swarm is against the local model (1 is as fast); a bare number where ``local`` is None."""
    goal: float | None = None
    goal_is_upper_bound: bool = False
    cpu_ratio: float | None = None
    """CPU seconds of all processes through the swarm over those of the local model, for the same work."""
    rounds: int = 1
    """Rounds that the medians are of."""

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        if self.goal is None:
            return None
        return self.ratio <= self.goal if self.goal_is_upper_bound else self.ratio >= self.goal


@dataclass(kw_only=True)
class Report:
    """All figures of one run."""

    command: str
    model: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def print_table(self, console: Console) -> None:
        """Prints the figures as a table, with the machine they were measured on."""
        table = Table(title=f"{self.command}: {self.model}", title_justify="left")
        for heading in ("figure", "local", "swarm", "unit", "ratio", "goal", "", "CPU ratio"):
            table.add_column(heading, justify="left" if heading in ("figure", "unit", "") else "right", no_wrap=True)
        for one in self.figures:
            table.add_row(*_row(one))
        console.print(table)
        for note in self.notes:
            console.print(f"  {note}")
        console.print("  " + ", ".join(f"{key} {value}" for key, value in machine().items()))

    def write_json(self, path: Path) -> None:
        """Writes the figures to a file.

        Raises:
            ConfigError: If the file cannot be written.
        """
        content = {
            "command": self.command,
            "model": self.model,
            "machine": machine(),
            "figures": [{**asdict(one), "reached": one.reached} for one in self.figures],
            "notes": self.notes,
        }
        try:
            path.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as exc:
            raise ConfigError(f"cannot write the figures to {path}: {exc.strerror}; name another file") from exc


def _row(one: Figure) -> Sequence[str]:
    digits = 2 if one.unit == "GB" else 1
    sign = "<=" if one.goal_is_upper_bound else ">="
    return (
        one.name,
        "" if one.local is None else f"{one.local:.{digits}f}",
        f"{one.swarm:.{digits}f}",
        one.unit,
        f"{one.ratio:.2f}",
        "" if one.goal is None else f"{sign} {one.goal:.2f}",
        {None: "", True: "[green]reached[/green]", False: "[yellow]missed[/yellow]"}[one.reached],
        "" if one.cpu_ratio is None else f"{one.cpu_ratio:.2f}",
    )


def machine() -> dict[str, str]:
    """Returns what one has to know of the machine and the libraries to compare figures."""
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
