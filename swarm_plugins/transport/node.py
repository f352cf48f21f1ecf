"""A peer of the swarm: identity, libp2p daemon, DHT and streams on the running event loop."""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from swarm_plugins.errors import ConfigError, RemoteError, TransportError
from swarm_plugins.ledger import Ledger
from swarm_plugins.transport import limits
from swarm_plugins.transport.admission.gate import PROOF_PROTOCOL, Gate, StrangerError, load_secret
from swarm_plugins.transport.channel import Channel, Handler
from swarm_plugins.transport.config import NodeConfig
from swarm_plugins.transport.counts import StreamCounts
from swarm_plugins.transport.daemon.memory import watch_memory
from swarm_plugins.transport.daemon.process import Daemon, start_daemon
from swarm_plugins.transport.dht import SwarmDHT
from swarm_plugins.transport.guards import install_guards
from swarm_plugins.transport.identity import Identity, IdentityFile
from swarm_plugins.transport.p2p_channel import Acceptor, open_channel, open_stream, protocol_name
from swarm_plugins.transport.reach.addresses import peer_id_in, with_port
from swarm_plugins.transport.reach.relays import keep_places, take_places
from swarm_plugins.transport.reach.static import StaticPeers, ask_info
from swarm_plugins.transport.records import ModelInfo
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.transport.stream import FrameStream

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_REASON_S = 3.0
_NOT_RUNNING = "this node is not running: call start() first, and nothing after close()"


class SwarmNode:
    """A peer of the swarm; a `Transport` and a `Directory` (see `channel`).

    Call all methods on the event loop that ran ``start``. When the libp2p daemon dies, every waiting and later call
    raises `TransportError` at once; the node cannot be revived: start its `successor`, serve and announce again.

    Args:
        config: Settings. None: the defaults.
        known_peers: Addresses of further peers to call; unlike without the initial ones, it starts if none answers.
        ledger: Counts what peers' requests hold, also while they are worked on. None: `MAX_RECEIVING_BYTES`.
        counts: Counts on, over the streams of this node. None: from 0.
    """

    def __init__(
        self,
        config: NodeConfig | None = None,
        *,
        known_peers: tuple[str, ...] = (),
        ledger: Ledger | None = None,
        counts: StreamCounts | None = None,
    ) -> None:
        self._config = config or NodeConfig()
        self._known = known_peers
        self.counts = counts or StreamCounts()
        """What all streams have carried so far; a successor counts on."""
        # A client chooses whom it asks: answers of one server may fill all of it.
        self._answers = Ledger(limits.MAX_RECEIVING_BYTES, max_peer_share=1.0)
        self._ledger = ledger or Ledger(limits.MAX_RECEIVING_BYTES)
        self._gate: Gate | None = None
        self._gate_before: Gate | None = None
        self._acceptor = Acceptor(self._ledger, self.counts, lambda peer: _started(self._gate).refusal(peer))
        self._identity: IdentityFile | None = None
        self._listens: tuple[str, ...] = ()
        self._daemon: Daemon | None = None
        self._dht: SwarmDHT | StaticPeers | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._opened: weakref.WeakKeyDictionary[FrameStream, str] = weakref.WeakKeyDictionary()
        """The rpc of each stream that this node has opened."""

    async def start(self) -> None:
        """Starts the daemon and joins the swarm.

        Raises:
            ConfigError: If an address or the identity cannot be used.
            TransportError: If no initial peer can be reached, or the daemon does not start.
        """
        if self._daemon is not None:
            raise ConfigError("this node has been started already: start its successor, or another node")
        install_guards()
        config = self._config
        secret = None if config.secret_file is None else load_secret(config.secret_file)
        try:
            if self._identity is None:
                self._identity = IdentityFile.take(self._config.identity)
            self._daemon = await start_daemon(self._config, self._identity)
            self._keep(watch_memory(self._daemon, self._in_use), "watch the libp2p daemon's memory")
            opening = functools.partial(open_stream, self._daemon.socket_path)
            self._gate = Gate(self._daemon.peer_id, opening, allowed=config.allowed_peers, secret=secret)
            if self._gate_before is not None:
                self._gate.take_over(self._gate_before)
                self._gate_before = None
            if secret is not None and not config.is_client:
                await self._register(PROOF_PROTOCOL, self._gate.answer)
            if config.discovery == "static":
                self._dht = StaticPeers(self._daemon, self, config.initial_peers, self._known)
            else:
                self._dht = SwarmDHT(self._daemon, self._identity.identity, config, self._known, self._gate)
            await self._join(self._dht)
            await take_places(self._daemon, config.relays, opening)
            self._keep(keep_places(self._daemon, config.relays, opening), "keep places at relays")
            self._listens = await self.addresses()
        except BaseException:
            await self.close()
            raise
        log.info("joined as %s", self._daemon.peer_id)

    def _keep(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._keepers.append(asyncio.create_task(work, name=name))

    async def _join(self, member: SwarmDHT | StaticPeers) -> None:
        try:
            await member.start()
        except TransportError as error:
            refusal = await self._refusal() if self._daemon is not None and self._daemon.is_alive else None
            raise (refusal or error) from error.__cause__

    async def _refusal(self) -> TransportError | None:
        """Returns why the first initial peer does not let this node in, if it says so."""
        for address in self._config.initial_peers[:1]:
            try:
                await ask_info(self, peer_id_in(address), timeout_s=_REASON_S)
            except (RemoteError, StrangerError) as reason:
                return reason
            except TransportError as error:
                log.debug("asked %s in vain: %s", address, error)
        return None

    def successor(self, *, same_ports: bool = True) -> SwarmNode:
        """Returns a node to start in place of this one, which may have died but is not closed yet.

        It has the same key and, if possible, the same ports. It calls all peers that this one has known, and starts
        even if none answers, so that a swarm whose first node died does not fall apart.

        Raises:
            TransportError: If this node has not been started, or is closed.
            ConfigError: If the key cannot be written for the new daemon.
        """
        config = self._config
        known = () if self._dht is None else self._dht.known_peers
        hosts = tuple(with_port(host, self._listens) for host in config.host_maddrs) if same_ports else None
        node = SwarmNode(
            replace(config, initial_peers=(), host_maddrs=hosts or config.host_maddrs),
            known_peers=tuple(dict.fromkeys((*config.initial_peers, *self._known, *known))),
            ledger=self._ledger,
            counts=self.counts,
        )
        node._identity = _started(self._identity).share()
        node._gate_before = self._gate
        return node

    @property
    def identity(self) -> Identity:
        """The key pair behind the peer id.

        Raises:
            TransportError: If this node has not been started, or is closed.
        """
        return _started(self._identity).identity

    async def close(self) -> None:
        """Ends all streams, leaves the DHT and stops the daemon. Idempotent."""
        await self._acceptor.close()
        for channel in list(self._opened):
            await channel.close()
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        dht, self._dht = self._dht, None
        daemon, self._daemon = self._daemon, None
        identity, self._identity = self._identity, None
        try:
            if isinstance(dht, SwarmDHT):
                await dht.close()
        finally:
            if daemon is not None:
                await daemon.stop()
            if identity is not None:
                identity.give_back()

    async def __aenter__(self) -> SwarmNode:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def peer_id(self) -> str:
        return _started(self._daemon).peer_id

    @property
    def is_alive(self) -> bool:
        """Whether the node is started and its daemon is running."""
        return self._daemon is not None and self._daemon.is_alive

    @property
    def is_alone(self) -> bool:
        """Whether none of the peers that this node knew answers any more."""
        return self._dht is not None and self._dht.is_alone

    def _in_use(self) -> set[str]:
        """Returns the peers with open streams, in either direction, and the relays."""
        opened = {stream.remote_peer for stream in self._opened if not stream.is_closed}
        return {*self._acceptor.served, *opened, *map(peer_id_in, self._config.relays)}

    @property
    def num_opened(self) -> int:
        """How many streams carry a session or a request under way. Others are only kept; clients can reopen them."""
        streams = [(stream, rpc) for stream, rpc in self._opened.items() if not stream.is_over]
        return sum(rpc == "rpc_session" or not stream.is_answered for stream, rpc in streams)

    @property
    def num_streams(self) -> int:
        return self._acceptor.num_streams

    async def wait_dead(self) -> None:
        await _started(self._daemon).wait_dead()

    async def addresses(self) -> tuple[str, ...]:
        """Returns the addresses at which others can reach this node; empty of a client."""
        daemon = _started(self._daemon)
        if self._config.is_client:
            return ()
        visible = await daemon.race(
            daemon.p2p.get_visible_maddrs(latest=True), timeout_s=10.0, what="asking the libp2p daemon"
        )
        return tuple(str(address) for address in visible)

    async def serve(self, handlers: Mapping[str, Handler]) -> None:
        """Calls a handler for each incoming stream of its rpc.

        Raises:
            ConfigError: If an rpc is unknown, or the node is a client.
        """
        if self._config.is_client:
            raise ConfigError("a client cannot serve: give its node host_maddrs")
        for rpc, handler in handlers.items():
            accept = functools.partial(self._acceptor.accept, rpc, handler)
            await self._register(protocol_name(rpc), accept)

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        """Opens a channel; see [`Transport`][swarm_plugins.transport.channel.Transport]."""
        daemon = _started(self._daemon)
        daemon.check_alive()
        await _started(self._gate).enter(peer, timeout_s)
        channel = await open_channel(
            daemon.socket_path,
            peer,
            protocol_name(rpc),
            timeout_s=timeout_s,
            ledger=self._answers,
            counts=self.counts,
        )
        self._opened[channel] = rpc
        return channel

    @property
    def member(self) -> SwarmDHT | StaticPeers:
        """How this node finds others; TransportError if it does not run."""
        if self._dht is None:
            raise TransportError(_NOT_RUNNING)
        return self._dht

    async def _register(self, protocol: str, handler: Callable[..., Awaitable[None]]) -> None:
        daemon = _started(self._daemon)
        register = daemon.p2p.add_binary_stream_handler(protocol, handler)
        await daemon.race(register, timeout_s=10.0, what=f"registering {protocol}")

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        """Returns the servers of a model version; see [`Directory`][swarm_plugins.transport.channel.Directory]."""
        return await self.member.servers(version, num_blocks)

    async def models(self) -> dict[str, ModelInfo]:
        return await self.member.models()

    async def announce(self, info: ServerInfo, ttl_s: float) -> None:
        """Announces in the DHT for ``ttl_s`` seconds that this node serves ``info``; repeat it in time.

        Raises:
            ConfigError: If ``info`` or ``ttl_s`` is out of range, or the node is a client.
            TransportError: If no node of the DHT accepts it.
        """
        await self.member.announce(info, ttl_s)

    async def retract(self) -> None:
        await self.member.retract()


def _started(part: _T | None) -> _T:
    if part is None:
        raise TransportError(_NOT_RUNNING)
    return part
