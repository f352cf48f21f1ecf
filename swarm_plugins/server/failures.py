"""Turns what went wrong while serving a request into the typed answer its sender gets.

The message tells the sender what was wrong with the request. Paths, stack frames and other inner state of this machine
go to the log only.
"""

from __future__ import annotations

import logging

from swarm_plugins.errors import (
    CapacityError,
    CheckpointError,
    MissingExpertsError,
    ProtocolError,
    SwarmError,
    is_out_of_memory,
    one_line,
)
from swarm_plugins.ledger import BusyError
from swarm_plugins.transport.messages import Failure, FailureKind

log = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 1000


class RequestError(Exception):
    """A request cannot be served; becomes a ``Failure`` of this kind."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class BadRequestError(RequestError):
    """A request that every server would refuse."""

    def __init__(self, message: str) -> None:
        super().__init__("bad_request", message)


def failure_of(error: Exception, *, peer: str, rpc: str) -> Failure:
    """Returns the answer for ``error`` and logs what the peer is not told."""
    kind = _kind_of(error)
    if kind == "internal":
        log.error("%s from %s failed", rpc, peer, exc_info=error)
        return Failure(kind=kind, message=f"the server failed in {rpc} ({type(error).__name__}); its log says more")
    log.debug("%s from %s refused as %s: %s", rpc, peer, kind, error)
    message = str(error) or type(error).__name__
    if is_out_of_memory(error) and not isinstance(error, (SwarmError, RequestError)):
        log.warning("%s from %s: out of memory: %s", rpc, peer, one_line(error))
        message = "this server is out of memory: send less at once, or use another server"
    return Failure(kind=kind, message=message[:_MAX_MESSAGE_CHARS])


def _kind_of(error: Exception) -> FailureKind:
    if isinstance(error, RequestError):
        return error.kind
    if isinstance(error, BusyError):
        return "overloaded"
    if isinstance(error, CapacityError):
        return "out_of_memory"
    if isinstance(error, MissingExpertsError):
        return "missing_experts"
    if isinstance(error, CheckpointError):
        return "internal"
    if is_out_of_memory(error):
        return "out_of_memory"
    # UnsupportedError is a NotImplementedError: it cannot work on these blocks for any client.
    if isinstance(error, (ProtocolError, ValueError, NotImplementedError)):
        return "bad_request"
    return "internal"
