"""Inputs of requests without a session that other servers push: forwards and backwards of training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from swarm_plugins.server.failures import BadRequestError
from swarm_plugins.server.state.inbox import Inbox
from swarm_plugins.transport.messages import PushSlot


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
        self._slots: dict[tuple[str, int], Slot] = {}

    def find(self, name: str, step: int) -> Slot | None:
        """Returns the request that waits under a name; the caller checks whether the sender may push."""
        return self._slots.get((name, step))

    @contextlib.contextmanager
    def waiting(self, peer: str, pushed: PushSlot) -> Iterator[Inbox]:
        """Lets the input of a peer's request be pushed.

        Raises:
            BadRequestError: If another request waits under that name.
        """
        key, slot = (pushed.name, pushed.step), Slot(peer, pushed.key, Inbox(pushed.step))
        if self._slots.setdefault(key, slot) is not slot:
            raise BadRequestError(f"a request waits for step {pushed.step} of this slot already: count the requests")
        try:
            yield slot.inbox
        finally:
            del self._slots[key]
            slot.inbox.close()
