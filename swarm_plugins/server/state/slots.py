"""Inputs of requests without a session that other servers push: forwards and backwards of training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from swarm_plugins.server.state.inbox import Inbox, Receivers
from swarm_plugins.transport.messages import PushedHidden, PushSlot


@dataclass(eq=False)
class Slot:
    """A request that waits for its input."""

    peer: str
    """Who has asked."""
    push_key: bytes
    inbox: Inbox = field(default_factory=Inbox)
    """Has this one step."""


class Slots:
    """The requests that wait for their inputs: at most one for each open stream."""

    def __init__(self) -> None:
        self._slots = Receivers[Slot]()

    def find(self, pushed: PushedHidden, sender: str) -> Slot | None:
        """Returns the request to which a peer may push something."""
        return self._slots.find((pushed.session, pushed.step), sender, pushed.step, pushed.token)

    @contextlib.contextmanager
    def waiting(self, peer: str, pushed: PushSlot) -> Iterator[Inbox]:
        """Lets the input of a peer's request be pushed.

        Raises:
            BadRequestError: If another request of this peer waits under that name.
        """
        name, slot = (pushed.name, pushed.step), Slot(peer, pushed.key, Inbox(pushed.step))
        self._slots.add(name, slot)
        try:
            yield slot.inbox
        finally:
            self._slots.remove(name, slot)
            slot.inbox.close()
