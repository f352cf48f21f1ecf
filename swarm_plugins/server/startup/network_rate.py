"""How many tokens a server's network carries: measured by echoes of a few other servers, in bounded time and bytes."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from swarm_plugins.errors import SwarmError
from swarm_plugins.transport.channel import Channel, Directory, Opener
from swarm_plugins.transport.server_info import MAX_ECHO_BYTES, EchoRequest, EchoResponse

log = logging.getLogger(__name__)

_MAX_PEERS = 3
_ROUNDS = 2
_PEER_TIMEOUT_S = 2.0
"""Longest measurement with one peer. In all: 6 s and 3 MB at most."""
_SMALL_BYTES = 64


class Surroundings(Opener, Directory, Protocol):
    """What the measurement needs of `Presence`."""

    @property
    def peer_id(self) -> str:
        """Id of this server."""


async def network_rate(network: Surroundings, version: str, num_blocks: int, token_bytes: int) -> float:
    """Returns how many hidden states a second this network carries, in and out; 0 if no other server answers.

    The best of a few peers counts: the others' own networks may be slower.

    Args:
        network: The server's place in the swarm.
        version: Model version.
        num_blocks: Blocks of the whole model.
        token_bytes: Bytes of one token's hidden states.
    """
    try:
        infos = await network.servers(version, num_blocks)
    except SwarmError as error:
        log.debug("no measurement of the network: %s", error)
        return 0.0
    peers = [peer for peer, info in infos.items() if peer != network.peer_id and info.state == "online"]
    some = random.sample(peers, min(_MAX_PEERS, len(peers)))
    echoes = await fastest_echoes(network, some, (_SMALL_BYTES, MAX_ECHO_BYTES), _ROUNDS)
    # Without the round trip itself. A peer that answers small echoes late must not make the network look much faster.
    best_s = min((large_s - min(small_s, large_s / 2) for small_s, large_s in echoes.values()), default=math.inf)
    return round(MAX_ECHO_BYTES / best_s / token_bytes, 1)


async def fastest_echoes(
    network: Surroundings, peers: Iterable[str], sizes: Sequence[int], rounds: int
) -> dict[str, list[float]]:
    """Returns the seconds of the fastest echo of each size in bytes, by peer; without peers that do not answer."""
    found: dict[str, list[float]] = {}
    for peer in peers:
        try:
            async with asyncio.timeout(_PEER_TIMEOUT_S):
                channel = await network.open(peer, "rpc_info", timeout_s=_PEER_TIMEOUT_S)
                try:
                    found[peer] = [min([await _echo_s(channel, size) for _ in range(rounds)]) for size in sizes]
                finally:
                    await channel.close()
        except (SwarmError, TimeoutError) as error:
            log.debug("no echo of %s: %s", peer, error)
    return found


async def _echo_s(channel: Channel, num_bytes: int) -> float:
    """Returns the seconds of an echo over a stream of ``rpc_info``; raises SwarmError if something else comes back."""
    payload = torch.zeros(num_bytes, dtype=torch.uint8).random_(0, 256)
    started = time.perf_counter()
    await channel.send(EchoRequest(payload=payload))
    answer = await channel.receive(timeout_s=_PEER_TIMEOUT_S)
    if not isinstance(answer, EchoResponse) or not torch.equal(answer.payload, payload):
        raise SwarmError(f"server {channel.remote_peer} does not echo")
    return time.perf_counter() - started
