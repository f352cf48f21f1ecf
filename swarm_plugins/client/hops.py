"""Which servers reach which others, and what they call what they send."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable

from swarm_plugins.errors import printable
from swarm_plugins.recent import Once, Recent

log = logging.getLogger(__name__)

_REST_S = 60.0
"""How long two servers are not asked to push after that was in vain; twice as long each time."""
_MAX_REST_S = 3600.0


class SlotNames:
    """What the inputs of requests without a session are called while servers hand them on."""

    def __init__(self) -> None:
        self.name = secrets.token_urlsafe(16)
        """The same for all, so that servers keep their streams to each other."""
        self.steps = itertools.count()


class Hops:
    """Which servers have failed to push to which others.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rests: Recent[tuple[str, str], tuple[float, float]] = Recent()
        self._unable: Once[str] = Once()

    def is_open(self, sender: str, receiver: str) -> bool:
        """Returns whether one server is worth asking to push to another."""
        until, _ = self._rests.get((sender, receiver), (0.0, 0.0))
        return self._clock() >= until

    def closed(self) -> set[tuple[str, str]]:
        """Returns all senders and receivers that are let be now."""
        now = self._clock()
        return {pair for pair, (until, _) in self._rests.items() if now < until}

    def failed(self, sender: str, receiver: str, why: str) -> None:
        """Lets two servers be for a while."""
        _, rest_s = self._rests.get((sender, receiver), (0.0, _REST_S / 2))
        rest_s = min(2 * rest_s, _MAX_REST_S)
        self._rests[sender, receiver] = self._clock() + rest_s, rest_s
        text = "server %s does not reach server %s (%s): outputs go by this client for %g s"
        log.info(text, sender, receiver, why, rest_s)

    def found_unable(self, peer: str, software: str, *, level: int) -> None:
        """Says once of a server that it cannot push at all."""
        if self._unable.is_first(peer):
            text = "server %s (version %s) neither takes nor sends outputs of other servers: they go by this client"
            log.log(level, text, peer, printable(software) or "unknown")
