"""Keeps a node connected to the DHT: asks again those it has known, when hivemind has forgotten them.

hivemind 1.1.12 drops a node from its routing table after one call that fails. A node whose peers were all away for a
few seconds has an empty table from then on: it finds nothing, and announces itself to nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from swarm_plugins.transport.admission.origins import list_connections
from swarm_plugins.transport.channel import dial_error
from swarm_plugins.transport.reach.addresses import peer_id_in, place_in

log = logging.getLogger(__name__)

_MAX_REMEMBERED = 64
_REMEMBERED_S = 3600.0
"""A peer that has been away for longer has left."""
_ANSWER_S = 3.0
"""A peer that is alive connects and answers a ping within this time."""
_PAUSE_S = 1.0
"""Between two rounds of calls."""


class Neighbors:
    """The nodes that a DHT node has known.

    Args:
        p2p: The node's connection to its daemon.
        socket_path: The daemon's socket.
        dht: The node.
        addresses: Addresses that the node was started with; they are never forgotten.
    """

    def __init__(self, p2p: P2P, socket_path: str, dht: DHTNode, addresses: Sequence[str]) -> None:
        self._p2p = p2p
        self._socket_path = socket_path
        self._dht = dht
        self._initial = {PeerID.from_base58(peer_id_in(address)): place_in(address) for address in addresses}
        self._addresses: dict[PeerID, str] = {}
        self._seen_at: OrderedDict[PeerID, float] = OrderedDict()
        self._lock = asyncio.Lock()
        self._tried_at = float("-inf")

    @property
    def is_alone(self) -> bool:
        """Whether the node knows no other, though it has known some."""
        return not self._dht.protocol.routing_table.peer_id_to_uid and bool(self._initial or self._seen_at)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the nodes that were known lately, as far as they are known."""
        return tuple(self._addresses.values())

    def remember(self) -> None:
        """Notes the nodes that are known now, and forgets those that left long ago."""
        now = time.monotonic()
        for peer in self._table():
            self._seen_at[peer] = now
            self._seen_at.move_to_end(peer)
        while self._seen_at:
            peer, seen_at = next(iter(self._seen_at.items()))
            if len(self._seen_at) <= _MAX_REMEMBERED and now - seen_at < _REMEMBERED_S:
                return
            del self._seen_at[peer]
            self._addresses.pop(peer, None)

    async def note_addresses(self) -> None:
        """Notes where the known nodes are, which a daemon that is started again has to be told."""
        self.remember()
        if self._seen_at.keys() <= self._addresses.keys():
            return
        try:
            connected = await list_connections(self._p2p)
        except (P2PDaemonError, OSError, asyncio.IncompleteReadError) as exc:
            log.debug("cannot list the connected peers: %s", exc)
            return
        seen = {peer.to_base58(): peer for peer in self._seen_at}
        for peer, place in reversed(connected):  # so that a peer's first address wins
            if peer not in seen:
                continue
            try:
                address = f"{Multiaddr(place)}/p2p/{peer}"
                peer_id_in(address)
            except ValueError as exc:
                # Any peer can be at an address that hivemind or a later `NodeConfig` cannot read, such as WebTransport.
                log.debug("the address of peer %s is not noted: %s", peer, exc)
            else:
                self._addresses[seen[peer]] = address

    async def call_lost(self) -> bool:
        """Calls the nodes that are not known any more; returns whether one has answered."""
        async with self._lock:
            self.remember()
            table = self._table()
            lost = [peer for peer in {**self._initial, **self._seen_at} if peer not in table]
            if not lost or time.monotonic() - self._tried_at < _PAUSE_S:
                return False
            answered = await asyncio.gather(*(self._call(peer) for peer in lost))
            self._tried_at = time.monotonic()
        if any(answered):
            log.info("found %d of %d lost peers again", sum(answered), len(lost))
        return any(answered)

    async def _call(self, peer: PeerID) -> bool:
        place = self._initial.get(peer)  # of others the daemon knows the address for a while
        try:
            async with asyncio.timeout(_ANSWER_S):
                await connect_peer(self._socket_path, peer.to_base58(), [] if place is None else [place])
                protocol = self._dht.protocol
                node_id = await protocol.call_ping(peer, strict=False)
                if node_id is None:
                    return False
                # hivemind adds it in a task of its own, by which time the caller may have found the table empty.
                await protocol.update_routing_table(node_id, peer)
        except (P2PDaemonError, OSError, asyncio.IncompleteReadError) as exc:
            log.debug("peer %s is still lost: %s", peer, exc)
            return False
        # hivemind asks nothing of a node that has failed, for up to a minute.
        self._dht.blacklist.register_success(peer)
        return True

    def _table(self) -> set[PeerID]:
        return set(self._dht.protocol.routing_table.peer_id_to_uid)


async def connect_peer(socket_path: str, peer: str, places: Sequence[str]) -> None:
    """Connects to a peer at some addresses (without its id), besides those that the daemon knows.

    hivemind's own call leaves its socket open when it is cancelled or the daemon dies.

    Raises:
        TransportError: If the peer cannot be reached.
        OSError: If the daemon does not answer.
    """
    request = p2pd_pb2.ConnectRequest(
        peer=PeerID.from_base58(peer).to_bytes(), addrs=[Multiaddr(place).to_bytes() for place in places]
    )
    reader, writer = await asyncio.open_unix_connection(socket_path)
    try:
        await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request))
        response = p2pd_pb2.Response()
        await read_pbmsg_safe(reader, response)
    finally:
        writer.transport.abort()
    if response.type == p2pd_pb2.Response.ERROR:
        raise dial_error(peer, response.error.msg)
