"""How the figures of a repeated table are shown: rows, verdicts and a picture, all made of one kept record."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from recipes.benchmarks.figures import Report, new_table
from recipes.benchmarks.pictures import check_picture, picture
from recipes.study.markdown import markdown_table

Figures = Mapping[str, Any]
"""What a command measured, as JSON keeps it."""
ROOT = Path(__file__).resolve().parents[3]
PICTURES = ROOT / "docs" / "pictures"


class Rows(NamedTuple):
    """A table."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def as_markdown(self) -> str:
        """Returns the table as pages have it."""
        return markdown_table(self.heads, self.rows)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """How one command's figures are shown."""

    name: str
    """Of the command, and of the files that keep its figures and picture."""
    page: str
    """Page of the docs that has its tables, below ``docs``."""
    tables: Callable[[Figures], Sequence[Rows]]
    verdicts: Callable[[Figures], Sequence[str]]
    """A sentence for each claim."""
    draw: Callable[[Figures, Any], None]
    """Draws on a figure of matplotlib."""
    size: tuple[float, float]
    """Of the picture, in inches."""

    def kept(self) -> dict[str, Any]:
        """Reads the figures kept with the docs."""
        record: dict[str, Any] = json.loads((PICTURES / f"{self.name}.json").read_text())
        return dict(record["figures"])

    def draw_to(self, file: Path, figures: Figures) -> None:
        """Writes the picture.

        Raises:
            ConfigError: If the file cannot be written.
            MissingExtraError: If matplotlib is not installed.
        """
        with picture(file, self.size) as figure:
            self.draw(figures, figure)


@dataclass(kw_only=True)
class ShownReport(Report):
    """The figures of one run."""

    shown: Shown
    figures: dict[str, Any] = field(default_factory=dict)

    def tables(self) -> Iterator[Table]:
        """Yields the tables, and the verdicts as the last one."""
        for rows in self.shown.tables(self.figures):
            table = new_table(f"{self.command}: {self.model}", rows.heads, names=rows.heads[:2])
            for row in rows.rows:
                table.add_row(*row)
            yield table
        table = new_table("", ("verdict",), names=("verdict",))
        for sentence in self.shown.verdicts(self.figures):
            table.add_row(sentence)
        yield table

    def as_dict(self) -> dict[str, Any]:
        """Returns the record that is kept."""
        parts = {"command": self.command, "model": self.model, "notes": self.notes, "commit": _commit()}
        return {**parts, "figures": self.figures}


def check_plot(plot: Path | None) -> None:
    """Raises ConfigError or MissingExtraError if a picture that is asked for cannot be drawn, before measuring."""
    if plot is not None:
        check_picture(plot)


def finished(report: ShownReport, plot: Path | None) -> ShownReport:
    """Draws the picture, if one is asked for, and returns the report."""
    if plot is not None:
        report.shown.draw_to(plot, report.figures)
    return report


def _commit() -> str:
    """Returns the commit of the checkout; ``unknown`` outside of one."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
