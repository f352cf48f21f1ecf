"""Runs a server in this process until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import datetime
import json
import logging
import os
import shlex
import signal
import sys
import threading
from typing import TYPE_CHECKING

import torch

from swarm_plugins.errors import TransportError
from swarm_plugins.server.embedding import Embedding

if TYPE_CHECKING:
    from swarm_plugins.server.server import SwarmServer
from swarm_plugins.sizes import format_bytes

log = logging.getLogger(__name__)

_LEVELS = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
    logging.CRITICAL: "critical",
}
_M_ARENA_MAX = -8
_SWITCH_S = 0.0005
_FOR_OTHERS = "/ip4/0.0.0.0/tcp/31337"
_LAST_RESORT_S = 40.0
"""Time from a signal to the end of the process at the latest: each part of leaving has a shorter deadline."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, and ``error`` with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            # Not by name: hivemind renames levels.
            "level": _LEVELS.get(record.levelno, record.levelname.lower()),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def prepare_process(log_level: str, threads: int | None, *, log_format: str = "text") -> None:
    """Sets up the process: logging, threads, memory arenas."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(level=log_level.upper(), handlers=[handler])
    logging.captureWarnings(log_format == "json")
    # Each operation of torch gives up the interpreter, and a busy event loop keeps it for so long: by default 5 ms. A
    # forward has hundreds of them.
    sys.setswitchinterval(_SWITCH_S)
    if threads is not None:
        torch.set_num_threads(threads)
    # By default glibc keeps freed memory in one arena per thread: a server with two busy threads would hold it twice.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def run_server(server: SwarmServer, embedding: Embedding | None) -> None:
    """Serves until SIGINT or SIGTERM, drains, and leaves the process; a second signal cuts open sessions off.

    Raises:
        SwarmError: If the server cannot start, or loses the swarm.
    """
    asyncio.run(_serve(server, embedding))
    sys.stdout.flush()
    sys.stderr.flush()
    # An interrupted load still runs in its thread, and torch takes its time to unload: there is nothing left to do.
    os._exit(0)


async def _serve(server: SwarmServer, embedding: Embedding | None) -> None:
    stop = _Stop(server.config.drain_s)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.ask)
    stopped = asyncio.create_task(_until_asked(server, stop), name="wait for a signal")
    serving = asyncio.create_task(_until_lost(server, embedding), name="serve")
    try:
        await asyncio.wait([stopped, serving], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
    finally:
        for task in (serving, stopped):
            task.cancel()
        await asyncio.gather(serving, stopped, return_exceptions=True)
        if stop.asked.is_set():
            await _drain(server, stop)
        await server.close()


async def _until_asked(server: SwarmServer, stop: _Stop) -> None:
    """Waits for a signal, or for the server's operator."""
    by_rpc = asyncio.create_task(server.asked_to_end.wait(), name="wait for the operator")
    by_rpc.add_done_callback(lambda done: None if done.cancelled() else stop.ask_once())
    try:
        await stop.asked.wait()
    finally:
        by_rpc.cancel()


class _Stop:
    """Counts the signals that ask the process to end."""

    def __init__(self, drain_s: float) -> None:
        self.asked = asyncio.Event()
        self.urged = asyncio.Event()
        """Asked again: open sessions need not end."""
        self._drain_s = drain_s

    def ask_once(self) -> None:
        """Asks, but never again: a request that comes twice is not urgent."""
        if not self.asked.is_set():
            self.ask()

    def ask(self) -> None:
        """Asks for the first or another time."""
        (self.urged if self.asked.is_set() else self.asked).set()
        last_resort = threading.Timer(_LAST_RESORT_S + (0 if self.urged.is_set() else self._drain_s), os._exit, (1,))
        last_resort.daemon = True
        last_resort.start()


async def _drain(server: SwarmServer, stop: _Stop) -> None:
    drain_s = server.config.drain_s
    if drain_s <= 0:
        return
    draining = asyncio.create_task(server.drain(drain_s), name="drain")
    urged = asyncio.create_task(stop.urged.wait(), name="wait for a second signal")
    await asyncio.wait([draining, urged], return_when=asyncio.FIRST_COMPLETED)
    if draining.done() and draining.exception() is None and (left := draining.result()):
        log.warning("sessions still open after %.0f s: %d; their clients go on elsewhere", drain_s, left)
    for task in (draining, urged):
        task.cancel()
    await asyncio.gather(draining, urged, return_exceptions=True)


async def _until_lost(server: SwarmServer, embedding: Embedding | None) -> None:
    joined = asyncio.Event()
    start = asyncio.create_task(server.start(on_joined=lambda _: joined.set()), name="start the server")
    try:
        if embedding is not None:
            await _first(start, joined)
            if joined.is_set():
                embedding.send("joined", peer_id=server.peer_id, addresses=await server.addresses())
        await start
    finally:
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
    _report(server, await server.addresses(), embedding)
    await server.wait_lost()
    raise TransportError("the libp2p daemon died and the swarm could not be joined again: start the server again")


async def _first(start: asyncio.Task[None], joined: asyncio.Event) -> None:
    waiting = asyncio.create_task(joined.wait(), name="wait until joined")
    await asyncio.wait([start, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


def _report(server: SwarmServer, addresses: tuple[str, ...], embedding: Embedding | None) -> None:
    info, config = server.info, server.config
    if embedding is not None:
        embedding.send("ready", start=info.start, end=info.end, version=info.version)
        return
    peers = " ".join(f"--initial-peers {address}" for address in addresses)
    revision = f" --revision {shlex.quote(config.revision)}" if config.revision else ""
    joining = " --discovery static" if config.discovery == "static" else ""
    joining += f" --secret-file {shlex.quote(str(config.secret_file))}" if config.secret_file else ""
    part = "" if info.slice is None else f", slice {info.slice[0]}/{info.slice[1]}"
    what = "" if info.experts is None else f"experts {info.experts[0]}:{info.experts[1]}{part} of "
    memory = ", ".join(
        f"--{name.replace('_', '-')} {format_bytes(size).replace(' ', '')}" for name, size in server.memory.items()
    )
    also = "".join(f"Also serving blocks {start}:{end} of {version}\n" for version, start, end in info.also)
    reach = ""
    if config.is_loopback_only and not config.announced:
        reach = f"Only this machine reaches the address. For others: --host-maddrs {_FOR_OTHERS}\n"
    sys.stdout.write(
        f"Serving {what}blocks {info.start}:{info.end} of {info.num_blocks} of {info.model}@{info.version}; "
        f"others join with: swarm serve {shlex.quote(config.model)}{revision} {peers}{joining}\n"
        f"{also}Memory for work: {memory}\n{reach}"
    )
    sys.stdout.flush()
