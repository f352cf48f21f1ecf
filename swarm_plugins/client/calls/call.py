"""A question to the server of a span, and the one-method protocol of those who ask it.

Forward, backward, a step of a session and rows of experts are calls. `Direct` asks; others wrap it and keep the
protocol: `Pushed` (the input comes from the server before), `Hedged` (a replica is asked too), and a `Guard`'s (the
answer is computed again here).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.errors import RemoteError
from swarm_plugins.transport.messages import Message, PushTo

if TYPE_CHECKING:
    from swarm_plugins.client.peers import Peers
    from swarm_plugins.transport.channel import Channel

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


class WrongAnswerError(RemoteError):
    """A server's answer is not what its blocks compute; it is not used."""


class Answer(NamedTuple, Generic[Request, Response]):
    """An answer of the right shape."""

    peer: str
    """Who gave it: the server that was asked, or a replica."""
    request: Request
    """What it was asked, as if all of that had come from here."""
    response: Response
    is_pushed: bool = False
    """Whether another server sent the request's input. It then arrived exactly as it is here, however it was packed."""


class Ahead(Protocol):
    """A call that a server was told of ahead of its input; see `swarm_plugins.client.calls.pushing`."""

    peer: str
    """The server."""
    sender: str
    """The server that sends the input; empty: the client has sent it."""
    is_given_up: bool
    """Whether no server sends its input any more."""

    def push_to(self) -> PushTo:
        """Returns what the server before is to send its output to."""

    def note_pushed(self, not_pushed: str) -> None:
        """Notes whether the server before has sent its output, or why not."""

    async def collect(self) -> Answer[Any, Any] | None:
        """Returns the server's answer; None: it has to be asked again."""


class Call(ABC, Generic[Request, Response]):
    """A question to the server of a span.

    Args:
        blocks: The blocks that run.
        tokens: Rows times tokens of the input, or rows of experts: the units of work.
        adapters: Those that the request names, in order.
    """

    rpc: ClassVar[str]
    kind: type[Response]
    """Of the answers."""
    is_queued: ClassVar[bool] = False
    """Whether servers carry out such calls one after another, and whether any server of the blocks can answer."""

    def __init__(self, blocks: range, tokens: int, adapters: tuple[LoadedAdapter, ...] = ()) -> None:
        self.blocks = blocks
        self.tokens = tokens
        self.adapters = adapters
        self.told: Ahead | None = None
        """What its server was told ahead of the input."""
        self.next: Ahead | None = None
        """What the server after it was told, which gets the output of this call."""

    @property
    def excluded(self) -> Collection[str]:
        """Servers that are not asked instead."""
        return ()

    @abstractmethod
    def input(self) -> Tensor:
        """Returns what another server can send: hidden states, or gradients of the output."""

    @abstractmethod
    def request(self, peers: Sequence[str]) -> Request:
        """Returns the message to the first of some peers, all of which see what it carries, or the answer."""

    def lending(self, peers: Peers, peer: str) -> AbstractAsyncContextManager[Channel]:
        """Lends the stream on which the server is asked."""
        return peers.lending(peer, self.rpc)

    async def send(self, peers: Peers, peer: str, request: Request) -> Response:
        """Sends a request and returns the answer."""
        return await peers.request(peer, self.rpc, request, self.kind, units=self.tokens, blocks=len(self.blocks))

    async def collect(self, peers: Peers, channel: Channel, request: Request, *, started: float) -> Response:
        """Waits for the answer to a request that was sent on a stream; ``started``: when, on a steady clock."""
        return await peers.collect(
            channel,
            request,
            self.kind,
            work=self.rpc,
            units=self.tokens,
            blocks=len(self.blocks),
            started=started,
        )

    async def confirmed(self, peers: Peers) -> None:
        """Waits for what comes before the answer."""

    def check_wanted(self, peer: str) -> None:
        """Raises TransportError if a server is not worth asking any more."""

    @abstractmethod
    def receive(self, answer: Answer[Request, Response]) -> None:
        """Checks the shape of an answer; raises ProtocolError if it is wrong."""


class Caller(Protocol):
    """Asks servers. Wrappers are callers, too."""

    async def ask(self, call: Call[Request, Response], peer: str) -> Answer[Request, Response]:
        """Asks a server, or others instead; raises SwarmError if no answer can be used."""
