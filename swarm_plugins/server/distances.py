"""How far a server is from those to which it hands outputs on, and from those that hand theirs on to it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable, Mapping

from swarm_plugins.errors import SwarmError
from swarm_plugins.server.startup.network_rate import Surroundings, fastest_echoes
from swarm_plugins.transport.records import MAX_ROUND_TRIPS
from swarm_plugins.transport.server_info import ServerInfo

log = logging.getLogger(__name__)

_ECHOES = 3
_ECHO_BYTES = 64


async def keep_measured(
    network: Surroundings, info: Callable[[], ServerInfo], describe: Callable[..., object], *, every_s: float
) -> None:
    """Measures round trips to neighbors from time to time, and announces them.

    Args:
        network: The server's place in the swarm.
        info: Returns what it announces.
        describe: Changes a field of that.
        every_s: Seconds between measurements, about.
    """
    while True:
        try:
            describe(round_trips=await round_trips(network, info()))
        except SwarmError as error:
            log.debug("no look at the neighbors this time: %s", error)
        await asyncio.sleep(every_s * random.uniform(0.75, 1.25))


async def round_trips(network: Surroundings, own: ServerInfo) -> tuple[tuple[str, float], ...]:
    """Returns the seconds of an empty request to some neighbors and its answer, without those that do not answer.

    Raises:
        SwarmError: If the directory cannot be asked.
    """
    infos = await network.servers(own.version, own.num_blocks)
    echoes = await fastest_echoes(network, neighbors(network.peer_id, own, infos), (_ECHO_BYTES,), _ECHOES)
    return tuple((peer, round(seconds, 4)) for peer, (seconds,) in echoes.items())


def neighbors(me: str, own: ServerInfo, infos: Mapping[str, ServerInfo]) -> list[str]:
    """Returns the servers that can come after this one in a chain, or before it, `MAX_ROUND_TRIPS` at most.

    Of more, those are taken that are likely to take this one, too: a distance counts if both ends announce it.
    """

    def order(peer: str) -> bytes:
        return hashlib.blake2b("\n".join(sorted((me, peer))).encode(), digest_size=8).digest()

    near = [
        peer
        for peer, info in infos.items()
        if peer != me and info.pushes and info.state == "online" and (_may_follow(own, info) or _may_follow(info, own))
    ]
    return sorted(near, key=order)[:MAX_ROUND_TRIPS]


def _may_follow(one: ServerInfo, two: ServerInfo) -> bool:
    return two.start <= one.end < two.end
