"""Interfaces between client or server and what carries their messages (libp2p, memory, a faulty line).

A [`Channel`][swarm_plugins.transport.channel.Channel] is a two-way stream of messages between a client and one rpc of
one peer. Both ends have the same interface.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Protocol

from swarm_plugins.errors import TransportError
from swarm_plugins.transport.counts import StreamCounts
from swarm_plugins.transport.messages import Codec, Message
from swarm_plugins.transport.server_info import ServerInfo

RPC_NAMES = (
    "rpc_info",
    "rpc_forward",
    "rpc_backward",
    "rpc_session",
    "rpc_adapter",
    "rpc_open",
    "rpc_experts",
    "rpc_push",
    "rpc_drain",
    "rpc_run",
)
# "  * [ADDRESS] dial tcp4 HOST:PORT: connect: connection refused"
_DIAL = re.compile(r"^\s*\* \[(\S+)\] (?:dial \w+ \S+: )?(?:connect: )?")
_UNKNOWN = "its address is not known"
_PLAIN = {"failed to find any peer in table": _UNKNOWN, "routing: not found": _UNKNOWN}


class BackoffError(TransportError):
    """The peer was not called, because the last calls were in vain: libp2p waits 6 s at first, minutes later."""


def dial_error(peer: str, message: str) -> TransportError:
    """Returns the error for a message of the daemon about a peer, which has a line for each address."""
    # Each layer of libp2p adds its own "failed to dial", some with the peer's id.
    lines = re.sub(rf"^(failed to dial( {re.escape(peer)})?:\s*)+", "", message).removeprefix("all dials failed")
    places = [" ".join(_DIAL.sub(r"\1: ", line).split()) for line in lines.splitlines() if line.strip()]
    reason = "; ".join(places) or "the libp2p daemon gives no reason"
    kind = BackoffError if "dial backoff" in reason else TransportError
    plain = _PLAIN.get(reason, reason.replace("dial backoff", "failed a moment ago"))
    return kind(f"peer {peer} cannot be reached: {plain}")


class Channel(Protocol):
    """One two-way stream of messages. One task at a time may send and one may receive."""

    @property
    def remote_peer(self) -> str:
        """Base58 id of the peer at the other end, proved by the transport."""
        ...

    async def send(self, message: Message, *, codec: Codec = "none") -> None:
        """Sends one message, packing its floating tensors by ``codec``.

        Raises:
            TransportError: If the stream is broken.
        """
        ...

    async def receive(self, *, timeout_s: float) -> Message | None:
        """Receives the next message; None when the other end has closed the stream.

        Raises:
            RequestTimeoutError: If none arrives within ``timeout_s``; a later call may get it.
            ProtocolError: If what arrives is malformed or too large.
            TransportError: If the stream is broken.
        """
        ...

    async def close(self) -> None:
        """Closes the stream; the other end's ``receive`` returns None. Idempotent."""
        ...


class Opener(Protocol):
    """Opens channels to peers."""

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        """Opens a channel to ``rpc`` (one of ``RPC_NAMES``) of ``peer``.

        Raises:
            TransportError: If the peer cannot be reached.
            RequestTimeoutError: If it does not answer within ``timeout_s``.
        """
        ...


class Transport(Opener, Protocol):
    """Opens channels to peers, and closes them."""

    async def close(self) -> None:
        """Closes all channels. Idempotent."""
        ...


class Directory(Protocol):
    """Looks up servers."""

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        """Returns the servers announced under a model version, by peer id."""
        ...


Handler = Callable[[Channel], Awaitable[None]]
"""A server's side of one rpc; runs until ``receive`` returns None."""


class Network(Transport, Directory, Protocol):
    """Opens channels and looks up servers."""

    @property
    def counts(self) -> StreamCounts:
        """What its streams have carried so far."""
        ...
