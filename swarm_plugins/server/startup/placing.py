"""Where a server's span should be, from what the others announce; see `swarm_plugins.routing.placement`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import NamedTuple

import torch

from swarm_plugins.borders import pieces, tied_blocks
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.routing.placement import Mobility, Placed
from swarm_plugins.routing.turns import Snapshot
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.presence import Presence
from swarm_plugins.server.startup.capacity import blocks_that_fit, free_device_bytes
from swarm_plugins.transport.server_info import ServerInfo

log = logging.getLogger(__name__)

_SETTLE_S = 2.0
"""Until an announcement can be seen by others that join; longer than a measurement takes, or as long."""
_USABLE_SHARE = 0.8
"""Share of the free memory that a second span may take while the first is served."""


class Rates(NamedTuple):
    """How fast a server is."""

    throughput: float
    """Tokens per second through one block."""
    network_tokens_s: float
    """Hidden states per second over its network. 0: unknown."""


def snapshot_of(num_blocks: int, infos: Mapping[str, ServerInfo], tied: Collection[int]) -> Snapshot:
    """Returns the servers of whole blocks as placement sees them; those that are about to end do not count."""
    return Snapshot(num_blocks, [_placed(peer, info) for peer, info in infos.items() if _counts(info)], tied)


def _counts(info: ServerInfo) -> bool:
    return info.experts is None and (info.state != "draining" or info.target is not None)


def _placed(peer: str, info: ServerInfo) -> Placed:
    # Each token goes through all blocks of the span, and over the network once.
    rate = info.throughput / max(1, info.end - info.start)
    if info.network_tokens_s > 0:
        rate = min(rate, info.network_tokens_s)
    return Placed(
        peer=peer,
        start=info.start,
        end=info.end,
        rate=rate,
        mobility=info.mobility,
        is_online=info.state == "online",
        target=None if info.target is None else range(*info.target),
    )


def may_move(config: ServeConfig) -> bool:
    """Returns whether the settings leave the choice of blocks to the server."""
    is_named = config.blocks is not None or config.part is not None
    return not is_named and config.experts is None and not config.remote_experts


def mobility_of(config: ServeConfig, span_bytes: int) -> Mobility:
    """Returns how a server may move now: while it serves if memory holds as many bytes of blocks again."""
    if not may_move(config):
        return "pinned"
    needed = span_bytes + config.set_aside_bytes
    if config.offload is not None:
        if config.offload.fast_bytes is None:
            return "drops-first"  # its experts have what was free; others would get a part of the rest
        needed += config.offload.fast_bytes
    fits = needed <= _USABLE_SHARE * free_device_bytes(torch.device(config.device))
    return "loads-first" if fits else "drops-first"


async def choose_blocks(
    presence: Presence,
    checkpoint: Checkpoint,
    config: ServeConfig,
    describe: Callable[..., ServerInfo],
    measure: Callable[[range], Awaitable[Rates]],
) -> range:
    """Returns the span of a server that joins, announced already: others that join at the same time take another.

    Where it helps most depends on how fast it is, so one block, with those tied to it, is measured first, and the
    network to other servers.

    Args:
        presence: Its place in the swarm.
        checkpoint: The model.
        config: What to serve.
        describe: Changes fields of what it announces, and returns that.
        measure: Measures blocks, and the network to other servers.
    """
    length = config.num_blocks
    if length is None:
        length = blocks_that_fit(checkpoint, config)
        log.info("memory holds %d blocks", length)

    tied = tied_blocks(checkpoint.config)

    async def choose() -> range:
        info = describe()
        infos = await presence.servers(info.version, info.num_blocks)
        rate = _placed(presence.peer_id, info).rate
        blocks = snapshot_of(info.num_blocks, infos, tied).span_of_new(presence.peer_id, length, rate)
        describe(start=blocks.start, end=blocks.stop)
        await presence.announce(describe)
        return blocks

    describe(start=0, end=length)
    blocks = await choose()
    if config.initial_peers:
        # Blocks are claimed already: others that join see that while this server measures.
        _, rates = await asyncio.gather(asyncio.sleep(_SETTLE_S), measure(pieces(blocks, tied)[0]))
        describe(throughput=rates.throughput, network_tokens_s=rates.network_tokens_s)
        blocks = await choose()
    return blocks
