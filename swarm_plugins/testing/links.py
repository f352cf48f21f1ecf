"""TCP connections that can fail: a link is a port of this machine that leads to another one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from swarm_plugins.testing.transports import Line

_HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 16
_MAX_CHUNKS = 64
"""On the way in one direction; more wait at the sender."""


class Link(Line):
    """A `Line` made of TCP connections, from ``port`` to ``target_port``.

    What a fault takes arrives after it, as with lost packets, which TCP sends again. Bytes are only counted as
    requests if they go to ``target_port``, and as answers otherwise.

    Call all methods on one event loop; attributes may be set anywhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.port = 0
        self.target_port = free_port()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begins to listen."""
        self._server = await asyncio.start_server(self._connected, _HOST, 0)
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
        task = asyncio.create_task(self._connect(reader, writer), name=f"link to port {self.target_port}")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            await self.wait_until(lambda: self.is_sound)
            far_reader, far_writer = await asyncio.open_connection(_HOST, self.target_port)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._carry(reader, far_writer, lambda: self.loses_requests))
                directions.create_task(self._carry(far_reader, writer, lambda: self.loses_answers))
        except* OSError:
            pass  # one end has gone: the other learns it by the end of its connection
        finally:
            for one in writers:
                one.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_lost: Callable[[], bool]
    ) -> None:
        """Carries bytes in one direction until their end."""
        clock = asyncio.get_running_loop()
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_CHUNKS)

        async def arrive() -> None:
            while True:
                left_at, chunk = await on_the_way.get()
                await asyncio.sleep(left_at + self.delay_s - clock.time())
                await self.wait_until(lambda: not (is_lost() or self.is_frozen))
                if not chunk:
                    return
                writer.write(chunk)
                await writer.drain()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(arrive())
            while chunk := await reader.read(_CHUNK_BYTES):
                await on_the_way.put((clock.time(), chunk))
            await on_the_way.put((clock.time(), b""))
        with contextlib.suppress(OSError):
            writer.write_eof()


def free_port() -> int:
    """Returns a port that no program listens on now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port
