"""Makes a node reachable through relays, without a port that others could call: circuit relay v2 of libp2p.

The daemon looks for relays by itself only minutes after its start, and only if it finds out that it cannot be called.
Here the node asks relays that it is given for a place, at once and again before it is lost; the daemon does the rest.
See https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence

from swarm_plugins.errors import ProtocolError, TransportError
from swarm_plugins.transport.admission.gate import Open
from swarm_plugins.transport.daemon.process import Daemon
from swarm_plugins.transport.reach.addresses import peer_id_in, place_in
from swarm_plugins.transport.reach.neighbors import connect_peer

log = logging.getLogger(__name__)

_HOP = "/libp2p/circuit/relay/0.2.0/hop"
_RESERVE = b"\x02\x08\x00"
"""HopMessage(type=RESERVE), with its length."""
_STATUS_FIELD = 5
_OK = 100
_MAX_ANSWER_BYTES = 8192
_ANSWER_S = 10.0
_RENEW_EVERY_S = 30.0
"""A place lasts for an hour, but not longer than the connection."""


class Relays:
    """A node's places at relays.

    Args:
        daemon: The node's daemon.
        addresses: Addresses of the relays, with their peer ids.
        open_stream: Opens a stream of a protocol to a peer.
    """

    def __init__(self, daemon: Daemon, addresses: Sequence[str], open_stream: Open) -> None:
        self._daemon = daemon
        self._open = open_stream
        self._addresses = tuple(addresses)
        self._lost: set[str] = set()
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Takes a place at each relay, and keeps it from then on.

        Raises:
            TransportError: If no relay gives one.
        """
        errors = [error for error in await self._reserve_all() if error is not None]
        if self._addresses and len(errors) == len(self._addresses):
            raise errors[0]
        for error in errors:
            log.warning("%s", error)
        if self._addresses:
            self._keeper = asyncio.create_task(self._keep(), name="keep places at relays")

    async def close(self) -> None:
        """Keeps the places no longer. Idempotent."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _keep(self) -> None:
        while self._daemon.is_alive:
            await asyncio.sleep(_RENEW_EVERY_S)
            for address, error in zip(self._addresses, await self._reserve_all(), strict=True):
                if error is None:
                    self._lost.discard(address)
                elif address not in self._lost:
                    self._lost.add(address)
                    log.warning("cannot be reached through a relay any more: %s", error)

    async def _reserve_all(self) -> list[TransportError | None]:
        return list(await asyncio.gather(*(self._try_to_reserve(address) for address in self._addresses)))

    async def _try_to_reserve(self, address: str) -> TransportError | None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._reserve(address)
        except TransportError as exc:
            return exc
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as exc:
            log.debug("relay %s: %r", address, exc)
            return _unreachable(address)
        return None

    async def _reserve(self, address: str) -> None:
        relay = peer_id_in(address)
        try:
            await connect_peer(self._daemon.socket_path, relay, [place_in(address)])
        except TransportError as exc:
            raise _unreachable(address) from exc
        try:
            reader, writer = await self._open(relay, _HOP)
        except TransportError as exc:
            raise TransportError(
                f"{address} is not a relay: the peer there passes no streams on; give the address of a server that "
                "others can reach"
            ) from exc
        with contextlib.closing(writer):
            writer.write(_RESERVE)
            status = _status_in(await _read_message(reader))
        if status != _OK:
            raise TransportError(
                f"relay {address} gives this node no place (status {status}): it has none left, or is itself behind a "
                "relay; give another"
            )


def _unreachable(address: str) -> TransportError:
    return TransportError(
        f"relay {address} cannot be reached: check that a server runs there, and its address, port and firewall"
    )


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    length = shift = 0
    while True:
        (byte,) = await reader.readexactly(1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if length > _MAX_ANSWER_BYTES or shift > 21:
            raise ProtocolError(f"relay's answer of more than {_MAX_ANSWER_BYTES} bytes")
        if byte < 0x80:
            return await reader.readexactly(length)


def _status_in(message: bytes) -> int:
    """Returns the status in a HopMessage, 0 if there is none."""
    return next((value for field, value in _numbers(message) if field == _STATUS_FIELD), 0)


def _numbers(message: bytes) -> Iterator[tuple[int, int]]:
    """Yields the fields of a protobuf message that are numbers."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while at < len(message):
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
        raise ProtocolError("relay's answer ends in a number")

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        elif tag & 7 == 2:
            length = varint()
            at += length
        else:
            raise ProtocolError(f"relay's answer with a field of wire type {tag & 7}")
