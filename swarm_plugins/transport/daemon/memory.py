"""Bounds the memory of a libp2p daemon, which has no bound of its own on what strangers send.

Calls of the DHT that are sent by half stay in the daemon, up to 1 MiB each, any number of them; this process never sees
them, nor who sends them. So when the daemon grows, peers for which nothing is done here are disconnected, which frees
what they hold, and then all others: they connect again, and repeat what was under way.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path

from hivemind.p2p import P2PDaemonError, PeerID

from swarm_plugins.transport.admission.origins import list_connections
from swarm_plugins.transport.daemon.process import Daemon

log = logging.getLogger(__name__)

MOST_BYTES = 512 << 20
"""Memory of the daemon above which peers are disconnected; it needs 60 to 200 MiB. See `daemon.MEMORY_GOAL`."""

_LOOK_EVERY_S = 0.5
_SETTLE_S = 2.0
"""Time for memory to be freed after peers were disconnected."""
_ANSWER_S = 2.0
_AT_ONCE = 64


async def watch_memory(daemon: Daemon, in_use: Callable[[], Collection[str]]) -> None:
    """Disconnects peers when a daemon grows too large, until it ends; only where the system tells memory.

    Args:
        daemon: The daemon.
        in_use: Returns the ids of peers that this node does something for, or asks for something.
    """
    was_large = False
    if resident_bytes(daemon.pid) is None:
        return
    while daemon.is_alive:
        # One look may fail, as when this process is out of descriptors.
        used = resident_bytes(daemon.pid) or 0
        is_large = used > MOST_BYTES
        if is_large:
            try:
                await _disconnect(daemon, used, spared=() if was_large else in_use())
            except (P2PDaemonError, OSError, asyncio.IncompleteReadError) as exc:
                log.debug("cannot disconnect peers: %r", exc)
        was_large = is_large
        await asyncio.sleep(_SETTLE_S if was_large else _LOOK_EVERY_S)


async def _disconnect(daemon: Daemon, used: int, spared: Collection[str]) -> None:
    async with asyncio.timeout(_ANSWER_S):
        connected = {peer for peer, _ in await list_connections(daemon.p2p)}
    peers = sorted(connected.difference(spared))
    log.warning(
        "the libp2p daemon holds %d MiB of what peers have sent: %d of %d peers are disconnected",
        used >> 20,
        len(peers),
        len(connected),
    )

    async def let_go(peer: str) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await daemon.p2p._client.control.disconnect(PeerID.from_base58(peer))
        except (P2PDaemonError, OSError, asyncio.IncompleteReadError) as exc:  # a TimeoutError is an OSError
            log.debug("cannot disconnect %s: %r", peer, exc)

    for first in range(0, len(peers), _AT_ONCE):
        await asyncio.gather(*map(let_go, peers[first : first + _AT_ONCE]))


def resident_bytes(pid: int) -> int | None:
    """Returns the memory that a process occupies; None if the system does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
