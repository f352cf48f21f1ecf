"""A server whose blocks fetch experts from other peers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn

from swarm_plugins.book.rules import Rules
from swarm_plugins.client import SwarmConfig
from swarm_plugins.client.peers import Peers
from swarm_plugins.offload.held import HeldExperts
from swarm_plugins.remote_experts.calls import Holders
from swarm_plugins.remote_experts.experts import RemoteExperts
from swarm_plugins.remote_experts.holders import HolderView
from swarm_plugins.remote_experts.module import turn_into_remote
from swarm_plugins.transport.channel import Network
from swarm_plugins.transport.records import MAX_NEEDS
from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

_CONFIG = SwarmConfig(max_retries=3, request_timeout_s=30.0, connect_timeout_s=10.0, info_timeout_s=2.0)
"""Shorter waits than a client's: clients wait for this server meanwhile."""
_SLACK_S = 1.0


class RemoteShare:
    """The experts that a server's blocks fetch from other peers; made on the server's event loop.

    Args:
        network: Opens streams to peers, and looks them up.
        version: Of the model.
        num_blocks: Blocks of the whole model.
        blocks: Blocks of this server.
        addresses: Addresses to join the swarm by, or this server's own. If any is of another machine, holders'
            answers are checked.
        model: The model's directory or id.
        device: Where the blocks compute.
        own: Experts that this server has itself. None: none.
        on_answer: Called with the holder and the number of rows of each good answer.
    """

    def __init__(
        self,
        network: Network,
        *,
        version: ModelVersion,
        num_blocks: int,
        blocks: range,
        addresses: tuple[str, ...],
        model: str,
        device: torch.device,
        own: HeldExperts | None,
        on_answer: Callable[[str, int], None] = lambda peer, rows: None,
    ) -> None:
        self.num_experts: dict[int, int] = {}
        """Experts of each block that has any; known when the span has been loaded."""
        self._device = device
        self._here = range(0) if own is None else own.experts
        rules = Rules(longest_s=_CONFIG.request_timeout_s, slack_s=_SLACK_S)
        view = HolderView(
            network,
            Peers(network, _CONFIG, rules=rules),
            _CONFIG,
            version=version,
            num_blocks=num_blocks,
            model=model,
            initial_peers=addresses,
            blocks=blocks,
            num_experts=self.num_experts,
            here=self._here,
            # Clients wait and ask again themselves.
            may_pause=False,
        )
        loop = asyncio.get_running_loop()
        self.experts = RemoteExperts(
            Holders(view, on_answer),
            lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop),
            own,
        )

    def attach(self, block: int, module: nn.Module, outline: nn.Module) -> None:
        """Makes the experts of a block run at holders."""
        self.num_experts[block] = int(outline.num_experts)  # type: ignore[arg-type]
        turn_into_remote(module, outline, self._device, block, self.experts)

    def rehearsing(self) -> AbstractContextManager[None]:
        """Computes zeros for experts elsewhere inside the context."""
        return self.experts.rehearsing()

    @property
    def needs(self) -> tuple[tuple[int, int, int, int], ...]:
        """The experts that are fetched; see `ServerInfo`."""
        return needed_runs(self.num_experts, self._here)

    async def close(self) -> None:
        """Ends what waits for holders, and closes the streams to them. Idempotent."""
        self.experts.close()
        await self.experts.holders.close()


def needed_runs(num_experts: Mapping[int, int], here: range) -> tuple[tuple[int, int, int, int], ...]:
    """Returns ``(start, end, first, end expert)`` of runs of blocks that need the same experts."""
    found: list[tuple[int, int, int, int]] = []
    for piece in (0, 1):
        for block, count in sorted(num_experts.items()):
            first, last = ((0, min(here.start, count)), (here.stop, count))[piece]
            if first >= last:
                continue
            if found and found[-1][1:] == (block, first, last):
                found[-1] = (found[-1][0], block + 1, first, last)
            else:
                found.append((block, block + 1, first, last))
    if len(found) > MAX_NEEDS:
        log.warning("only %d of %d runs of blocks are announced as needing experts", MAX_NEEDS, len(found))
    return tuple(found[:MAX_NEEDS])
