"""``swarm top``: the servers of a swarm in a terminal, live."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from swarm_plugins.cli.status import SERVER_TIMEOUT_S, print_status
from swarm_plugins.cli.support.arguments import Served
from swarm_plugins.cli.support.config_options import Given
from swarm_plugins.cli.support.joining import client_node, client_options
from swarm_plugins.cli.support.output import one_sentence_errors
from swarm_plugins.errors import TransportError, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from swarm_plugins.survey import Joining, ModelStatus
    from swarm_plugins.transport.config import NodeConfig

_ALL_SERVERS_S = 4 * SERVER_TIMEOUT_S
"""Many servers that do not answer must not keep the screen empty."""


@client_options
def top(
    given: Given,
    model: Served = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Show who serves what, as status does, live: with tokens/s, load, free KV cache, and what is missing.

    q or Ctrl-C ends it. In a pipe it prints one table.
    """
    with one_sentence_errors("top"):
        config = client_node(given)
        # What takes seconds to import comes after what may be wrong at once.
        import asyncio

        from swarm_plugins.cli.support.status_table import table_console

        console = table_console()
        if console.is_terminal and not console.is_dumb_terminal:
            asyncio.run(_watch(config, model, console, interval_s=interval))
        else:
            print_status(config, model, "top", within_s=_ALL_SERVERS_S)


class Rates:
    """Tokens per second of each server, from what it says at two looks."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, float]] = {}

    def update(self, found: Sequence[ModelStatus], now: float) -> dict[str, float]:
        """Returns the rates since the last look, of servers that answered both times."""
        seen = {
            server.peer: (server.info.served_tokens, now)
            for one in found
            for server in one.servers
            if server.is_reachable
        }
        rates = {}
        for peer, (tokens, _) in seen.items():
            tokens_before, before = self._before.get(peer, (tokens, now))
            # A server that was started again counts from 0.
            if now > before and tokens >= tokens_before:
                rates[peer] = (tokens - tokens_before) / (now - before)
        self._before = seen
        return rates


async def _watch(config: NodeConfig, wanted: str | None, console: Console, *, interval_s: float) -> None:
    import asyncio

    from swarm_plugins.survey import Joining, survey_node
    from swarm_plugins.transport.node import SwarmNode
    from swarm_plugins.verification.quarantine import user_quarantine

    joining = Joining(config.initial_peers, config.discovery, config.secret_file)
    async with SwarmNode(config) as node:

        async def look() -> list[ModelStatus]:
            excluded = user_quarantine().reasons()
            return await survey_node(
                node, wanted, timeout_s=SERVER_TIMEOUT_S, within_s=_ALL_SERVERS_S, quarantined=excluded
            )

        async def redraw() -> None:
            rates, found, fault = Rates(), await look(), ""
            with _screen(console, joining, f"every {interval_s:g} s; q ends it") as show:
                speeds = rates.update(found, time.monotonic())
                while True:
                    show(found, speeds, fault)
                    await asyncio.sleep(interval_s)
                    try:
                        found, fault = await look(), ""
                        speeds = rates.update(found, time.monotonic())
                    except TransportError as error:
                        if not node.is_alive:
                            raise
                        fault = f"the last look failed: {one_line(error)}"

        quit_asked = asyncio.Event()
        tasks = [asyncio.create_task(redraw()), asyncio.create_task(quit_asked.wait())]
        try:
            with _key("q", quit_asked.set):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended, _ = await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended


@contextlib.contextmanager
def _screen(
    console: Console, joining: Joining, title: str
) -> Iterator[Callable[[Sequence[ModelStatus], dict[str, float], str], None]]:
    """Yields a function that draws what was found over what it drew before."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from swarm_plugins.cli.support.status_table import live_tables

    def show(found: Sequence[ModelStatus], rates: dict[str, float], fault: str) -> None:
        head = [Text(f"swarm top, {time.strftime('%H:%M:%S')}, {title}", style="dim")]
        head += [Text(fault, style="red")] if fault else []
        head += [] if found else [Text("No server serves this.")]
        live.update(Group(*head, *live_tables(found, console.width, rates, joining)), refresh=True)

    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield show


@contextlib.contextmanager
def _key(letter: str, pressed: Callable[[], object]) -> Iterator[None]:
    """Calls a function when a key is pressed in the terminal, which echoes nothing meanwhile, or when it is closed."""
    if not sys.stdin.isatty():
        yield
        return
    import asyncio
    import termios
    import tty

    terminal, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(terminal)

    def read() -> None:
        try:
            letters = os.read(terminal, 64)
        except OSError:
            letters = b""
        if not letters or letter.encode() in letters:
            pressed()

    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
