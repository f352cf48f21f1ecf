"""Transports for tests: in memory, and with injected faults.

Both use the real encoder and decoder, so a message that libp2p cannot carry fails here too.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from swarm_plugins.errors import ConfigError, RequestTimeoutError, TransportError, one_line
from swarm_plugins.transport.channel import RPC_NAMES, Channel, Handler, Opener, Transport
from swarm_plugins.transport.counts import StreamCounts
from swarm_plugins.transport.messages import Codec, Failure, Message
from swarm_plugins.transport.records import ModelInfo, ModelRecord, majority
from swarm_plugins.transport.server_info import InfoRequest, ServerInfo
from swarm_plugins.transport.wire import decode, encode

log = logging.getLogger(__name__)

_PIPE_FRAMES = 8


class Pipe:
    """One direction of a channel: a bounded queue of frames that can end or break.

    Args:
        sender: Counts for the peer that puts.
        receiver: Counts for the peer that gets.
        arrival: When so many bytes that are sent now arrive, in seconds of the event loop.
    """

    def __init__(
        self, sender: StreamCounts, receiver: StreamCounts, arrival: Callable[[int], float] = lambda _: 0.0
    ) -> None:
        self._sender, self._receiver, self._arrival = sender, receiver, arrival
        self._frames: deque[tuple[float, bytes]] = deque()
        self._changed = asyncio.Condition()
        self._is_ended = False
        self._ends_at = 0.0
        self._is_broken = False

    async def put(self, content: bytes) -> None:
        """Sends a frame, as soon as there is room."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._frames) < _PIPE_FRAMES or self._is_ended)
            if self._is_ended:
                raise TransportError("the stream is broken")
            self._frames.append((self._arrival(len(content)), content))
            self._sender.sent_bytes += len(content)
            self._changed.notify_all()

    async def get(self) -> bytes | None:
        """Returns the next frame once it has arrived; None at the end. If cancelled, it is left."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._frames) or self._is_ended)
            if self._is_broken:
                raise TransportError("the stream is broken")
            arrival = self._frames[0][0] if self._frames else self._ends_at
        await asyncio.sleep(arrival - asyncio.get_running_loop().time())
        async with self._changed:
            if self._is_broken:
                raise TransportError("the stream is broken")
            content = self._frames.popleft()[1] if self._frames else None
            self._receiver.received_bytes += len(content or b"")
            self._changed.notify_all()
            return content

    async def finish(self, *, is_broken: bool) -> None:
        """Ends the stream after what was sent, or breaks it at once."""
        async with self._changed:
            self._is_ended = True
            self._ends_at = self._arrival(0)
            self._is_broken |= is_broken
            self._changed.notify_all()


class LocalChannel:
    """One end of two pipes."""

    def __init__(self, remote_peer: str, outgoing: Pipe, incoming: Pipe) -> None:
        self.remote_peer = remote_peer
        self._outgoing = outgoing
        self._incoming = incoming
        self.is_closed = False

    async def send(self, message: Message, *, codec: Codec = "none") -> None:
        """Sends a message; see `Channel`."""
        self._check_open()
        await self._put(b"".join(encode(message, codec=codec)))

    async def receive(self, *, timeout_s: float) -> Message | None:
        """Waits for a message; see `Channel`."""
        self._check_open()
        try:
            content = await asyncio.wait_for(self._get(), timeout_s)
        except TimeoutError as exc:
            raise RequestTimeoutError(f"no message from {self.remote_peer} within {timeout_s:g} s") from exc
        return None if content is None else decode(content)

    async def _put(self, content: bytes) -> None:
        await self._outgoing.put(content)

    async def _get(self) -> bytes | None:
        return await self._incoming.get()

    async def close(self) -> None:
        """Ends the channel. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            # The other end reads what was sent, then the end; it can no longer send.
            await self.finish(is_broken=False)

    async def finish(self, *, is_broken: bool) -> None:
        """Ends both directions."""
        await self._outgoing.finish(is_broken=is_broken)
        await self._incoming.finish(is_broken=is_broken)

    def _check_open(self) -> None:
        if self.is_closed:
            raise TransportError(f"the channel to {self.remote_peer} is closed: open a new one")


class LocalTransport:
    """Carries messages between handlers in this process, and finds servers by asking them.

    Args:
        handlers_by_peer: Handlers by peer id and rpc name; may change later.
        client: The client's peer id, as the handlers see it.
    """

    def __init__(
        self,
        handlers_by_peer: Mapping[str, Mapping[str, Handler]],
        *,
        client: str = "local-client",
    ) -> None:
        self._handlers_by_peer = handlers_by_peer
        self.client = client
        """The client's peer id."""
        self._killed: set[str] = set()
        self._announced: dict[str, ServerInfo] = {}
        self.counts_of: defaultdict[str, StreamCounts] = defaultdict(StreamCounts)
        """What each peer has sent and received."""
        self.counts = self.counts_of[client]
        self._live: dict[asyncio.Task[None], tuple[set[str], LocalChannel]] = {}

    @property
    def num_live_channels(self) -> int:
        """Channels whose handler has not ended."""
        return len(self._live)

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        """Opens a channel to a handler; see [`Transport`][swarm_plugins.transport.channel.Transport]."""
        return await self._open(self.client, peer, rpc, timeout_s)

    def seen_from(self, peer: str) -> Opener:
        """Returns what one of the peers opens channels with."""
        return _Peer(self, peer)

    async def _open(self, caller: str, peer: str, rpc: str, timeout_s: float) -> Channel:
        if rpc not in RPC_NAMES:
            raise ConfigError(f"unknown rpc {rpc!r}; known: {', '.join(RPC_NAMES)}")
        handler = self._handlers_by_peer.get(peer, {}).get(rpc)
        if handler is None or self._killed & {caller, peer}:
            raise TransportError(f"peer {peer} cannot be reached, or does not serve {rpc}")
        near, far = self._connect(caller, peer, rpc)
        task = asyncio.create_task(_run(handler, far), name=f"local {rpc} of {peer}")
        self._live[task] = ({caller, peer}, near)
        task.add_done_callback(lambda done: self._live.pop(done, None))
        return near

    def _connect(self, caller: str, peer: str, rpc: str) -> tuple[LocalChannel, LocalChannel]:
        """Returns both ends of a new channel, the caller's first."""
        own, its = self.counts_of[caller], self.counts_of[peer]
        there, back = Pipe(own, its), Pipe(its, own)
        return LocalChannel(peer, there, back), LocalChannel(caller, back, there)

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        """Asks every live peer for its ``rpc_info``; of one that cannot be reached, tells the last; see `Directory`."""
        found = {}
        for peer in list(self._handlers_by_peer):
            if peer in self._killed or "rpc_info" not in self._handlers_by_peer[peer]:
                continue
            said = await self._info_of(peer)
            info = None if said is None else said.of(version)
            if info is not None and info.num_blocks == num_blocks:
                found[peer] = info
        return found

    async def models(self) -> dict[str, ModelInfo]:
        """Returns the model versions of all live peers."""
        infos = [await self._info_of(peer) for peer in list(self._handlers_by_peer) if peer not in self._killed]
        return majority(
            ModelRecord(version=info.version, model=info.model, num_blocks=info.num_blocks) for info in infos if info
        )

    async def _info_of(self, peer: str) -> ServerInfo | None:
        try:
            channel = await self.open(peer, "rpc_info", timeout_s=5.0)
            await channel.send(InfoRequest())
            info = await channel.receive(timeout_s=5.0)
            await channel.close()
        except TransportError:
            return self._announced.get(peer)
        if isinstance(info, ServerInfo):
            self._announced[peer] = info
            return info
        return None

    async def kill(self, peer: str) -> None:
        """Makes a peer vanish: its streams break, its handlers are cancelled, it cannot be reached."""
        self._killed.add(peer)
        await self._end([task for task, (ends, _) in self._live.items() if peer in ends])

    def revive(self, peer: str) -> None:
        """Makes a killed peer reachable again."""
        self._killed.discard(peer)

    async def close(self) -> None:
        """Breaks all channels and ends all handlers. Idempotent."""
        # Handlers that end may be about to open channels to others.
        while self._live:
            await self._end(list(self._live))

    async def _end(self, tasks: Collection[asyncio.Task[None]]) -> None:
        # Noted first: one that ends meanwhile is no longer listed.
        for task, channel in [(task, self._live[task][1]) for task in tasks]:
            await channel.finish(is_broken=True)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Peer:
    """A peer's end of a local transport."""

    def __init__(self, transport: LocalTransport, peer: str) -> None:
        self._transport = transport
        self._peer = peer

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        return await self._transport._open(self._peer, peer, rpc, timeout_s)


async def _run(handler: Handler, channel: LocalChannel) -> None:
    try:
        await handler(channel)
    except TransportError as exc:
        log.debug("handler ended by its stream: %s", exc)
    except Exception as exc:
        log.exception("handler failed")
        if not channel.is_closed:
            await channel.send(Failure(kind="internal", message=one_line(exc, with_kind=True)))
    finally:
        await channel.close()


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Faults of a line; probabilities are per message, in both directions."""

    drop: float = 0.0
    """Probability that a message is lost."""
    delay_s: float = 0.0
    """Longest delay of a message; delays are uniform between 0 and this."""
    corrupt: float = 0.0
    """Probability that one bit of a message is flipped."""
    break_after: int | None = None
    """Messages after which each channel breaks."""
    refuse: float = 0.0
    """Probability that a channel cannot be opened."""

    def __post_init__(self) -> None:
        for name in ("drop", "corrupt", "refuse"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must be a probability between 0 and 1, got {getattr(self, name)!r}")


class FaultyTransport:
    """Adds faults to another transport; the same seed gives the same faults in the same order.

    Args:
        inner: Transport that carries the messages.
        faults: Faults and their probabilities.
        seed: Seed of the faults.
        peers: Peers whose lines are faulty. None: all.
    """

    def __init__(
        self, inner: Transport, faults: Faults, *, seed: int = 0, peers: Collection[str] | None = None
    ) -> None:
        self._inner = inner
        self._faults = faults
        self._dice = random.Random(seed)
        self._peers = peers

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        """Opens a faulty channel; see `Transport`."""
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
        return decode(frame)  # a bit of structure: ProtocolError; any other: a changed number
