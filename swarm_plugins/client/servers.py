"""Everything that is needed to run blocks of one model version."""

from __future__ import annotations

import itertools
import logging
import secrets
from typing import TYPE_CHECKING, Protocol

from swarm_plugins.client.calls.direct import Direct
from swarm_plugins.client.calls.hedging import Hedged
from swarm_plugins.client.calls.pushing import Pushed
from swarm_plugins.client.digests import DigestCache
from swarm_plugins.transport.admission.pushing import new_push_key
from swarm_plugins.transport.messages import PushSlot

if TYPE_CHECKING:
    from swarm_plugins.client.calls.call import Caller
    from swarm_plugins.client.discovery.server_view import ServerView
    from swarm_plugins.client.discovery.view import SwarmView
    from swarm_plugins.client.peers import Peers

log = logging.getLogger(__name__)

NONCE_BYTES = 16
_NO_GRAPH = "keeps no graph"
_SHOWN_LETTERS = 8
"""Of a peer id in a message: all begin alike."""


class Guard(Protocol):
    """Leaves servers out, and examines answers."""

    def is_excluded(self, peer: str) -> bool:
        """Returns whether a peer must not be asked at all."""

    def wrap(self, inner: Caller, view: ServerView) -> Caller:
        """Returns a caller that examines answers before they are used."""

    async def close(self) -> None:
        """Ends examinations under way. Idempotent."""


class Servers:
    """The servers of one model version, and how they are asked.

    Args:
        peers: Sends requests.
        view: Knows who serves what.
        guard: Examines answers. None: all are believed.
    """

    def __init__(self, peers: Peers, view: SwarmView, guard: Guard | None = None) -> None:
        self.peers = peers
        self.view = view
        self.guard = guard
        self.digests = DigestCache()
        caller: Caller = Hedged(Pushed(Direct(peers)), view)
        self.caller = caller if guard is None else guard.wrap(caller, view)
        self._slot_name = secrets.token_urlsafe(16)
        """The same for all calls, so that servers keep their streams to each other."""
        self._slot_steps = itertools.count()

    def nonce(self) -> bytes:
        """Returns random bytes if answers may be examined: all need a receipt, as servers must not know which ones."""
        return secrets.token_bytes(NONCE_BYTES) if self.guard is not None else b""

    def new_slot(self, num_bytes: int) -> PushSlot:
        """Returns where the input of a call without a session comes, if another server sends it."""
        return PushSlot(name=self._slot_name, step=next(self._slot_steps), key=new_push_key(), num_bytes=num_bytes)

    def note_unkept(self, peer: str, tokens: int) -> None:
        """Says once of a server that it did not keep the graph of a forward of so many tokens."""
        if self.peers.book.is_news(peer, _NO_GRAPH):
            log.warning(
                "server %s did not keep the graph of a forward of %d tokens: its backward takes up to half as long "
                "again. Train with smaller batches or shorter rows, or start the server with more --activation-bytes",
                peer[-_SHOWN_LETTERS:],
                tokens,
            )
