"""What may be wrong with the way between two peers at the moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from recipes.benchmarks.links.link import Link
from recipes.benchmarks.links.pacing import Pacer

_POLL_S = 0.02


class Line:
    """The way between a client, or another server, and one peer; everything about it may change at any time.

    Args:
        link: Its delay and rate.
    """

    def __init__(self, link: Link | None = None) -> None:
        self.loses_requests = False
        """Messages to the peer vanish."""
        self.loses_answers = False
        """Messages from the peer vanish."""
        self.is_frozen = False
        """Answers arrive only after this has ended, as from a stopped process."""
        self.link = link or Link()

    @property
    def link(self) -> Link:
        """Its delay and rate."""
        return self._link

    @link.setter
    def link(self, link: Link) -> None:
        self._link = link
        self.there, self.back = (Pacer(way, seed=seed) for seed, way in enumerate(link.ways()))

    @property
    def is_sound(self) -> bool:
        """Whether a new stream can be opened."""
        return not (self.loses_requests or self.loses_answers or self.is_frozen)

    async def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Waits for the end of a fault."""
        while not is_over():
            await asyncio.sleep(_POLL_S)
