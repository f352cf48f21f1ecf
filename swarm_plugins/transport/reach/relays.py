"""Makes a node reachable through relays, without a port that others could call: circuit relay v2 of libp2p.

The daemon looks for relays by itself only minutes after its start, and only if it finds out that it cannot be called.
Here the node asks relays that it is given for a place, at once and again before it is lost; the daemon does the rest.
See https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from google.protobuf.message import DecodeError
from hivemind.p2p.p2p_daemon_bindings.utils import write_pbmsg

from swarm_plugins.errors import ProtocolError, TransportError
from swarm_plugins.transport.admission.gate import Open
from swarm_plugins.transport.daemon.process import Daemon
from swarm_plugins.transport.libp2p import HopMessage
from swarm_plugins.transport.reach.addresses import peer_id_in, place_in
from swarm_plugins.transport.reach.neighbors import connect_peer

log = logging.getLogger(__name__)

_HOP = "/libp2p/circuit/relay/0.2.0/hop"
_RESERVE = 0
"""Type of a message."""
_OK = 100
_ANSWER_S = 10.0
_RENEW_EVERY_S = 30.0
"""A place lasts for an hour, but not longer than the connection."""


async def take_places(daemon: Daemon, addresses: Sequence[str], open_stream: Open) -> None:
    """Takes a place at each relay.

    Args:
        daemon: The node's daemon.
        addresses: Addresses of the relays, with their peer ids.
        open_stream: Opens a stream of a protocol to a peer.

    Raises:
        TransportError: If no relay gives one.
    """
    errors = [error for error in await _reserve_all(daemon, addresses, open_stream) if error is not None]
    if addresses and len(errors) == len(addresses):
        raise errors[0]
    for error in errors:
        log.warning("%s", error)


async def keep_places(daemon: Daemon, addresses: Sequence[str], open_stream: Open) -> None:
    """Keeps the places that `take_places` has taken, until the daemon ends."""
    lost: set[str] = set()
    while addresses and daemon.is_alive:
        await asyncio.sleep(_RENEW_EVERY_S)
        for address, error in zip(addresses, await _reserve_all(daemon, addresses, open_stream), strict=True):
            if error is None:
                lost.discard(address)
            elif address not in lost:
                lost.add(address)
                log.warning("cannot be reached through a relay any more: %s", error)


async def _reserve_all(daemon: Daemon, addresses: Sequence[str], open_stream: Open) -> list[TransportError | None]:
    async def try_to_reserve(address: str) -> TransportError | None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await _reserve(daemon, address, open_stream)
        except TransportError as exc:
            return exc
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as exc:
            log.debug("relay %s: %r", address, exc)
            return _unreachable(address)
        return None

    return await asyncio.gather(*map(try_to_reserve, addresses))


async def _reserve(daemon: Daemon, address: str, open_stream: Open) -> None:
    relay = peer_id_in(address)
    try:
        await connect_peer(daemon.socket_path, relay, [place_in(address)])
    except TransportError as exc:
        raise _unreachable(address) from exc
    try:
        reader, writer = await open_stream(relay, _HOP)
    except TransportError as exc:
        raise TransportError(
            f"{address} is not a relay: the peer there passes no streams on; give the address of a server that "
            "others can reach"
        ) from exc
    with contextlib.closing(writer):
        await write_pbmsg(writer, HopMessage(type=_RESERVE))
        status = await _read_status(reader)
    if status != _OK:
        raise TransportError(
            f"relay {address} gives this node no place (status {status}): it has none left, or is itself behind a "
            "relay; give another"
        )


def _unreachable(address: str) -> TransportError:
    return TransportError(
        f"relay {address} cannot be reached: check that a server runs there, and its address, port and firewall"
    )


async def _read_status(reader: asyncio.StreamReader) -> int:
    """Returns the status of a relay's answer, 0 if there is none."""
    try:
        (first,) = await reader.readexactly(1)
        length = first & 0x7F
        if first >= 0x80:
            # Two bytes at most: no answer has a longer number.
            (second,) = await reader.readexactly(1)
            if second >= 0x80:
                raise ProtocolError("a relay's answer cannot be read: it is too long")
            length |= second << 7
        answer = HopMessage.FromString(await reader.readexactly(length))
    except (ValueError, DecodeError) as error:
        raise ProtocolError(f"a relay's answer cannot be read: {error}") from error
    status: int = answer.status
    return status
