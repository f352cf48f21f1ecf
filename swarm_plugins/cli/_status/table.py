"""The survey as tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from swarm_plugins.cli._status.survey import ModelStatus, ServerStatus, runs

__all__ = ["print_tables"]

_NUMBERS = ("load", "free KV tokens", "tokens/s a block")
_COLUMNS = ("peer", "blocks", "state", "dtype", *_NUMBERS, "adapters")


def print_tables(found: Sequence[ModelStatus], console: Console | None = None) -> None:
    """Prints one table for each model version, and what is missing."""
    console = console or Console()
    for one in found:
        table = Table(title=escape(f"{one.model}@{one.version}"), title_justify="left", title_style="bold")
        for name in _COLUMNS:
            table.add_column(name, justify="right" if name in _NUMBERS else "left")
        for server in one.servers:
            table.add_row(*(escape(cell) for cell in _cells(server)))
        console.print(table)
        console.print(f"coverage: {_coverage(one.coverage)}")
        if one.missing:
            missing = ", ".join(f"{start}:{end}" for start, end in runs(one.missing))
            console.print(f"[red]missing blocks: {missing}[/red] (serve them with: swarm serve MODEL --blocks A:B)")


def _cells(server: ServerStatus) -> tuple[str, ...]:
    info = server.info
    kept = "" if info.quantization == "none" else f", {info.quantization}"
    state = info.state if server.is_reachable or info.state != "online" else "unreachable"
    return (
        server.peer,
        f"{info.start}:{info.end}",
        state,
        f"{info.dtype}{kept}",
        f"{info.load:.0%}",
        f"{_short(info.free_kv_tokens)} of {_short(info.total_kv_tokens)}",
        _short(info.throughput),
        ", ".join(info.adapters),
    )


def _short(number: float) -> str:
    """Says a number in three digits: ``4.19 M``."""
    for unit in ("", " k", " M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} G"


def _coverage(counts: Sequence[int]) -> str:
    """Says how many servers hold each range of blocks: ``0:10 x2, 10:30 x1``."""
    parts = []
    block = 0
    for count, group in itertools.groupby(counts):
        length = len(list(group))
        parts.append(f"{block}:{block + length} x{count}")
        block += length
    return ", ".join(parts)
