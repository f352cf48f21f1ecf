"""Announces in the DHT what a node serves, and looks up servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import statistics
import time
from collections.abc import Collection, Coroutine, Iterable, Sequence
from typing import Any, TypeVar, cast

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from swarm_plugins.errors import ConfigError, ProtocolError, TransportError
from swarm_plugins.transport.admission.calls import Admission, node_id_of
from swarm_plugins.transport.admission.connection import DHTConnection
from swarm_plugins.transport.admission.gate import Gate
from swarm_plugins.transport.admission.serializer import TypedSerializer
from swarm_plugins.transport.admission.storage import BoundedStorage
from swarm_plugins.transport.config import NodeConfig
from swarm_plugins.transport.daemon.process import Daemon
from swarm_plugins.transport.identity import Identity
from swarm_plugins.transport.loop import LoopThread
from swarm_plugins.transport.reach.addresses import peer_id_in
from swarm_plugins.transport.reach.neighbors import Neighbors
from swarm_plugins.transport.records import (
    MAX_TTL_S,
    GoneRecord,
    ModelInfo,
    ModelRecord,
    Record,
    RunRecord,
    ServerRecord,
    check_server_info,
    key_id,
    majority,
    model_keys,
    open_record,
    own_model_key,
    own_server_key,
    run_key,
    server_keys,
    sign_record,
)
from swarm_plugins.transport.server_info import ServerInfo

log = logging.getLogger(__name__)

_T = TypeVar("_T")

Item = tuple[str, str, bytes, float]
"""Key, owner, content and expiration of a record."""

_CROWD = 64
"""As many servers as a client asks at once."""
_MAX_INITIAL = 8
_WORKERS = 16
"""Nodes asked at the same time in a look-up."""

_BOOTSTRAP_TIMEOUT_S = 30.0
_FIRST_ANSWER_S = 12.0
"""Timeout of the first call to an initial peer, which calls back and may be busy loading its blocks."""
_ANSWER_S = 3.0
"""Timeout of every later call; losing a few of these does no harm."""
_LEAVE_TIMEOUT_S = 3.0
_CALL_TIMEOUT_S = 20.0
"""Longest look-up or announcement."""
_TOMBSTONE_S = 60.0
_MOST_AHEAD_S = 30.0
"""Records of a run's peers live for two minutes."""
# Two records of one owner under one key differ in their expiration.
_LATER_S = 0.001


class SwarmDHT:
    """A node's membership of the DHT; ``identity`` signs its announcements.

    The DHT runs in a thread of its own: what strangers make it do delays no request of the node's event loop.
    """

    def __init__(
        self, daemon: Daemon, identity: Identity, config: NodeConfig, known_peers: tuple[str, ...], gate: Gate
    ) -> None:
        self._daemon = daemon
        self._identity = identity
        self._config = config
        self._known = known_peers
        self._gate = gate
        self._loop = LoopThread("swarm-dht")
        self._leaving = contextlib.AsyncExitStack()
        self._dht: DHTNode
        self._neighbors: Neighbors
        self._versions: frozenset[str] = frozenset()
        """What is announced now: the server's own version and others whose blocks it has."""
        self._expirations: dict[str, float] = {}

    async def start(self) -> None:
        """Joins the DHT; raises TransportError if no initial peer is a member of it."""
        self._loop.start()
        self._leaving.push_async_callback(self._loop.aclose)
        try:
            await self._there(self._join(), "joining the DHT", timeout_s=_BOOTSTRAP_TIMEOUT_S)
        except RuntimeError as exc:
            raise TransportError(
                f"initial peers {', '.join(self._config.initial_peers)} do not answer as members of a swarm: "
                "give the address of a running server, with its current peer id; a private swarm needs its "
                "--secret-file, one without a DHT --discovery static"
            ) from exc

    async def _join(self) -> None:
        connection = await DHTConnection.open(self._daemon.socket_path, self._gate)
        self._leaving.callback(self._loop.call_soon, connection.close)
        dht = self._dht = await DHTNode.create(
            p2p=connection,
            initial_peers=[f"/p2p/{peer_id_in(address)}" for address in self._config.initial_peers] or None,
            client_mode=self._config.is_client,
            node_id=node_id_of(connection.peer_id),
            record_validator=Admission(connection.origins),
            wait_timeout=_FIRST_ANSWER_S,
            # A peer that has stopped delays the others by no more than this.
            bootstrap_timeout=_ANSWER_S,
            # A node that has stopped blocks one worker until its call times out.
            num_workers=_WORKERS,
            # Cached servers are minutes old; every look-up here asks the network.
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            # A wrong clock, or a firewall in front of a server, should warn, not fail.
            strict=False,
        )
        self._leaving.push_async_callback(self._shut_down)
        dht.protocol.wait_timeout = _ANSWER_S
        dht.protocol.storage = BoundedStorage()
        dht.protocol.serializer = TypedSerializer
        dht.protocol.cache.maxsize = 1
        addresses = (*self._config.initial_peers, *self._known)
        self._neighbors = Neighbors(connection, self._daemon.socket_path, dht, addresses)
        if self._known:
            await self._neighbors.call_lost()

    async def close(self) -> None:
        await self._leaving.aclose()

    async def _shut_down(self) -> None:
        if self._daemon.is_alive:  # a dead one never answers
            try:
                await self._there(self._dht.shutdown(), "leaving the DHT", timeout_s=_LEAVE_TIMEOUT_S)
            except TransportError as exc:
                log.debug("left the DHT without notice: %s", exc)

    @property
    def is_alone(self) -> bool:
        """Whether all other nodes that this one knew are lost."""
        return self._neighbors.is_alone

    @property
    def known_peers(self) -> tuple[str, ...]:
        return self._neighbors.addresses

    async def check_clock(self) -> None:
        """Raises ConfigError if this machine's clock differs too much from the median of the initial peers' clocks."""
        protocol = self._dht.protocol

        async def ask(peer: PeerID) -> float | None:
            request = dht_pb2.PingRequest(peer=protocol.node_info, validate=False)
            try:
                answer = await protocol.get_stub(peer).rpc_ping(request, timeout=_ANSWER_S)
            except Exception:  # noqa: BLE001 - hivemind's stubs raise whatever they meet
                return None
            return time.time() - float(answer.dht_time)

        async def ask_all() -> list[float]:
            found = await asyncio.gather(*map(ask, self._initial))
            return [one for one in found if one is not None and math.isfinite(one)]

        ahead_s = statistics.median(await self._there(ask_all(), "asking for the time") or [0.0])
        if abs(ahead_s) > _MOST_AHEAD_S:
            raise ConfigError(
                f"this machine's clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the swarm's "
                f"(at most {_MOST_AHEAD_S:g} s is allowed): peers would take each other's records for expired; set the "
                "clock, and start again"
            )

    async def announce(self, info: ServerInfo, ttl_s: float) -> None:
        """Announces that this node serves ``info``; see `SwarmNode.announce`."""
        if self._config.is_client:
            raise ConfigError("a client cannot announce: give it host_maddrs")
        if not 0 < ttl_s <= MAX_TTL_S:
            raise ConfigError(f"ttl_s must be above 0 and at most {MAX_TTL_S:g}, got {ttl_s}")
        try:
            check_server_info(info)
        except ProtocolError as exc:
            raise ConfigError(f"cannot announce this: {exc}") from exc
        peer = self._daemon.peer_id
        # Also where some are still known: after a partition each part knows itself.
        await self._call_lost()
        model = ModelRecord(version=info.version, model=info.model, num_blocks=info.num_blocks)
        seen = {version: info.of(version) for version in (info.version, *(other for other, _, _ in info.also))}
        wanted: dict[str, Record] = {
            own_server_key(version, peer): ServerRecord(info=one) for version, one in seen.items() if one is not None
        }
        wanted |= {own_model_key(peer): model} | self._gone(self._versions - seen.keys())
        await self._store(wanted, ttl_s)
        await self._note_addresses()
        self._versions = frozenset(seen)

    async def retract(self) -> None:
        """Announces that this node has stopped serving. Idempotent."""
        if not self._versions:
            return
        nothing = ModelRecord(version="", model="", num_blocks=0)
        gone = self._gone(self._versions)
        await self._store(gone | {own_model_key(self._daemon.peer_id): nothing}, _TOMBSTONE_S)
        self._versions = frozenset()

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        """Returns the servers of a model version, by peer id; see `Directory`."""
        keys = server_keys(version)
        found = _servers_in(await self._find(keys), num_blocks)
        is_crowd = len(found) > _CROWD
        if not is_crowd and _is_whole(found.values(), num_blocks):
            return found
        # Any node can make up thousands of servers, or name none. Initial peers were named by this node's user.
        near = _servers_in(await self._find_near(keys), num_blocks)
        if is_crowd and _is_whole(near.values(), num_blocks):
            return near
        others = random.sample(sorted(found), min(len(found), _CROWD))
        return {peer: found[peer] for peer in others} | near

    async def models(self) -> dict[str, ModelInfo]:
        """Returns all announced model versions, by version; see `majority`."""
        found = await self._find_trusted(model_keys())
        return majority(record for _, record in found if isinstance(record, ModelRecord))

    async def announce_run(self, run: bytes, ttl_s: float) -> None:
        """Announces for ``ttl_s`` seconds that this node takes part in a run; repeat it in time.

        Raises:
            TransportError: If no node of the DHT accepts it.
        """
        await self._call_lost()
        await self._store({run_key(run.hex()): RunRecord(run=run.hex())}, ttl_s)

    async def run_peers(self, run: bytes) -> list[str]:
        """Returns the ids of the peers that have announced that they take part in a run."""
        found = await self._find_trusted([run_key(run.hex())])
        return [peer for peer, record in found if isinstance(record, RunRecord)]

    def _gone(self, versions: Iterable[str]) -> dict[str, Record]:
        return {own_server_key(version, self._daemon.peer_id): GoneRecord(version=version) for version in versions}

    async def _there(self, work: Coroutine[Any, Any, _T], what: str, *, timeout_s: float = _CALL_TIMEOUT_S) -> _T:
        """Runs a coroutine in the DHT's thread, within ``timeout_s`` and as long as the daemon lives."""
        return await self._daemon.race(asyncio.wrap_future(self._loop.submit(work)), timeout_s=timeout_s, what=what)

    async def _store(self, wanted: dict[str, Record], ttl_s: float) -> None:
        if max(self._expirations.values(), default=0.0) > time.time() + MAX_TTL_S + 1:
            # The clock was set back. No other node has kept such records, nor would any take what expires later still.
            self._expirations.clear()
            await self._there(self._dht.protocol.storage.forget(self._daemon.peer_id), "forgetting old records")
        for _ in range(2):
            expirations = self._expirations_for(wanted, ttl_s)
            if await self._try_store(wanted, expirations):
                return
            # One node that refuses (wrong clock, full, hostile) hides that others have accepted, and a record of this
            # peer's earlier run may outlive the new one: look up what is stored.
            present = await self._own_expirations(wanted)
            if all(present.get(key) == expiration for key, expiration in expirations.items()):
                return
            self._expirations.update(present)
        raise TransportError(
            "the DHT did not store the announcement: check this machine's clock, and that the initial peers still run"
        )

    def _expirations_for(self, keys: Iterable[str], ttl_s: float) -> dict[str, float]:
        # Nodes keep the record that expires last, so each must expire after the one it replaces.
        soonest = time.time() + ttl_s
        return {key: max(soonest, self._expirations.get(key, 0.0) + _LATER_S) for key in keys}

    async def _try_store(self, wanted: dict[str, Record], expirations: dict[str, float]) -> bool:
        dht = self._dht
        keys = list(wanted)
        values = [sign_record(self._identity, key, wanted[key], expirations[key]) for key in keys]
        times = [expirations[key] for key in keys]
        subkeys = [self._daemon.peer_id] * len(keys)
        stored = await self._there(dht.store_many(keys, values, times, subkeys=subkeys), "announcing to the DHT")
        self._expirations.update(expirations)
        if len(dht.protocol.routing_table.peer_id_to_uid) > dht.num_replicas:
            ids = [DHTID.generate(source=key) for key in keys]
            # Others that joined by the same peers trust what these have heard themselves.
            calls = (dht.protocol.call_store(peer, ids, values, times, subkeys) for peer in self._initial)
            await self._there(_all(*calls), "announcing to initial peers")
        return all(stored.values())

    async def _own_expirations(self, keys: Iterable[str]) -> dict[str, float]:
        items = await self._look_up(keys)
        return {key: expiration for key, peer, _, expiration in items if peer == self._daemon.peer_id}

    @property
    def _initial(self) -> list[PeerID]:
        addresses = (*self._config.initial_peers, *self._known)
        return [PeerID.from_base58(peer) for peer in dict.fromkeys(map(peer_id_in, addresses[:_MAX_INITIAL]))]

    async def _find(self, keys: Iterable[str]) -> list[tuple[str, Record]]:
        return await self._opened(await self._look_up(keys))

    async def _find_trusted(self, keys: Sequence[str]) -> list[tuple[str, Record]]:
        """Returns the records under some keys; of a crowd, which anyone can make up, those that are near."""
        found = await self._find(keys)
        return (await self._find_near(keys) or found) if len(found) > _CROWD else found

    async def _find_near(self, keys: Iterable[str]) -> list[tuple[str, Record]]:
        """Returns the records that this node and its initial peers keep themselves."""
        protocol = self._dht.protocol
        names = {DHTID.generate(source=key): key for key in keys}

        async def ask() -> list[Item]:
            answers = await asyncio.gather(*(protocol.call_find(peer, list(names)) for peer in self._initial))
            values = [(name, protocol.storage.get(name)) for name in names]
            values += [(name, value) for answer in answers for name, (value, _) in (answer or {}).items()]
            return [
                (names[name], peer, cast(bytes, TypedSerializer.loads(item.value)), item.expiration_time)
                for name, value in values
                if value is not None and isinstance(value.value, DictionaryDHTValue)
                for peer, item in value.value.items()
            ]

        return await self._opened(await self._there(ask(), "asking initial peers"))

    async def _opened(self, items: Iterable[Item]) -> list[tuple[str, Record]]:
        opened: list[tuple[str, Record]] = []

        async def open_all() -> None:
            for key, peer, blob, expiration in items:
                try:
                    opened.append((peer, open_record(key_id(key), peer, blob, expiration)))
                except ProtocolError as exc:
                    log.debug("dropped a record under %s: %s", key, exc)

        await self._there(open_all(), "checking records")  # thousands of signatures may take a second
        return opened

    async def _look_up(self, keys: Iterable[str]) -> list[Item]:
        """Returns all records under some keys."""
        keys = list(keys)
        if self.is_alone:
            await self._call_lost()
        found = await self._ask(keys)
        if not found and await self._call_lost():
            found = await self._ask(keys)
        await self._note_addresses()
        return found

    async def _note_addresses(self) -> None:
        await self._there(self._neighbors.note_addresses(), "listing peers")

    async def _call_lost(self) -> bool:
        return await self._there(self._neighbors.call_lost(), "calling lost peers")

    async def _ask(self, keys: list[str]) -> list[Item]:
        # Infinity: do not stop at the first node with an answer, which may know only some of the servers.
        async def ask() -> dict[str, Any]:
            self._neighbors.remember()
            return dict(await self._dht.get_many(keys, sufficient_expiration_time=float("inf")))

        found = await self._there(ask(), "asking the DHT")
        return [
            (key, peer, item.value, item.expiration_time)
            for key, result in found.items()
            if result is not None and isinstance(result.value, dict)
            for peer, item in result.value.items()
        ]


def _servers_in(records: Iterable[tuple[str, Record]], num_blocks: int) -> dict[str, ServerInfo]:
    return {
        peer: record.info
        for peer, record in records
        if isinstance(record, ServerRecord) and record.info.num_blocks == num_blocks
    }


def _is_whole(infos: Collection[ServerInfo], num_blocks: int) -> bool:
    """Returns whether some servers hold all blocks, and need no experts of others."""
    held = {block for info in infos if info.experts is None for block in range(info.start, info.end)}
    return len(held) == num_blocks and not any(info.needs for info in infos)


async def _all(*calls: Coroutine[Any, Any, object]) -> None:
    await asyncio.gather(*calls)
