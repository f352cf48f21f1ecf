"""What a server's failure answer means to a client: which error it is, and whether another server may do better."""

from __future__ import annotations

from swarm_plugins.errors import (
    CapacityError,
    ProtocolError,
    RemoteError,
    SessionLostError,
    SwarmError,
    TransportError,
    UnknownAdapterError,
)
from swarm_plugins.transport.messages import Failure

__all__ = ["RefusedError", "TicketLostError", "failure_error", "is_worth_another_server"]


_MAX_MESSAGE_CHARS = 1000


class RefusedError(RemoteError):
    """The server refuses the request itself: another server would refuse it too, if this one says the truth."""


class TicketLostError(RemoteError):
    """The server no longer keeps the graph of a forward request: send the inputs again."""


_ERRORS: dict[str, type[SwarmError]] = {
    "bad_request": RefusedError,
    "not_finite": RefusedError,
    "unknown_adapter": UnknownAdapterError,
    "unknown_ticket": TicketLostError,
    "unknown_session": SessionLostError,
    "out_of_memory": CapacityError,
}


def failure_error(failure: Failure, peer: str) -> SwarmError:
    """Returns the error to raise for a failure answer."""
    return _ERRORS.get(failure.kind, RemoteError)(f"server {peer} answered {failure.kind}: {_shown(failure.message)}")


def _shown(text: str) -> str:
    """Returns a stranger's text as it may stand in a log or on a terminal: one line of bounded length."""
    return "".join(char if char.isprintable() else " " for char in text[:_MAX_MESSAGE_CHARS])


def is_worth_another_server(error: BaseException) -> bool:
    """Returns whether the same request may succeed elsewhere (or later)."""
    if isinstance(error, RefusedError):
        return False
    return isinstance(error, (TransportError, ProtocolError, CapacityError))
