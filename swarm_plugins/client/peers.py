"""Requests to one peer at a time: streams that are kept open, answers that are checked, adapters uploaded once."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from swarm_plugins.adapter_spec import AdapterSpec
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.deadlines import Deadlines
from swarm_plugins.client.failures import failure_error
from swarm_plugins.errors import ProtocolError, SwarmError, TransportError, UnknownAdapterError
from swarm_plugins.transport.channel import Channel, Transport
from swarm_plugins.transport.messages import (
    AdapterStored,
    AdapterUpload,
    BackwardRequest,
    Failure,
    ForwardRequest,
    InfoRequest,
    Message,
    ServerInfo,
    SessionStep,
)

__all__ = ["Peers", "ShippedAdapter", "check_answer", "num_tokens"]

M = TypeVar("M", bound=Message)
_MAX_IDLE_CHANNELS = 4
"""Open streams kept for each peer and rpc; more are closed after use."""
_MAX_UPLOADS_REMEMBERED = 4096
_UPLOAD_UNIT_BYTES = 4096
"""What counts as one token where the pace of uploads is learnt."""


class ShippedAdapter:
    """The part of an adapter that lies on one span, with the name it goes by.

    Args:
        digest: Content hash of the two others.
        spec: Structure.
        tensors: In the order of ``spec.tensor_shapes()``.
    """

    def __init__(self, digest: str, spec: AdapterSpec, tensors: Sequence[Tensor]) -> None:
        self.digest = digest
        self.spec = spec
        self.tensors = tensors


def check_answer(answer: Message | None, kind: type[M], peer: str) -> M:
    """Returns an answer that must be of one kind.

    Raises:
        ProtocolError: If the peer answered with something else.
        TransportError: If it closed the stream before.
        SwarmError: If it answered with a failure (see ``failure_error``).
    """
    if answer is None:
        raise TransportError(f"server {peer} closed the stream before it answered")
    if isinstance(answer, Failure):
        raise failure_error(answer, peer)
    if not isinstance(answer, kind):
        raise ProtocolError(f"server {peer} answered with {type(answer).__name__} where {kind.__name__} was due")
    return answer


def num_tokens(message: Message) -> int:
    """Returns how many tokens a request computes, 1 at least."""
    if isinstance(message, ForwardRequest | SessionStep):
        return message.hidden.shape[0] * message.hidden.shape[1]
    if isinstance(message, BackwardRequest):
        return message.grad_hidden.shape[0] * message.grad_hidden.shape[1]
    return 1


class Peers:
    """Sends requests to peers.

    Args:
        transport: Opens the streams.
        config: Deadlines and the codec.
    """

    def __init__(self, transport: Transport, config: SwarmConfig) -> None:
        self.transport = transport
        self.config = config
        self.deadlines = Deadlines(config.request_timeout_s)
        self._idle: defaultdict[tuple[str, str], list[Channel]] = defaultdict(list)
        self._uploaded: OrderedDict[tuple[str, str], None] = OrderedDict()

    async def info(self, peer: str) -> ServerInfo:
        """Asks a server what it serves.

        Raises:
            SwarmError: If it cannot be reached, does not answer in time or answers with a failure.
        """
        return await self.request(peer, "rpc_info", InfoRequest(), ServerInfo, timeout_s=self.config.info_timeout_s)

    async def request(
        self, peer: str, rpc: str, message: Message, kind: type[M], *, timeout_s: float | None = None
    ) -> M:
        """Sends one message over a kept stream and returns the answer.

        Raises:
            SwarmError: If the peer cannot be reached, does not answer in time or answers with a failure.
        """
        if timeout_s is None:
            timeout_s = self.deadlines.timeout_s(peer, rpc, num_tokens(message))
        idle = self._idle[peer, rpc]
        if idle:
            # A kept stream may have died unnoticed (the server was restarted): then a fresh one gets its chance.
            try:
                return await self._exchange(idle.pop(), rpc, message, kind, timeout_s)
            except _StaleStreamError:
                pass
        channel = await self.transport.open(peer, rpc, timeout_s=self.config.connect_timeout_s)
        try:
            return await self._exchange(channel, rpc, message, kind, timeout_s)
        except _StaleStreamError as exc:
            raise TransportError(f"server {peer} closed the stream before it answered: {exc}") from exc

    async def _exchange(self, channel: Channel, rpc: str, message: Message, kind: type[M], timeout_s: float) -> M:
        keep = False
        try:
            try:
                started = time.perf_counter()
                await channel.send(message, codec=self.config.codec)
                answer = await channel.receive(timeout_s=timeout_s)
            except TransportError as exc:
                if isinstance(exc, TimeoutError | ProtocolError):
                    raise
                raise _StaleStreamError(str(exc)) from exc
            if answer is None:
                raise _StaleStreamError("end of stream")
            keep = isinstance(answer, Failure | kind)
            checked = check_answer(answer, kind, channel.remote_peer)
            # Only of work done: a refusal comes at once and says nothing of the server's pace.
            self.deadlines.observe(channel.remote_peer, rpc, num_tokens(message), time.perf_counter() - started)
            return checked
        finally:
            idle = self._idle[channel.remote_peer, rpc]
            if keep and len(idle) < _MAX_IDLE_CHANNELS:
                idle.append(channel)
            else:
                await channel.close()

    async def upload(self, peer: str, adapters: Sequence[ShippedAdapter], *, again: bool = False) -> None:
        """Makes sure that a peer holds the adapters.

        Args:
            peer: The server.
            adapters: What it must hold.
            again: Upload also what it is believed to hold.

        Raises:
            SwarmError: If the peer cannot be reached, does not answer in time or refuses an adapter.
        """
        for adapter in adapters:
            key = (peer, adapter.digest)
            if key in self._uploaded and not again:
                self._uploaded.move_to_end(key)
                continue
            upload = AdapterUpload(
                digest=adapter.digest, spec=adapter.spec, tensors=tuple(t.detach() for t in adapter.tensors)
            )
            await self._upload_exact(peer, upload)
            self._uploaded[key] = None
            while len(self._uploaded) > _MAX_UPLOADS_REMEMBERED:
                self._uploaded.popitem(last=False)

    async def _upload_exact(self, peer: str, upload: AdapterUpload) -> None:
        # Adapters travel uncompressed whatever the codec: the digest is of the exact bytes.
        channel = await self.transport.open(peer, "rpc_adapter", timeout_s=self.config.connect_timeout_s)
        size = sum(tensor.nbytes for tensor in upload.tensors) // _UPLOAD_UNIT_BYTES + 1
        try:
            started = time.perf_counter()
            await channel.send(upload)
            answer = await channel.receive(timeout_s=self.deadlines.timeout_s(peer, "rpc_adapter", size))
            check_answer(answer, AdapterStored, peer)
            self.deadlines.observe(peer, "rpc_adapter", size, time.perf_counter() - started)
        finally:
            await channel.close()

    async def request_with_adapters(
        self, peer: str, rpc: str, message: Message, kind: type[M], adapters: Sequence[ShippedAdapter]
    ) -> M:
        """Sends a request that names adapters, after uploading those the peer does not hold.

        Raises:
            SwarmError: If the peer cannot be reached, does not answer in time or answers with a failure.
        """
        await self.upload(peer, adapters)
        try:
            return await self.request(peer, rpc, message, kind)
        except UnknownAdapterError:
            # The server has dropped it to make room since: once more, then the error is real.
            await self.upload(peer, adapters, again=True)
            return await self.request(peer, rpc, message, kind)

    async def close(self) -> None:
        """Closes all kept streams. Idempotent."""
        channels = [channel for idle in self._idle.values() for channel in idle]
        self._idle.clear()
        for channel in channels:
            with contextlib.suppress(SwarmError):
                await channel.close()


class _StaleStreamError(Exception):
    """A stream was found broken before an answer began."""
