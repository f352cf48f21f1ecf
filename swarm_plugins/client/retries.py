"""How often one call may fail, and what happens between two tries."""

from __future__ import annotations

import asyncio
import logging

from swarm_plugins.client.directory import SwarmView
from swarm_plugins.client.failures import RefusedError, is_worth_another_server
from swarm_plugins.errors import CapacityError, MissingBlocksError, SwarmError
from swarm_plugins.routing import Demand, SpanChoice

__all__ = ["Retries"]

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 2.0


class Retries:
    """Counts the failures of one call, bans who failed, and plans anew.

    Args:
        view: Plans chains; failed peers are banned in it.
        limit: Failures after which the last error is raised.
    """

    def __init__(self, view: SwarmView, limit: int) -> None:
        self.view = view
        self.limit = limit
        self.failures = 0
        self.last: SwarmError | None = None
        self.full: set[str] = set()
        """Servers without room for this call; the next call may be smaller, so they are not banned."""
        self.refusals: dict[str, RefusedError] = {}
        """Servers that found fault with the request itself, until a second one has been asked."""

    def note(self, peer: str, error: SwarmError) -> None:
        """Leaves the peer out from now on, or raises the error if no other would help or there were too many.

        Of a server that refuses the request itself one other server's opinion is heard, then it is believed.
        """
        self.failures += 1
        self.last = error
        is_refusal = isinstance(error, RefusedError)
        is_agreed = is_refusal and any(other != peer for other in self.refusals)
        if is_agreed or not (is_refusal or is_worth_another_server(error)) or self.failures > self.limit:
            raise error
        log.warning("server %s failed (failure %d, %d allowed): %s", peer, self.failures, self.limit, error)
        if isinstance(error, RefusedError):
            self.refusals[peer] = error
        elif isinstance(error, CapacityError):
            self.full.add(peer)
        else:
            self.view.ban(peer, error)

    def succeeded(self) -> None:
        """Counts it against those who had refused the request that others have now carried out."""
        for peer, error in self.refusals.items():
            self.view.ban(peer, error)
        self.refusals = {}

    async def chain(self, blocks: range, demand: Demand) -> list[SpanChoice]:
        """Plans a chain; after a failure it waits a little for servers to come back.

        Raises:
            MissingBlocksError: If no living server holds some block, also after the retries.
            CapacityError: If the only servers that hold it have no room.
            RefusedError: If the only servers that hold it refuse the request.
        """
        while True:
            try:
                return await self.view.chain(blocks, demand, without={*self.full, *self.refusals}, failure=self.last)
            except MissingBlocksError as exc:
                if isinstance(self.last, CapacityError | RefusedError):
                    # Nobody else has the blocks: that they are full, or refuse, is the true reason.
                    raise self.last from None
                if self.last is None or self.failures >= self.limit:
                    # It says what failed last, and ends with what to do, which no traceback before it should hide.
                    raise exc from None
                self.failures += 1
                await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (self.failures - 1), _LONGEST_PAUSE_S))
