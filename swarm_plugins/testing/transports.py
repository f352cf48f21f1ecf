"""Transports for tests: in memory, and one that fails on purpose.

Both carry messages through the real encoder and decoder, so what cannot travel over libp2p cannot travel here.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarm_plugins.errors import ConfigError, RequestTimeoutError, TransportError, one_line
from swarm_plugins.transport.channel import RPC_NAMES, Channel, Handler, Transport
from swarm_plugins.transport.limits import DEFAULT_LIMITS, WireLimits
from swarm_plugins.transport.messages import Codec, Failure, InfoRequest, Message, ServerInfo
from swarm_plugins.transport.wire import decode, encode

log = logging.getLogger(__name__)


class _Pipe:
    """One direction of a channel: a bounded queue of frames that can end or break."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._changed = asyncio.Condition()
        self.is_ended = False
        self.is_broken = False

    async def put(self, frame: bytes) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._frames) < 8 or self.is_broken or self.is_ended)
            if self.is_broken or self.is_ended:
                raise TransportError("the stream is broken")
            self._frames.append(frame)
            self._changed.notify_all()

    async def get(self) -> bytes | None:
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._frames) or self.is_broken or self.is_ended)
            if self.is_broken:
                raise TransportError("the stream is broken")
            frame = self._frames.popleft() if self._frames else None
            self._changed.notify_all()
            return frame

    async def finish(self, *, is_broken: bool) -> None:
        async with self._changed:
            self.is_ended = True
            self.is_broken |= is_broken
            self._changed.notify_all()


class _LocalChannel:
    """One end of two pipes."""

    def __init__(self, remote_peer: str, outgoing: _Pipe, incoming: _Pipe, limits: WireLimits) -> None:
        self.remote_peer = remote_peer
        self._outgoing = outgoing
        self._incoming = incoming
        self._limits = limits
        self._is_closed = False

    async def send(self, message: Message, *, codec: Codec = "none") -> None:
        self._check_open()
        await self._outgoing.put(b"".join(encode(message, codec=codec)))

    async def receive(self, *, timeout_s: float) -> Message | None:
        self._check_open()
        try:
            frame = await asyncio.wait_for(self._incoming.get(), timeout_s)
        except TimeoutError as exc:
            raise RequestTimeoutError(f"no message from {self.remote_peer} within {timeout_s:g} s") from exc
        return None if frame is None else decode(frame, limits=self._limits)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            # The other end reads what was sent, then the end; it can no longer send.
            await self._outgoing.finish(is_broken=False)
            await self._incoming.finish(is_broken=False)

    async def break_line(self) -> None:
        await self._outgoing.finish(is_broken=True)
        await self._incoming.finish(is_broken=True)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError(f"the channel to {self.remote_peer} is closed: open a new one")


class LocalTransport:
    """Carries messages between handlers in this process; also knows who serves what, by asking them.

    Args:
        handlers_by_peer: For each peer id its handlers by rpc name; may be changed later.
        client: Peer id that the handlers see at the other end.
        limits: Bounds on messages.
    """

    def __init__(
        self,
        handlers_by_peer: Mapping[str, Mapping[str, Handler]],
        *,
        client: str = "local-client",
        limits: WireLimits = DEFAULT_LIMITS,
    ) -> None:
        self._handlers_by_peer = handlers_by_peer
        self._client = client
        self._limits = limits
        self._killed: set[str] = set()
        self._live: dict[asyncio.Task[None], tuple[str, _LocalChannel]] = {}

    @property
    def num_live_channels(self) -> int:
        """Channels whose handler has not ended."""
        return len(self._live)

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        """Opens a channel to a handler; see [`Transport`][swarm_plugins.transport.channel.Transport]."""
        if rpc not in RPC_NAMES:
            raise ConfigError(f"unknown rpc {rpc!r}; known are {', '.join(RPC_NAMES)}")
        handler = self._handlers_by_peer.get(peer, {}).get(rpc)
        if handler is None or peer in self._killed:
            raise TransportError(f"peer {peer} cannot be reached, or does not serve {rpc}")
        forth, back = _Pipe(), _Pipe()
        near = _LocalChannel(peer, forth, back, self._limits)
        far = _LocalChannel(self._client, back, forth, self._limits)
        task = asyncio.create_task(_run(handler, far), name=f"local {rpc} of {peer}")
        self._live[task] = (peer, near)
        task.add_done_callback(lambda done: self._live.pop(done, None))
        return near

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        """Asks every living peer for its ``rpc_info``; see `Directory`."""
        found = {}
        for peer in list(self._handlers_by_peer):
            if peer in self._killed or "rpc_info" not in self._handlers_by_peer[peer]:
                continue
            channel = await self.open(peer, "rpc_info", timeout_s=5.0)
            await channel.send(InfoRequest())
            info = await channel.receive(timeout_s=5.0)
            await channel.close()
            if isinstance(info, ServerInfo) and info.version == version and info.num_blocks == num_blocks:
                found[peer] = info
        return found

    async def kill(self, peer: str) -> None:
        """Makes a peer vanish: its streams break, its handlers are cancelled, it cannot be reached."""
        self._killed.add(peer)
        await self._end([task for task, (owner, _) in self._live.items() if owner == peer])

    def revive(self, peer: str) -> None:
        """Makes a killed peer reachable again."""
        self._killed.discard(peer)

    async def close(self) -> None:
        """Breaks all channels and ends all handlers. Idempotent."""
        await self._end(list(self._live))

    async def _end(self, tasks: Collection[asyncio.Task[None]]) -> None:
        for task in tasks:
            await self._live[task][1].break_line()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(handler: Handler, channel: _LocalChannel) -> None:
    try:
        await handler(channel)
    except TransportError as exc:
        log.debug("handler ended by its stream: %s", exc)
    except Exception as exc:
        log.exception("handler failed")
        if not channel._is_closed:
            await channel.send(Failure(kind="internal", message=one_line(exc, with_kind=True)))
    finally:
        await channel.close()


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong on a line, and how often. Chances are per message, in both directions."""

    drop: float = 0.0
    """Chance that a message never arrives."""

    delay_s: float = 0.0
    """Longest delay of a message; the actual ones are spread evenly below it."""

    corrupt: float = 0.0
    """Chance that one byte of a message arrives changed."""

    break_after: int | None = None
    """Messages after which each channel breaks."""

    refuse: float = 0.0
    """Chance that a channel cannot be opened."""

    def __post_init__(self) -> None:
        for name in ("drop", "corrupt", "refuse"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is a chance between 0 and 1, got {getattr(self, name)!r}")


class FaultyTransport:
    """Any transport with a bad line; the same seed gives the same faults in the same order.

    Args:
        inner: What carries the messages.
        faults: What goes wrong.
        seed: Of the faults.
        peers: Peers whose lines are bad. None: all.
    """

    def __init__(
        self, inner: Transport, faults: Faults, *, seed: int = 0, peers: Collection[str] | None = None
    ) -> None:
        self._inner = inner
        self._faults = faults
        self._dice = random.Random(seed)
        self._peers = peers

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        """Opens a channel with a bad line; see `Transport`."""
        if self._peers is not None and peer not in self._peers:
            return await self._inner.open(peer, rpc, timeout_s=timeout_s)
        if self._dice.random() < self._faults.refuse:
            raise TransportError(f"peer {peer} cannot be reached (injected fault)")
        return _FaultyChannel(await self._inner.open(peer, rpc, timeout_s=timeout_s), self._faults, self._dice)

    async def close(self) -> None:
        """Closes the inner transport."""
        await self._inner.close()


class _FaultyChannel:
    def __init__(self, inner: Channel, faults: Faults, dice: random.Random) -> None:
        self._inner = inner
        self._faults = faults
        self._dice = dice
        self._messages = 0

    @property
    def remote_peer(self) -> str:
        return self._inner.remote_peer

    async def send(self, message: Message, *, codec: Codec = "none") -> None:
        await self._count()
        if self._dice.random() >= self._faults.drop:
            await self._inner.send(self._damage(message, codec), codec=codec)

    async def receive(self, *, timeout_s: float) -> Message | None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            message = await self._inner.receive(timeout_s=left_s)
            if message is None:
                return None
            await self._count()
            if self._dice.random() >= self._faults.drop:
                return self._damage(message, "none")

    async def close(self) -> None:
        await self._inner.close()

    async def _count(self) -> None:
        if self._faults.delay_s:
            await asyncio.sleep(self._dice.random() * self._faults.delay_s)
        self._messages += 1
        if self._faults.break_after is not None and self._messages > self._faults.break_after:
            await self._inner.close()
            raise TransportError(f"the stream to {self.remote_peer} broke (injected fault)")

    def _damage(self, message: Message, codec: Codec) -> Message:
        if self._dice.random() >= self._faults.corrupt:
            return message
        frame = bytearray(b"".join(encode(message, codec=codec)))
        frame[self._dice.randrange(len(frame))] ^= 1 << self._dice.randrange(8)
        return decode(frame)  # raises ProtocolError where the byte carries structure, else a number has changed
