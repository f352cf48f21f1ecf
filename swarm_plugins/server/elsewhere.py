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
    """Prepares a server's experts elsewhere, on its event loop: `swarm_plugins.remote_experts.owner.RemoteShare`."""

    def __call__(
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
        on_answer: Callable[[str, int], None],
    ) -> ExpertsElsewhere: ...
