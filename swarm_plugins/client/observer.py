"""Where finished calls can be examined before their answers are used, and missing blocks found elsewhere.

The client only knows this seam; `swarm_plugins.verification` fills it with spot checks, `swarm_plugins.fallback` with a
server in this process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.client.sessions.history import History
from swarm_plugins.errors import RemoteError
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    ForwardRequest,
    ForwardResponse,
    SessionOpen,
    SessionStep,
    SessionStepResponse,
)
from swarm_plugins.transport.server_info import ServerInfo


class WrongAnswerError(RemoteError):
    """A server's answer is not what its blocks compute; it is not used."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What all calls have."""

    peer: str
    info: ServerInfo | None
    """What the server says about itself."""
    adapters: tuple[LoadedAdapter, ...]
    """The adapters that the request names, in order; their tensors change with the next optimizer step."""


@dataclass(frozen=True, kw_only=True)
class ForwardCall(_Call):
    """A forward of one span that a server has answered."""

    request: ForwardRequest
    response: ForwardResponse


@dataclass(frozen=True, kw_only=True)
class BackwardCall(_Call):
    """A backward of one span that a server has answered."""

    forward: ForwardRequest
    """The forward that the gradients belong to."""
    outputs: ForwardResponse
    """The answer to it: of the same server, if ``request`` names its graph, else perhaps of another one."""
    request: BackwardRequest
    response: BackwardResponse


@dataclass(frozen=True)
class SentSession:
    """All messages sent to a session on one server, if none of them changed what was already cached."""

    opened: SessionOpen
    steps: list[SessionStep] = field(default_factory=list)
    """Those that were answered; grows with the session."""


@dataclass(frozen=True, kw_only=True)
class StepCall(_Call):
    """A step of a session that a server has answered."""

    history: History
    """All steps that the session on this server holds; the last one is this step."""
    sent: SentSession | None
    """The messages behind them, with this step's. None: the session is a fork, or its cache has been changed."""
    request: SessionStep
    response: SessionStepResponse


class CallObserver(Protocol):
    """Examines answers. All methods are called on the client's event loop, after shapes and finiteness were checked."""

    def is_excluded(self, peer: str) -> bool:
        """Returns whether a peer must not be asked at all."""

    def nonce(self) -> bytes:
        """Returns what to send as nonce of a request: random bytes, or none to get no receipt."""

    async def forward_done(self, call: ForwardCall) -> None:
        """Examines a forward; raises WrongAnswerError if its answer must not be used."""

    async def backward_done(self, call: BackwardCall) -> None:
        """Examines a backward; raises WrongAnswerError if its answer must not be used."""

    async def step_done(self, call: StepCall) -> None:
        """Examines a step of a session; raises WrongAnswerError if its answer must not be used."""

    async def stand_in(self, blocks: range) -> str:
        """Returns a peer that serves blocks which no server of the swarm holds; empty if there is none."""

    async def close(self) -> None:
        """Ends examinations under way. Idempotent."""


class NoObserver:
    """Believes every answer."""

    def is_excluded(self, peer: str) -> bool:
        """Excludes no peer."""
        return False

    def nonce(self) -> bytes:
        """Asks for no receipt."""
        return b""

    async def forward_done(self, call: ForwardCall) -> None:
        """Accepts the answer."""

    async def backward_done(self, call: BackwardCall) -> None:
        """Accepts the answer."""

    async def step_done(self, call: StepCall) -> None:
        """Accepts the answer."""

    async def stand_in(self, blocks: range) -> str:
        """Knows no other peer."""
        return ""

    async def close(self) -> None:
        """Has nothing to end."""
