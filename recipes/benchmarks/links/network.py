"""All lines between the peers of a swarm on one machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from recipes.benchmarks.links.link import Link
from recipes.benchmarks.links.tcp import TcpLine, free_port
from swarm_plugins.local_swarm.lines import Ports

MAX_SERVERS = 16
"""A relay can have a thousand ports and connections, and each server has a port for clients and one for every other."""


class Traffic(msgspec.Struct, frozen=True):
    """Bytes carried so far, with those of handshakes and encryption."""

    to_servers: int
    """From clients."""
    from_servers: int
    """To clients."""
    between: int
    """Servers, in both directions."""


class Network:
    """Lines from clients to each server, and from each server to each other one.

    [`Lines`][swarm_plugins.local_swarm.Lines] says which of them are open. A server whose connection to another one has
    broken calls it as a client does.

    Args:
        num_servers: Servers, at most `MAX_SERVERS` in a `Relay`.
        link: Between clients and servers.
        server_link: Between servers.
    """

    def __init__(self, num_servers: int, link: Link, server_link: Link) -> None:
        own = [free_port() for _ in range(num_servers)]
        self.for_clients = tuple(TcpLine(port, link) for port in own)
        """The line from clients to each server."""
        self.for_servers = tuple(tuple(TcpLine(port, server_link) for port in own) for _ in own)
        """``for_servers[caller][called]``."""
        for line in self.for_clients:
            line.is_shut = True

    def _lines(self) -> Iterator[TcpLine]:
        yield from self.for_clients
        for lines in self.for_servers:
            yield from lines

    async def start(self) -> None:
        """Begins to listen."""
        await asyncio.gather(*(line.start() for line in self._lines()))

    async def close(self) -> None:
        """Ends all connections. Idempotent."""
        await asyncio.gather(*(line.close() for line in self._lines()))

    def admit(self, server: int) -> None:
        """Lets a server connect to the others, which clients cannot reach by its ports; `shut` ends that."""
        self.for_clients[server].is_shut = True
        for line in self.for_servers[server]:
            line.is_shut = False

    def shut(self) -> None:
        """Keeps the connections between servers as they are, and lets clients connect to all of them."""
        for line in self._lines():
            line.is_shut = line not in self.for_clients

    def ports(self) -> Ports:
        """Returns the ports, once it listens."""
        return Ports(
            tuple(line.target_port for line in self.for_clients),
            tuple(line.port for line in self.for_clients),
            tuple(tuple(line.port for line in lines) for lines in self.for_servers),
        )

    def traffic(self) -> Traffic:
        """Returns what was carried so far."""
        between = sum(line.there.num_bytes + line.back.num_bytes for lines in self.for_servers for line in lines)
        return Traffic(
            sum(line.there.num_bytes for line in self.for_clients),
            sum(line.back.num_bytes for line in self.for_clients),
            between,
        )
