"""Prints the survey of a swarm as tables."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from swarm_plugins.client.discovery.missing import ranges, runs, serve_command
from swarm_plugins.survey import ModelStatus, ServerStatus
from swarm_plugins.transport.server_info import ServerInfo

_NUMBERS = ("load", "free KV tokens", "tokens/s a block")
_NARROW = ("peer", "blocks", "state", "dtype", "load", "free KV tokens")
_COLUMNS = (*_NARROW, "tokens/s a block")
_WIDE_CHARS = 140
_FITTING_CHARS = 80
"""Where all columns but one fit, only that one is folded."""
_END_CHARS = 8
"""Characters kept from the end of a peer id in a narrow terminal: all ids start alike."""


def print_tables(
    found: Sequence[ModelStatus],
    console: Console | None = None,
    *,
    initial_peers: Sequence[str] = (),
    discovery: str = "dht",
    secret_file: Path | None = None,
) -> None:
    """Prints one table per model version, and commands to serve its missing blocks.

    A narrow terminal shows only the ends of peer ids, and no throughput.
    """
    console = console or Console()
    is_wide = console.width >= _WIDE_CHARS
    joining = functools.partial(
        serve_command, initial_peers=initial_peers, discovery=discovery, secret_file=secret_file
    )
    for one in found:
        table = Table(title=escape(f"{one.model}@{one.version}"), title_justify="left", title_style="bold")
        for name in _COLUMNS if is_wide else _NARROW:
            is_folded = name == "dtype" or console.width < _FITTING_CHARS
            justify: Literal["left", "right"] = "right" if name in _NUMBERS else "left"
            table.add_column(name, justify=justify, no_wrap=not is_folded, overflow="fold")
        for server in one.servers:
            cells = _cells(server, _label(server.peer, is_wide=is_wide))
            table.add_row(*(escape(cell) for cell in cells[: len(table.columns)]))
        console.print(table)
        for server in one.servers:
            for remark in _remarks(server):
                console.print(escape(f"{_label(server.peer, is_wide=is_wide)} {remark}"), soft_wrap=True)
        console.print(f"coverage: {_coverage(one.coverage)}")
        if one.missing:
            console.print(f"[red]missing blocks: {ranges(one.missing)}[/red]; serve them with:")
            for blocks in runs(one.missing):
                command = joining(_source(one), one.version, blocks)
                console.print(f"  {escape(command)}", soft_wrap=True)
        for blocks, experts in one.missing_experts:
            which = f"experts {experts.start}:{experts.stop} of blocks {blocks.start}:{blocks.stop}"
            command = joining(_source(one), one.version, blocks, experts=experts)
            console.print(f"[red]missing {which}[/red]; serve them with:")
            console.print(f"  {escape(command)}", soft_wrap=True)


def _source(one: ModelStatus) -> str:
    # Servers announce the name of a directory, not where it is.
    return f"path/to/{one.model}" if one.version.startswith("local-") else one.model


def _label(peer: str, *, is_wide: bool) -> str:
    return peer if is_wide or len(peer) <= _END_CHARS else f"\u2026{peer[-_END_CHARS:]}"


def _cells(server: ServerStatus, label: str) -> tuple[str, ...]:
    info = server.info
    kept = "" if info.quantization == "none" else f", {info.quantization}"
    state: str = info.state if server.is_reachable or info.state != "online" else "unreachable"
    state = "quarantined" if server.quarantine else state
    return (
        label,
        _blocks(info),
        state,
        f"{info.dtype}{kept}",
        f"{info.load:.0%}",
        f"{_short(info.free_kv_tokens)} of {_short(info.total_kv_tokens)}",
        _short(info.throughput),
    )


def _remarks(server: ServerStatus) -> list[str]:
    """Returns what does not fit into the table: why a server is not used, its experts, its adapters."""
    adapters = ", ".join(server.info.adapters)
    unkept, refused = server.info.unkept_graphs, server.info.refused_pushes
    # Most reasons begin with the peer, as the line does.
    reason = server.reason.removeprefix(f"peer {server.peer} ")
    lost = reason if reason != server.reason else f"is not used: {reason}"
    found = {
        f"is in quarantine: {server.quarantine}": server.quarantine,
        lost: server.reason and not server.is_reachable,
        _experts(server.info): True,
        f"holds the adapters {adapters}": adapters,
        f"ran forwards again for their backward: {unkept}; more --activation-bytes would save it that": unkept,
        f"refused hidden states that other servers pushed, late or not allowed: {refused}": refused,
    }
    return [remark for remark, applies in found.items() if remark and applies]


def _blocks(info: ServerInfo) -> str:
    """Returns the span, and where the server is moving to or from."""
    if info.experts is not None:
        return "experts"
    span = f"{info.start}:{info.end}"
    if info.leaving is not None:
        span = f"{info.leaving[0]}:{info.leaving[1]} > {span}"
    return span if info.target in (None, (info.start, info.end)) else f"{span} > {info.target[0]}:{info.target[1]}"


def _experts(info: ServerInfo) -> str:
    """Returns which experts a server has, or fetches; empty for a server of whole blocks."""
    if info.experts is not None:
        part = "" if info.slice is None else f", slice {info.slice[0]}/{info.slice[1]} of each"
        return f"holds experts {info.experts[0]}:{info.experts[1]} of blocks {info.start}:{info.end}{part}"
    needs = ", ".join(f"{first}:{last} of blocks {start}:{end}" for start, end, first, last in info.needs)
    return f"fetches experts {needs}" if needs else ""


def _short(number: float) -> str:
    """Formats a number with three digits: ``4.19 M``."""
    for unit in ("", " k", " M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} G"


def _coverage(counts: Sequence[int]) -> str:
    """Returns how many servers hold each range of blocks: ``0:10 x2, 10:30 x1``."""
    parts = []
    block = 0
    for count, group in itertools.groupby(counts):
        length = len(list(group))
        parts.append(f"{block}:{block + length} x{count}")
        block += length
    return ", ".join(parts)
