"""The figures of `swarm bench quality`, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from swarm_plugins.bench.figures import machine
from swarm_plugins.demo.evaluation import Figure
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.widths import Width, sort_key, width_text

__all__ = ["QualityReport", "Row"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One pair of widths."""

    attention_bits: Width
    expert_bits: Width
    num_bytes: int
    """Of all weights."""
    perplexity: float
    loss_change: Figure
    """Against the widest pair, with its standard error over pieces."""


@dataclass(kw_only=True)
class QualityReport:
    """All pairs of one run."""

    model: str
    text: str
    num_tokens: int
    rows: list[Row] = field(default_factory=list)

    def print_table(self, console: Console) -> None:
        """Prints the pairs, grouped by the width of attention as in the paper."""
        table = Table(title=f"swarm bench quality: {self.model}", title_justify="left")
        for heading in ("attention", "experts", "size", "perplexity", "change of loss"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in sorted(self.rows, key=_order, reverse=True):
            table.add_row(
                width_text(row.attention_bits),
                width_text(row.expert_bits),
                f"{row.num_bytes / 1e9:.3f} GB",
                f"{row.perplexity:.2f}",
                f"{row.loss_change.mean:+.4f} ± {row.loss_change.standard_error:.4f}",
            )
        console.print(table)
        console.print(f"  {self.num_tokens} tokens of {self.text}; attention: all linear layers but the output head")
        console.print("  " + ", ".join(f"{key} {value}" for key, value in machine().items()))

    def write_json(self, path: Path) -> None:
        """Writes the pairs to a file.

        Raises:
            ConfigError: If it cannot be written.
        """
        try:
            path.write_text(json.dumps({**asdict(self), "machine": machine()}, indent=1) + "\n")
        except OSError as exc:
            raise ConfigError(f"cannot write the figures to {path}: {exc.strerror}; name another file") from exc


def _order(row: Row) -> tuple[tuple[int, str], tuple[int, str]]:
    return sort_key(row.attention_bits), sort_key(row.expert_bits)
