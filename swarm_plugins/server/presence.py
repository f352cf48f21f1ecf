"""A server's place in the swarm: its node, its announcements, and a new node when the libp2p daemon dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swarm_plugins.errors import SwarmError, TransportError
from swarm_plugins.transport.lasting import LastingNode
from swarm_plugins.transport.node import SwarmNode
from swarm_plugins.transport.server_info import ServerInfo

log = logging.getLogger(__name__)

_MAX_FAILURES = 5
"""Failed starts of a new daemon; one that lives for ``_STABLE_S`` resets the count."""
_STABLE_S = 300.0
_SAME_PORTS = 2
"""Attempts with the ports that the system chose before; then it may choose others."""
_TTL_PERIODS = 3
"""An announcement outlives the next two."""
_RETRACT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 10.0


class Presence(LastingNode):
    """Keeps a server reachable and announced.

    Args:
        node: The first node, not started.
        every_s: Time between announcements.
    """

    def __init__(self, node: SwarmNode, *, every_s: float) -> None:
        super().__init__(node)
        self._every_s = every_s
        self._info: Callable[[], ServerInfo] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_lost = asyncio.Event()

    async def node(self) -> SwarmNode:
        """Returns the node in use; its keeper replaces it as soon as it has died."""
        return self._node

    async def addresses(self) -> tuple[str, ...]:
        """Returns the addresses by which others reach this peer."""
        return await self._node.addresses()

    async def wait_lost(self) -> None:
        """Returns when the network is lost and could not be joined again."""
        await self._is_lost.wait()

    async def announce(self, info: Callable[[], ServerInfo]) -> None:
        """Announces the result of ``info``, now and regularly until ``close``."""
        self._info = info
        await self._node.announce(info(), _TTL_PERIODS * self._every_s)
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name="keep the server announced")

    async def retract(self) -> None:
        """Leaves the DHT; requests are still answered."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            # It may be joining again; leaving must not depend on how that ends.
            await asyncio.wait([keeper], timeout=_CLOSE_TIMEOUT_S)
        if self._node.is_alive:
            try:
                async with asyncio.timeout(_RETRACT_TIMEOUT_S):
                    await self._node.retract()
            except (SwarmError, TimeoutError) as error:
                log.warning("cannot retract the announcement, it expires by itself: %s", error)

    async def close(self) -> None:
        """Leaves the swarm. Idempotent."""
        await self.retract()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await super().close()
        except TimeoutError:
            log.warning("the node did not close within %.0f s; it ends with the process", _CLOSE_TIMEOUT_S)

    async def _keep(self) -> None:
        failures = 0
        while True:
            started = asyncio.get_running_loop().time()
            await self._announce_while_alive()
            if asyncio.get_running_loop().time() - started > _STABLE_S:
                failures = 0
            while not self._node.is_alive:
                try:
                    await self.renew(same_ports=failures < _SAME_PORTS)
                except SwarmError as error:
                    failures += 1
                    log.warning("cannot join the swarm again: %s", error)
                    if failures > _MAX_FAILURES:
                        log.error("gave up after %d attempts to join the swarm again", failures)
                        self._is_lost.set()
                        return
                    await asyncio.sleep(min(30.0, 2.0**failures))
            await self._announce_again()

    async def _announce_while_alive(self) -> None:
        dead = asyncio.create_task(self._node.wait_dead(), name="watch the libp2p daemon")
        try:
            while True:
                await asyncio.wait([dead], timeout=self._every_s)
                if dead.done():
                    return
                await self._announce_again()
        finally:
            dead.cancel()
            await asyncio.gather(dead, return_exceptions=True)

    async def _announce_again(self) -> None:
        if self._info is None:
            return
        try:
            await self.announce(self._info)
        except TransportError as error:
            log.warning("cannot announce, trying again in %.0f s: %s", self._every_s, error)
        except Exception:
            # Go on: the server's record expires unless this task renews it.
            log.exception("cannot announce, trying again in %.0f s", self._every_s)
