"""Asks the directory who serves a model version; one that hangs or has lost servers takes none away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from swarm_plugins.errors import TransportError

if TYPE_CHECKING:
    from swarm_plugins.transport.channel import Directory
    from swarm_plugins.transport.server_info import ServerInfo
    from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

_PATIENCE_S = 0.5
"""Wait for the directory once an earlier answer is known."""


class Lookup:
    """Knows which servers are announced.

    Args:
        directory: Who is asked.
        version: The model version.
        num_blocks: Blocks of the whole model.
        allowed: The only peers that count. None: all.
        remembered: Returns servers that have answered: they stay announced for a while though the directory forgets
            them.
        on_late: Called when a late answer has come.
    """

    def __init__(
        self,
        directory: Directory,
        version: ModelVersion,
        num_blocks: int,
        *,
        allowed: tuple[str, ...] | None,
        remembered: Callable[[], dict[str, ServerInfo]],
        on_late: Callable[[], None],
    ) -> None:
        self.directory = directory
        self.announced: dict[str, ServerInfo] = {}
        """The last answer."""
        self._version = version
        self._num_blocks = num_blocks
        self._allowed = allowed
        self._remembered = remembered
        self._on_late = on_late
        self._asking: asyncio.Task[dict[str, ServerInfo]] | None = None
        self._is_lost = False
        """Whether the last answer named none of those that were known."""

    async def ask(self) -> None:
        """Updates what is announced. Once something is, a late answer counts from the next call on.

        Raises:
            TransportError: If the directory cannot be asked and no earlier answer is known.
        """
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(), name="look up servers")
        asking = self._asking
        await asyncio.wait({asking}, timeout=_PATIENCE_S if self.announced else None)
        if asking.done():
            self._asking = None
            self.announced = asking.result()
        else:
            asking.add_done_callback(self._tell)

    def _tell(self, asking: asyncio.Task[dict[str, ServerInfo]]) -> None:
        if not asking.cancelled() and asking.exception() is None:
            self._on_late()

    async def _ask(self) -> dict[str, ServerInfo]:
        try:
            announced = await self.directory.servers(self._version.key, self._num_blocks)
        except TransportError as exc:
            if not self.announced:
                raise
            # One failed look-up must not end a training run: the servers themselves are asked anyway.
            log.warning("could not look up the servers of %s, using the last answer: %s", self._version, exc)
            return self.announced
        if not announced and self.announced:
            # More likely that this client has lost sight of the directory than that all servers have left.
            level = logging.DEBUG if self._is_lost else logging.WARNING
            self._is_lost = True
            log.log(level, "the directory no longer lists any server of %s; asking those known before", self._version)
            return self.announced
        self._is_lost = False
        allowed = self._allowed
        found = {peer: info for peer, info in announced.items() if allowed is None or peer in allowed}
        # After an outage the directory may know some of the servers only: others announce themselves again later.
        return {**self._remembered(), **found}
