"""Finds servers without a DHT: the addresses that a node is given are the servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from swarm_plugins.errors import ConfigError, ProtocolError, RemoteError, TransportError, printable
from swarm_plugins.transport.channel import Opener
from swarm_plugins.transport.daemon.process import Daemon
from swarm_plugins.transport.messages import Failure
from swarm_plugins.transport.reach.addresses import peer_id_in, place_in
from swarm_plugins.transport.reach.neighbors import connect_peer
from swarm_plugins.transport.records import ModelInfo, ModelRecord, check_server_info, majority
from swarm_plugins.transport.server_info import InfoRequest, ServerInfo

log = logging.getLogger(__name__)

_ANSWER_S = 5.0


async def ask_info(network: Opener, peer: str, *, timeout_s: float) -> ServerInfo:
    """Asks a server what it serves.

    Raises:
        TransportError: If it does not answer, or not with possible numbers and names.
    """
    channel = await network.open(peer, "rpc_info", timeout_s=timeout_s)
    try:
        await channel.send(InfoRequest())
        answer = await channel.receive(timeout_s=timeout_s)
    finally:
        await channel.close()
    if isinstance(answer, Failure):
        raise RemoteError(f"server {peer} answered {answer.kind}: {printable(answer.message)}")
    if not isinstance(answer, ServerInfo):
        raise ProtocolError(f"peer {peer} answered with {type(answer).__name__}, expected ServerInfo")
    check_server_info(answer)
    return answer


class StaticPeers:
    """A node's view of a swarm without a DHT: it asks each of its initial peers, and announces nothing.

    Args:
        daemon: The node's daemon.
        network: The node.
        initial_peers: Addresses of the peers.
        known_peers: Addresses of others, of which none need answer.
    """

    def __init__(
        self, daemon: Daemon, network: Opener, initial_peers: Sequence[str], known_peers: Sequence[str]
    ) -> None:
        self._daemon = daemon
        self._network = network
        self._places = {peer_id_in(one): place_in(one) for one in (*initial_peers, *known_peers)}
        self._must_answer = initial_peers
        self._reached: set[str] = set()

    async def start(self) -> None:
        """Connects to the peers; raises TransportError if there are some and none can be reached."""
        await asyncio.gather(*(self._connect(peer) for peer in self._places))
        if self._must_answer and not self._reached:
            raise TransportError(
                f"none of the initial peers can be reached: {', '.join(self._must_answer)}; check that a server runs "
                "there, and its address, port and firewall"
            )

    @property
    def is_alone(self) -> bool:
        """Whether none of the peers could be reached the last time."""
        return bool(self._places) and not self._reached

    @property
    def known_peers(self) -> tuple[str, ...]:
        return tuple(f"{place}/p2p/{peer}" for peer, place in self._places.items())

    async def announce(self, info: ServerInfo, ttl_s: float) -> None:
        """Does nothing: clients have this node's address and ask it."""

    async def retract(self) -> None:
        """Does nothing."""

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        infos = await self._infos()
        found = {peer: info.of(version) for peer, info in infos.items() if info.num_blocks == num_blocks}
        return {peer: info for peer, info in found.items() if info is not None}

    async def models(self) -> dict[str, ModelInfo]:
        """Returns the model versions of the servers that answer; see `majority`."""
        return majority(
            ModelRecord(version=info.version, model=info.model, num_blocks=info.num_blocks)
            for info in (await self._infos()).values()
        )

    async def check_clock(self) -> None:
        """Does nothing: nothing that a clock could spoil is announced."""

    async def announce_run(self, run: bytes, ttl_s: float) -> None:
        """Raises ConfigError: peers of a run find each other in the DHT."""
        raise ConfigError(
            "peers that train together find each other in the swarm's DHT, but this swarm has none "
            "(discovery 'static'): join a swarm with discovery 'dht'"
        )

    async def run_peers(self, run: bytes) -> list[str]:
        """Returns none."""
        return []

    async def _infos(self) -> dict[str, ServerInfo]:
        peers = list(self._places)
        answers = await asyncio.gather(*(self._info(peer) for peer in peers))
        infos = {peer: info for peer, info in zip(peers, answers, strict=True) if isinstance(info, ServerInfo)}
        refusal = next((one for one in answers if isinstance(one, RemoteError)), None)
        if refusal is not None and not infos:
            raise refusal
        return infos

    async def _info(self, peer: str) -> ServerInfo | RemoteError | None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._connect(peer)
                return await ask_info(self._network, peer, timeout_s=_ANSWER_S)
        except RemoteError as exc:
            return exc
        except (TransportError, TimeoutError) as exc:
            log.info("server %s does not answer: %s", peer, exc or f"within {_ANSWER_S:g} s")
            return None

    async def _connect(self, peer: str) -> None:
        work = connect_peer(self._daemon.socket_path, peer, [self._places[peer]])
        try:
            await self._daemon.race(work, timeout_s=_ANSWER_S, what=f"connecting to {peer}")
        except (OSError, asyncio.IncompleteReadError) as exc:  # a TransportError is an OSError
            log.debug("cannot connect to %s: %s", peer, exc)
            self._reached.discard(peer)
        else:
            self._reached.add(peer)
