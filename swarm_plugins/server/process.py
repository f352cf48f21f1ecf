"""Runs a server in this process until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
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

_M_ARENA_MAX = -8
_LAST_RESORT_S = 40.0
"""Time from a signal to the end of the process at the latest: each part of leaving has a shorter deadline."""


def prepare_process(log_level: str, threads: int | None) -> None:
    """Sets up the process: logging, threads, memory arenas."""
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if threads is not None:
        torch.set_num_threads(threads)
    # By default glibc keeps freed memory in one arena per thread: a server with two busy threads would hold it twice.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def run_server(server: SwarmServer, embedding: Embedding | None) -> None:
    """Serves until SIGINT or SIGTERM; then leaves the process at once.

    Raises:
        SwarmError: If the server cannot start, or loses the swarm.
    """
    asyncio.run(_serve(server, embedding))
    sys.stdout.flush()
    sys.stderr.flush()
    # An interrupted load still runs in its thread, and torch takes its time to unload: there is nothing left to do.
    os._exit(0)


async def _serve(server: SwarmServer, embedding: Embedding | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _stop, stop)
    stopped = asyncio.create_task(stop.wait(), name="wait for a signal")
    serving = asyncio.create_task(_until_lost(server, embedding), name="serve")
    try:
        await asyncio.wait([stopped, serving], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
    finally:
        for task in (serving, stopped):
            task.cancel()
        await asyncio.gather(serving, stopped, return_exceptions=True)
        await server.close()


def _stop(stop: asyncio.Event) -> None:
    if not stop.is_set():
        last_resort = threading.Timer(_LAST_RESORT_S, os._exit, (1,))
        last_resort.daemon = True
        last_resort.start()
    stop.set()


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
    part = "" if info.slice is None else f", slice {info.slice[0]}/{info.slice[1]}"
    what = "" if info.experts is None else f"experts {info.experts[0]}:{info.experts[1]}{part} of "
    sys.stdout.write(
        f"Serving {what}blocks {info.start}:{info.end} of {info.num_blocks} of {info.model}@{info.version}; "
        f"others join with: swarm serve {shlex.quote(config.model)}{revision} {peers}\n"
    )
    sys.stdout.flush()
