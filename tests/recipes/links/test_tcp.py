"""Lines between ports: what they carry, and what each fault does to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from recipes.benchmarks.links import Link
from recipes.benchmarks.links.tcp import TcpLine, free_port

SOON_S = 20.0
NOTHING_S = 0.2
"""Long enough for a byte that nothing holds back."""


@asynccontextmanager
async def echo_behind(line: TcpLine) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yields a connection through a link to a server that sends everything back."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", line.target_port):
        await line.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", line.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            await line.close()


@pytest.mark.parametrize("fault", ["loses_requests", "loses_answers", "is_frozen"])
def test_what_a_fault_takes_arrives_after_it(fault: str) -> None:
    async def body() -> None:
        line = TcpLine(free_port())
        async with echo_behind(line) as (reader, writer):
            writer.write(b"before")
            assert await reader.readexactly(6) == b"before"
            setattr(line, fault, True)
            writer.write(bytes(1 << 20))
            writer.write_eof()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), NOTHING_S)
            setattr(line, fault, False)
            assert await reader.read() == bytes(1 << 20)

    asyncio.run(asyncio.wait_for(body(), SOON_S))


def test_a_slow_link_delays_each_direction() -> None:
    async def body() -> None:
        line = TcpLine(free_port())
        async with echo_behind(line) as (reader, writer):
            line.link = Link(rtt_ms=400)
            started = asyncio.get_running_loop().time()
            writer.write(b"slow")
            assert await reader.readexactly(4) == b"slow"
            assert asyncio.get_running_loop().time() - started >= 0.4

    asyncio.run(asyncio.wait_for(body(), SOON_S))


def test_a_connection_ends_with_its_target() -> None:
    async def body() -> None:
        line = TcpLine(free_port())
        await line.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", line.port)
        assert await reader.read() == b""
        writer.close()
        await line.close()
        await line.close()

    asyncio.run(asyncio.wait_for(body(), SOON_S))


def test_a_shut_line_takes_no_new_connection_and_keeps_the_others() -> None:
    async def body() -> None:
        line = TcpLine(free_port())
        async with echo_behind(line) as (reader, writer):
            writer.write(b"open")
            assert await reader.readexactly(4) == b"open"
            line.is_shut = True
            late_reader, late_writer = await asyncio.open_connection("127.0.0.1", line.port)
            late_writer.write(b"late")
            with contextlib.suppress(ConnectionResetError):
                assert await late_reader.read() == b""
            late_writer.close()
            writer.write(b"still open")
            assert await reader.readexactly(10) == b"still open"
            assert line.there.num_bytes == line.back.num_bytes == 14
            line.is_shut = False
            new_reader, new_writer = await asyncio.open_connection("127.0.0.1", line.port)
            new_writer.write(b"new")
            assert await new_reader.readexactly(3) == b"new"
            new_writer.close()

    asyncio.run(asyncio.wait_for(body(), SOON_S))
