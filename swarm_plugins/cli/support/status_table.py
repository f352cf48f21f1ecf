"""Prints the survey of a swarm as tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from swarm_plugins.cli.support.output import wide_console
from swarm_plugins.client.discovery.missing import ranges, runs
from swarm_plugins.sizes import format_bytes
from swarm_plugins.survey import Joining, ModelStatus, ServerStatus
from swarm_plugins.transport.server_info import ServerInfo

_NUMBERS = ("load", "tokens/s", "free KV tokens", "tokens/s a block")
_NARROW = ("peer", "blocks", "state", "dtype", "load", "free KV tokens")
_COLUMNS = (*_NARROW, "tokens/s a block")
_LIVE_NARROW = ("peer", "blocks", "state", "load", "tokens/s", "free KV tokens")
_LIVE_COLUMNS = ("peer", "blocks", "state", "dtype", "load", "tokens/s", "free KV tokens", "tokens/s a block")
_PIPE_CHARS = 200
_WIDE_CHARS = 140
_FITTING_CHARS = 80
"""Where all columns but one fit, only that one is folded."""
_END_CHARS = 8
"""Characters kept from the end of a peer id in a narrow terminal: all ids start alike."""


def table_console() -> Console:
    """Returns a console for `print_tables`."""
    return wide_console(_PIPE_CHARS)


def print_tables(found: Sequence[ModelStatus], console: Console, joining: Joining | None = None) -> None:
    """Prints one table per model version, and commands to serve its missing blocks.

    A narrow terminal shows only the ends of peer ids, and no throughput.
    """
    joining = joining or Joining()
    if not found:
        console.print("No server serves anything in this swarm.")
    for one in found:
        console.print(_table(one, console.width))
        for line in _remarks_of(one, console.width):
            console.print(line, soft_wrap=True)
        console.print(f"coverage: {_coverage(one.coverage)}")
        for line in _gaps(one, joining):
            console.print(line, soft_wrap=True)


def live_tables(
    found: Sequence[ModelStatus], width: int, rates: Mapping[str, float], joining: Joining
) -> Iterator[RenderableType]:
    """Yields the same for a screen, with the tokens/s of servers, and gaps first: a screen may be too short for all."""
    for one in found:
        yield Text(_title(one), style="bold")
        yield Text(f"coverage: {_coverage(one.coverage)}")
        for line in map(Text.from_markup, _gaps(one, joining)):
            yield Text(_folded(line.plain, width)) if line.plain.startswith("  ") else line
        yield _table(one, width, rates)
        yield from (Text.from_markup(line) for line in _remarks_of(one, width))


def _table(one: ModelStatus, width: int, rates: Mapping[str, float] | None = None) -> Table:
    """Returns the servers of a model version; with ``rates``, the tokens/s of each, as far as they are known."""
    is_wide = width >= _WIDE_CHARS
    names = (_COLUMNS if is_wide else _NARROW) if rates is None else _LIVE_COLUMNS if is_wide else _LIVE_NARROW
    title = escape(_title(one)) if rates is None else None
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in names:
        is_folded = name == "dtype" or width < _FITTING_CHARS
        justify: Literal["left", "right"] = "right" if name in _NUMBERS else "left"
        table.add_column(name, justify=justify, no_wrap=not is_folded, overflow="fold")
    for server in one.servers:
        cells = _cells(server, _label(server.peer, is_wide=is_wide), (rates or {}).get(server.peer))
        table.add_row(*(escape(cells[name]) for name in names))
    return table


def _folded(command: str, width: int) -> str:
    """Breaks a command so that it can be copied: outside quotes, the shell joins lines that end in a backslash."""
    if len(command) <= width or "'" in command:
        return command
    return "\\\n".join(command[start : start + width - 1] for start in range(0, len(command), width - 1))


def _title(one: ModelStatus) -> str:
    return f"{one.model}@{one.version}"


def _remarks_of(one: ModelStatus, width: int) -> Iterator[str]:
    is_wide = width >= _WIDE_CHARS
    for server in one.servers:
        for remark in _remarks(server):
            yield escape(f"{_label(server.peer, is_wide=is_wide)} {remark}")


def _gaps(one: ModelStatus, joining: Joining) -> Iterator[str]:
    """Yields what no server has, and the commands that serve it, in rich's markup."""
    if not one.missing and not one.missing_experts:
        return
    source = joining.source(one)
    hint = f" ({escape(source)}: your copy of the model's directory)" if source.startswith("PATH/TO/") else ""
    if one.missing:
        yield f"[red]missing blocks: {ranges(one.missing)}[/red]; serve them with{hint}:"
        for blocks in runs(one.missing):
            yield f"  {escape(joining.command(one, blocks))}"
    for blocks, experts in one.missing_experts:
        which = f"experts {experts.start}:{experts.stop} of blocks {blocks.start}:{blocks.stop}"
        yield f"[red]missing {which}[/red]; serve them with{hint}:"
        yield f"  {escape(joining.command(one, blocks, experts))}"


def _label(peer: str, *, is_wide: bool) -> str:
    return peer if is_wide or len(peer) <= _END_CHARS else f"\u2026{peer[-_END_CHARS:]}"


def _cells(server: ServerStatus, label: str, rate: float | None) -> dict[str, str]:
    info = server.info
    kept = "" if info.quantization == "none" else f", {info.quantization}"
    state: str = info.state if server.is_reachable or info.state != "online" else "unreachable"
    return {
        "peer": label,
        "blocks": _blocks(info),
        "state": "quarantined" if server.quarantine else state,
        "dtype": f"{info.dtype}{kept}",
        "load": f"{info.load:.0%}",
        "tokens/s": "" if rate is None else _short(rate),
        "free KV tokens": f"{_short(info.free_kv_tokens)} of {_short(info.total_kv_tokens)}",
        "tokens/s a block": _short(info.throughput),
    }


def _sessions(info: ServerInfo) -> str:
    """Returns what a row of a session takes where its model has states of fixed size."""
    tokens = f" and {format_bytes(info.kv_token_bytes)} a token" if info.kv_token_bytes else ""
    return f"states of {format_bytes(info.kv_row_bytes)}{tokens}"


def _remarks(server: ServerStatus) -> list[str]:
    """Returns what does not fit into the table: why a server is not used, its experts, its adapters."""
    adapters = ", ".join(server.info.adapters)
    also = ", ".join(f"blocks {start}:{end} of {version}" for version, start, end in server.info.also)
    unkept, refused = server.info.unkept_graphs, server.info.refused_pushes
    # Most reasons begin with the peer, as the line does.
    reason = server.reason.removeprefix(f"peer {server.peer} ")
    lost = reason if reason != server.reason else f"is not used: {reason}"
    found = {
        f"is in quarantine: {server.quarantine}": server.quarantine,
        lost: server.reason and not server.is_reachable,
        _experts(server.info): True,
        f"keeps {_sessions(server.info)} in each row of a session": server.info.kv_row_bytes,
        f"also serves {also}": also,
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
