"""Answers as they are examined: each with what was asked, and what the server says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.client.calls.call import Answer, Call
from swarm_plugins.client.sessions.history import History
from swarm_plugins.client.sessions.span import SentSession, StepCall
from swarm_plugins.client.training.spans import BackwardCall, ForwardCall
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    ForwardRequest,
    ForwardResponse,
    SessionStep,
    SessionStepResponse,
)

if TYPE_CHECKING:
    from swarm_plugins.transport.server_info import ServerInfo


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """What all answers have."""

    peer: str
    info: ServerInfo
    """What the server says about itself."""
    adapters: tuple[LoadedAdapter, ...]
    """The adapters that the request names, in order; their tensors change with the next optimizer step."""


@dataclass(frozen=True, kw_only=True)
class ForwardClaim(_Claim):
    """The answer to a forward of one span."""

    request: ForwardRequest
    response: ForwardResponse


@dataclass(frozen=True, kw_only=True)
class BackwardClaim(_Claim):
    """The answer to a backward of one span."""

    forward: ForwardRequest
    """The forward that the gradients belong to."""
    outputs: ForwardResponse
    """The answer to it: of the same server, if ``request`` names its graph, else perhaps of another one."""
    request: BackwardRequest
    response: BackwardResponse


@dataclass(frozen=True, kw_only=True)
class StepClaim(_Claim):
    """The answer to a step of a session."""

    history: History
    """All steps that the session on this server holds; the last one is this step."""
    sent: SentSession | None
    """The messages behind them, with this step's. None: the session is a fork, or its cache has been changed."""
    request: SessionStep
    response: SessionStepResponse


def claim_of(
    call: Call[Any, Any], answer: Answer[Any, Any], info: ServerInfo
) -> ForwardClaim | BackwardClaim | StepClaim:
    """Returns what a server claims by an answer."""
    peer, request, response = answer
    what: dict[str, Any] = {
        "peer": peer, "info": info, "adapters": call.adapters, "request": request, "response": response
    }  # fmt: skip
    if isinstance(call, ForwardCall):
        return ForwardClaim(**what)
    if isinstance(call, BackwardCall):
        return BackwardClaim(**what, forward=call.run.request, outputs=call.run.response)
    if isinstance(call, StepCall):
        return StepClaim(**what, history=call.session.history, sent=call.session.sent)
    raise TypeError(f"cannot examine a {type(call).__name__}")
