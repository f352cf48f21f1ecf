"""TCP connections through a line: a port of this machine that leads to another one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable

from swarm_plugins.errors import TransportError
from recipes.benchmarks.links.line import Line
from recipes.benchmarks.links.link import Link
from recipes.benchmarks.links.pacing import Pacer

HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 16
_MAX_CHUNKS = 256
"""On the way in one direction of a connection; more wait at the sender. Enough for 1 Gbit/s over 130 ms."""
_PORTS = range(20_000, 32_000)
"""The system gives none of these to outgoing connections."""
_TRIES = 100


class TcpLine(Line):
    """A `Line` made of TCP connections, from ``port`` to ``target_port``, which share its rate.

    What a fault takes arrives after it, as with lost packets, which TCP sends again. Bytes are only counted as
    requests if they go to ``target_port``, and as answers otherwise.

    Call all methods on one event loop; attributes may be set anywhere.

    Args:
        target_port: Where it leads to.
        link: Its delay and rate.
    """

    def __init__(self, target_port: int, link: Link | None = None) -> None:
        super().__init__(link)
        self.port = 0
        self.target_port = target_port
        self.is_shut = False
        """New connections are ended at once; open ones go on."""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begins to listen."""
        self._server = await asyncio.start_server(self._connected, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Ends all connections. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connect(reader, writer), name=f"line to port {self.target_port}")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            if self.is_shut:
                return
            await self.wait_until(lambda: self.is_sound)
            far_reader, far_writer = await asyncio.open_connection(HOST, self.target_port)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._carry(reader, far_writer, lambda: self.there, lambda: self.loses_requests))
                ways.create_task(self._carry(far_reader, writer, lambda: self.back, lambda: self.loses_answers))
        except* OSError:
            pass  # one end has gone: the other learns it by the end of its connection
        finally:
            for one in writers:
                one.transport.abort()

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pacer: Callable[[], Pacer],
        is_lost: Callable[[], bool],
    ) -> None:
        """Carries bytes in one direction until their end."""
        clock = asyncio.get_running_loop()
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_CHUNKS)

        async def arrive() -> None:
            while True:
                arrival, chunk = await on_the_way.get()
                await asyncio.sleep(arrival - clock.time())
                await self.wait_until(lambda: not (is_lost() or self.is_frozen))
                if not chunk:
                    return
                writer.write(chunk)
                await writer.drain()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(arrive())
            while True:
                chunk = await reader.read(_CHUNK_BYTES)
                await on_the_way.put((pacer().arrival(clock.time(), len(chunk)), chunk))
                if not chunk:
                    break
        with contextlib.suppress(OSError):
            writer.write_eof()


def free_port() -> int:
    """Returns a port that no program listens on now.

    Raises:
        TransportError: If none is found.
    """
    for port in random.sample(_PORTS, _TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise TransportError(
        f"none of {_TRIES} ports of {_PORTS.start} to {_PORTS.stop} is free on {HOST}: end what listens"
    )
