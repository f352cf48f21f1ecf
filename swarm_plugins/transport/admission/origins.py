"""From which address each peer is connected, as the libp2p daemon reports it.

A peer of a relay has the relay's address. Whoever has many identities at one address is counted as one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2

from swarm_plugins.transport.admission.addresses import UNKNOWN, Origin, origin_of

log = logging.getLogger(__name__)

_ASK_EVERY_S = 0.1
_KEEP_S = 60.0
_ANSWER_S = 2.0

Connections = Iterable[tuple[str, bytes]]
"""Peer ids and the binary multiaddrs at the other ends of their connections."""


class Origins:
    """The origins of connected peers, asked of the daemon when an unknown one calls.

    Args:
        list_connections: Asks the daemon.
    """

    def __init__(self, list_connections: Callable[[], Awaitable[Connections]]) -> None:
        self._list = list_connections
        self._known: dict[str, Origin] = {}
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def of(self, peer: str) -> Origin:
        """Returns the origin of a peer that is connected; `UNKNOWN` if the daemon does not name it."""
        for _ in range(2):  # the daemon may have been asked just before this peer came
            if peer in self._known and time.monotonic() - self._asked_at < _KEEP_S:
                break
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask(), name="list connections")
            await asyncio.shield(self._asking)
        return self._known.get(peer, UNKNOWN)

    async def _ask(self) -> None:
        """Asks the daemon once for all who wait."""
        try:
            await asyncio.sleep(max(0.0, self._asked_at + _ASK_EVERY_S - time.monotonic()))
            async with asyncio.timeout(_ANSWER_S):
                self._known = {one: origin_of(address) for one, address in await self._list()}
        except (TimeoutError, OSError, P2PDaemonError, asyncio.IncompleteReadError) as exc:
            log.debug("cannot list connections: %r", exc)
        finally:
            self._asked_at = time.monotonic()
            self._asking = None


async def list_connections(p2p: P2P) -> list[tuple[str, bytes]]:
    """Asks the daemon for its connections; hivemind's own call decodes each address, at 0.1 ms."""
    reader, writer = await p2p._client.control.daemon_connector.open_connection()
    try:
        await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        response = p2pd_pb2.Response()
        await read_pbmsg_safe(reader, response)
    finally:
        writer.close()
    raise_if_failed(response)
    return [(PeerID(peer.id).to_base58(), address) for peer in response.peers for address in peer.addrs]
