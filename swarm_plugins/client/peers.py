"""Requests to one peer at a time: streams kept open, answers checked and timed, adapters uploaded once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import torch

from swarm_plugins.adapter_spec import adapter_digest
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.book import judging
from swarm_plugins.book.backlog import MOST_AT_ONCE
from swarm_plugins.book.record import Answered, Missed, PeerBook
from swarm_plugins.book.rules import Rules
from swarm_plugins.client.answers import StreamLostError, check_answer
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.counts import ClientCounts
from swarm_plugins.client.digests import changed_adapter_error
from swarm_plugins.client.sharing import SharedWork
from swarm_plugins.errors import (
    CapacityError,
    ProtocolError,
    RefusedError,
    RemoteError,
    RequestTimeoutError,
    SwarmError,
    TransportError,
    UnknownAdapterError,
)
from swarm_plugins.recent import Recent
from swarm_plugins.transport.channel import Channel, Transport
from swarm_plugins.transport.messages import (
    AdapterStored,
    AdapterUpload,
    Codec,
    Message,
)
from swarm_plugins.transport.server_info import InfoRequest, ServerInfo
from swarm_plugins.transport.wire import tensor_bytes

M = TypeVar("M", bound=Message)
T = TypeVar("T")
_MAX_IDLE_CHANNELS = MOST_AT_ONCE
"""Open streams kept for each peer and rpc; more are closed after use."""
_MAX_IDLE_PEERS = 256
"""Pairs of peer and rpc with kept streams; those unused for longest are closed: each stream is an open file."""
_MAX_OFFERED = 256
"""The most adapters remembered for one server, and the most servers for which they are remembered."""
_QUEUED = ("rpc_forward", "rpc_backward")
"""Requests that a server carries out one after another."""
_OPEN = "open"
"""What opening a stream is called in observed paces."""
_UPLOAD_UNIT_BYTES = 4096
"""Unit of work in the observed pace of uploads."""
_SMALL_BYTES = 64 * 1024
"""A request of this size can be sent at once, even to a peer that does not read: the kernel buffers it."""


class Peers:
    """Sends requests to peers; raises SwarmError if one cannot be reached, is late, or answers with a failure."""

    def __init__(
        self,
        transport: Transport,
        config: SwarmConfig,
        counts: ClientCounts | None = None,
        *,
        rules: Rules | None = None,
    ) -> None:
        self.transport = transport
        self.config = config
        self.counts = counts or ClientCounts()
        self.book = PeerBook(rules or Rules(longest_s=config.request_timeout_s))
        """What is known of the peers."""
        self._idle: OrderedDict[tuple[str, str], list[Channel]] = OrderedDict()
        self._uploaded: Recent[tuple[str, str], int] = Recent()
        """The number of the upload by which a peer got an adapter."""
        self._offered: Recent[str, frozenset[str]] = Recent(_MAX_OFFERED)
        """Digests of the adapters that a server's host has loaded."""
        self._num_uploads = 0
        self._uploads = SharedWork[tuple[str, str]]()

    async def open(self, peer: str, rpc: str) -> Channel:
        """Opens a stream."""
        limit_s = min(self._timeout_s(peer, _OPEN, 1), self.config.connect_timeout_s)
        started = time.perf_counter()
        try:
            channel = await self.transport.open(peer, rpc, timeout_s=limit_s)
        except TimeoutError:
            self.book.observe(peer, Missed(_OPEN))
            raise
        self.book.observe(peer, Answered(_OPEN, 1, time.perf_counter() - started))
        return channel

    def _timeout_s(self, peer: str, work: str, units: int) -> float:
        return judging.timeout_s(self.book[peer], work, units)

    async def exchange(
        self,
        channel: Channel,
        message: Message,
        kind: type[M],
        *,
        work: str,
        units: int,
        blocks: int = 0,
        timeout_s: float | None = None,
    ) -> M:
        """Sends one message and returns the answer.

        Unless ``timeout_s`` is given, the pace observed for this kind of ``work`` decides how long to wait for so many
        ``units`` (tokens, as a rule), and a peer that hangs is not waited for. The time taken counts when servers of
        ``blocks`` are compared.

        Raises:
            StreamLostError: If the stream breaks or ends before the answer.
            SwarmError: If no answer comes in time, or it is a failure or malformed.
        """
        started = time.perf_counter()
        await self.post(channel, message, work=work, units=units)
        return await self.collect(
            channel, message, kind, work=work, units=units, blocks=blocks, timeout_s=timeout_s, started=started
        )

    async def post(self, channel: Channel, message: Message, *, work: str, units: int) -> None:
        """Sends one message, packed as it wants its answer, which `collect` returns; raises like `exchange`."""
        codec: Codec = getattr(message, "reply_codec", "none")
        peer, num_bytes = channel.remote_peer, tensor_bytes(message)
        try:
            with _as_lost_stream():
                if num_bytes <= _SMALL_BYTES:
                    await channel.send(message, codec=codec)
                else:
                    limit_s = self._timeout_s(peer, work, units)
                    await self._sent(peer, channel.send(message, codec=codec), limit_s, num_bytes)
        except TimeoutError:
            self.book.observe(peer, Missed(work))
            raise

    async def _sent(self, peer: str, send: Coroutine[Any, Any, None], limit_s: float, num_bytes: int) -> None:
        """Sends a large request; a peer that is slow to read it must show that it is at work."""
        rules, started = self.book.rules, time.monotonic()
        wait_s, most_s = min(rules.late_s, limit_s), rules.longest_s + num_bytes / rules.slow_link_bytes_per_s
        sending = asyncio.create_task(send, name="send a large request")
        try:
            while not (await asyncio.wait({sending}, timeout=wait_s))[0]:
                silence = await self._silence(peer, limit_s, num_bytes)
                waited_s = time.monotonic() - started
                if (silence is not None or waited_s > most_s) and not sending.done():
                    why = "" if silence is None else f", and it is not at work: {silence}"
                    raise RequestTimeoutError(
                        f"peer {peer} has not taken a request of {num_bytes} bytes within {waited_s:.1f} s{why}"
                    ) from silence
                wait_s = rules.ask_again_s
            await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def collect(
        self,
        channel: Channel,
        message: Message,
        kind: type[M],
        *,
        work: str,
        units: int,
        blocks: int = 0,
        timeout_s: float | None = None,
        started: float | None = None,
    ) -> M:
        """Returns the answer to a posted message; arguments and errors are those of `exchange`.

        ``started``, in seconds of ``time.perf_counter``, is when the peer could begin to work. None: now.
        """
        peer = channel.remote_peer
        started = time.perf_counter() if started is None else started
        queue = self.book.kept(peer).backlog if work in _QUEUED else None
        try:
            with _as_lost_stream():
                if timeout_s is None:
                    before = 0 if queue is None else queue.tokens_before(units)
                    limit_s = self._timeout_s(peer, work, before + units)
                    answer = await self._awaited(channel, limit_s, tensor_bytes(message))
                else:
                    answer = await channel.receive(timeout_s=timeout_s)
        except TimeoutError:
            self.book.observe(peer, Missed(work))
            raise
        now = time.perf_counter()
        seconds = now - started
        if answer is not None:
            self.counts.answered(work, seconds)
        # Only finished work counts below: a refusal is instant and tells nothing about the pace.
        checked = check_answer(answer, kind, peer)
        if queue is not None:
            trip_s = judging.round_trip_s(self.book[peer]) or 0.0
            seconds = queue.answered(work, sent=started, now=now, round_trip_s=trip_s)
        self.book.observe(peer, Answered(work, units, seconds, blocks))
        return checked

    async def _awaited(self, channel: Channel, limit_s: float, sent_bytes: int) -> Message | None:
        """Receives an answer; a peer that is late has to show meanwhile that it is at work."""
        peer, started, rules = channel.remote_peer, time.monotonic(), self.book.rules
        wait_s = min(rules.late_s, limit_s)
        while True:
            try:
                return await channel.receive(timeout_s=wait_s)
            except RequestTimeoutError as exc:
                if (left_s := started + limit_s - time.monotonic()) <= 0:
                    raise RequestTimeoutError(f"no message from {peer} within {limit_s:.1f} s") from exc
            silence = await self._silence(peer, left_s, sent_bytes)
            if silence is not None:
                with contextlib.suppress(RequestTimeoutError):
                    # It may have come meanwhile.
                    return await channel.receive(timeout_s=0.0)
                waited_s = time.monotonic() - started
                raise RequestTimeoutError(
                    f"no message from {peer} within {waited_s:.1f} s, and it is not at work: {silence}"
                ) from silence
            wait_s = min(rules.ask_again_s, left_s)

    async def _silence(self, peer: str, left_s: float, sent_bytes: int) -> SwarmError | None:
        """Asks a late peer whether it is at work; returns the error if it does not say so."""
        rules = self.book.rules
        # It never has more time than the request itself.
        sign_s = rules.sign_of_life_s + 2 * sent_bytes / rules.slow_link_bytes_per_s
        try:
            await self.info(peer, limit_s=min(sign_s, max(left_s, rules.sign_of_life_s)))
        except (RemoteError, CapacityError):
            return None  # a failure is an answer too
        except SwarmError as exc:
            return exc
        return None

    async def request(
        self,
        peer: str,
        rpc: str,
        message: Message,
        kind: type[M],
        *,
        units: int = 1,
        blocks: int = 0,
        timeout_s: float | None = None,
    ) -> M:
        """Sends one message over a kept stream and returns the answer; arguments and errors are those of `exchange`."""
        ask = functools.partial(
            self.exchange, message=message, kind=kind, work=rpc, units=units, blocks=blocks, timeout_s=timeout_s
        )
        if self._idle.get((peer, rpc)):
            # A kept stream may have died unnoticed (the server was restarted): then try a fresh one.
            with contextlib.suppress(StreamLostError):
                async with self.lending(peer, rpc) as channel:
                    return await ask(channel)
        async with self._using(await self.open(peer, rpc), rpc) as channel:
            return await ask(channel)

    @contextlib.asynccontextmanager
    async def lending(self, peer: str, rpc: str) -> AsyncIterator[Channel]:
        """Lends a kept stream or opens one, for one request; a kept one may have died unnoticed."""
        idle = self._idle.get((peer, rpc))
        async with self._using(idle.pop() if idle else await self.open(peer, rpc), rpc) as channel:
            yield channel

    @contextlib.asynccontextmanager
    async def _using(self, channel: Channel, rpc: str) -> AsyncIterator[Channel]:
        is_reusable = False
        try:
            yield channel
            is_reusable = True
        except (RemoteError, CapacityError):  # a failure is an answer too
            is_reusable = True
            raise
        finally:
            if is_reusable:
                await self._keep(channel, rpc)
            else:
                await channel.close()

    async def _keep(self, channel: Channel, rpc: str) -> None:
        """Keeps a stream for later requests; closes what exceeds the limits."""
        key = (channel.remote_peer, rpc)
        idle = self._idle.setdefault(key, [])
        self._idle.move_to_end(key)
        idle.append(channel)
        surplus = [idle.pop(0)] if len(idle) > _MAX_IDLE_CHANNELS else []
        while len(self._idle) > _MAX_IDLE_PEERS:
            surplus += self._idle.popitem(last=False)[1]
        for one in surplus:
            await one.close()

    async def info(self, peer: str, *, limit_s: float | None = None) -> ServerInfo:
        """Asks a server what it serves, within ``limit_s`` (None: ``info_timeout_s``) and with connecting.

        Raises:
            SwarmError: If it does not say that in time, or says that its compute hangs.
        """
        limit_s = self.config.info_timeout_s if limit_s is None else limit_s
        try:
            async with asyncio.timeout(limit_s):
                info = await self.request(peer, "rpc_info", InfoRequest(), ServerInfo, timeout_s=limit_s)
        except TimeoutError as exc:
            raise RequestTimeoutError(f"it did not report what it serves within {limit_s:.3g} s") from exc
        if info.state == "stuck":
            raise TransportError(f"server {peer} hangs in its work")
        return info

    async def with_adapters(self, peer: str, adapters: Sequence[LoadedAdapter], ask: Callable[[], Awaitable[T]]) -> T:
        """Uploads the adapters that a peer does not hold, then makes a request that names them."""
        uploads = await self.upload(peer, adapters)
        try:
            return await ask()
        except UnknownAdapterError:
            # The server has dropped it since, to make room: upload once more.
            await self.upload(peer, adapters, lost=uploads)
        try:
            return await ask()
        except UnknownAdapterError as exc:
            # Not at fault: others have displaced it, of this request or of another one of this client.
            size = sum(adapter.num_bytes for adapter in adapters)
            raise CapacityError(
                f"server {peer} has dropped an adapter twice during one request ({len(adapters)} adapters, {size} "
                "bytes), for others to have room: use fewer at a time or lower ranks, or start the server with more "
                "--adapter-bytes"
            ) from exc

    async def upload(
        self, peer: str, adapters: Sequence[LoadedAdapter], *, lost: Collection[int] = ()
    ) -> Collection[int]:
        """Ensures that a peer holds the adapters, each sent once for all who ask at the same time.

        Returns the numbers of the uploads by which it got them; those in ``lost`` count no more.

        Raises:
            UnsupportedError: If an adapter has changed since it got its digest.
        """
        numbers = []
        for adapter in adapters:
            key = (peer, adapter.digest)
            if adapter.digest in self._offered.get(peer, ()):
                self._uploaded.setdefault(key, 0)
            while (number := self._uploaded.get(key)) is None or number in lost:
                await self._uploads.do(key, functools.partial(self._upload_exact, peer, adapter))
            self._uploaded.move_to_end(key)
            numbers.append(number)
        return numbers

    def offers(self, peer: str, digests: Sequence[str]) -> None:
        """Notes which adapters a server's host has loaded. Those beyond the limit are uploaded as usual."""
        self._offered[peer] = frozenset(digests[:_MAX_OFFERED])

    async def _upload_exact(self, peer: str, adapter: LoadedAdapter) -> None:
        # Uncompressed whatever the codec: the digest is of the exact bytes.
        tensors = adapter.map(torch.Tensor.detach).tensors
        upload = AdapterUpload(digest=adapter.digest, spec=adapter.spec, tensors=tensors)
        channel = await self.open(peer, "rpc_adapter")
        try:
            units = upload.num_bytes // _UPLOAD_UNIT_BYTES + 1
            await self.exchange(channel, upload, AdapterStored, work="rpc_adapter", units=units)
        except RefusedError:
            if adapter_digest(adapter.spec, adapter.tensors) != adapter.digest:
                raise changed_adapter_error() from None
            raise
        finally:
            await channel.close()
        self._num_uploads += 1
        self._uploaded[peer, adapter.digest] = self._num_uploads

    async def close(self) -> None:
        """Closes all kept streams. Idempotent."""
        channels = [channel for idle in self._idle.values() for channel in idle]
        self._idle.clear()
        for channel in channels:
            with contextlib.suppress(SwarmError):
                await channel.close()


@contextlib.contextmanager
def _as_lost_stream() -> Iterator[None]:
    """Tells a stream that breaks from a peer that is late or sends nonsense."""
    try:
        yield
    except TransportError as exc:
        if isinstance(exc, TimeoutError | ProtocolError):
            raise
        raise StreamLostError(f"no answer came: {exc}") from exc
