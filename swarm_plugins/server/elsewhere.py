"""What a server asks of others: experts of its blocks that other peers hold. Its owner says how they are asked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from swarm_plugins.offload.held import HeldExperts
from swarm_plugins.transport.channel import Network
from swarm_plugins.versions import ModelVersion


class ExpertsElsewhere(Protocol):
    """Experts of a server's blocks at other peers."""

    @property
    def needs(self) -> tuple[tuple[int, int, int, int], ...]:
        """The experts that are fetched; see `ServerInfo`."""
        ...

    def attach(self, block: int, module: nn.Module, outline: nn.Module) -> None:
        """Makes the experts of a block run at their holders."""

    def rehearsing(self) -> AbstractContextManager[None]:
        """Computes zeros for these experts inside the context: to try blocks before there are holders."""
        ...

    async def close(self) -> None:
        """Ends what waits for holders. Idempotent."""


class FetchExperts(Protocol):
    """`swarm_plugins.remote_experts.owner.RemoteShare` fits."""

    def __call__(
        self,
        network: Network,
        version: ModelVersion,
        num_blocks: int,
        blocks: range,
        addresses: tuple[str, ...],
        model: str,
        device: torch.device,
        own: HeldExperts | None,
        on_answer: Callable[[str, int], None],
    ) -> ExpertsElsewhere:
        """Prepares a server's experts elsewhere; called on its event loop.

        Args:
            network: Opens streams to peers, and looks them up.
            version: Of the model.
            num_blocks: Blocks of the whole model.
            blocks: Blocks of this server.
            addresses: Addresses to join the swarm by, or this server's own.
            model: The model's directory or id.
            device: Where the blocks compute.
            own: Experts that this server has itself. None: none.
            on_answer: Called with the holder and the number of rows of each good answer.
        """
        ...
