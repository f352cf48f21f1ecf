"""Which calls are checked: the first ones of a server all, then fewer and fewer, after a doubt all again."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable
from typing import Literal

from swarm_plugins.recent import Recent

FIRST_CALLS = 4
"""Calls of a new server whose answers wait for their check."""
FLOOR = 0.02
"""Share of the calls of a server that are checked however long it has been honest."""

When = Literal["before", "after", "never"]
"""Whether a call is checked before its answer is used, afterwards, or not at all."""


class CheckRates:
    """Decides by chance which calls are checked.

    Args:
        floor: Smallest share of calls that are checked.
        chance: Returns a number in [0, 1) that servers cannot foresee.
    """

    def __init__(self, *, floor: float = FLOOR, chance: Callable[[], float] | None = None) -> None:
        self.floor = floor
        self.chance = chance or secrets.SystemRandom().random
        self._passed: Recent[Hashable, int] = Recent()

    def rate(self, server: Hashable) -> float:
        """Returns the share of a server's calls that are checked now."""
        further = self._passed.get(server, 0) - FIRST_CALLS
        return 1.0 if further < 0 else max(self.floor, 0.5 ** (further + 1))

    def when(self, server: Hashable) -> When:
        """Returns whether to check the next call of a server."""
        if self._passed.get(server, 0) < FIRST_CALLS:
            return "before"
        return "after" if self.chance() < self.rate(server) else "never"

    def passed(self, server: Hashable) -> None:
        """Records that a check found nothing wrong."""
        self._passed[server] = self._passed.get(server, 0) + 1

    def doubt(self, server: Hashable) -> None:
        """Makes a server new again: all its calls are checked."""
        self._passed.pop(server, None)
