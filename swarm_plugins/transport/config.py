"""Settings of a peer, and of its node. Imports nothing heavy: commands check them before anything else."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from swarm_plugins.errors import ConfigError
from swarm_plugins.transport.admission.gate import load_secret
from swarm_plugins.transport.identity import check_identity
from swarm_plugins.transport.reach.addresses import check_address, check_peer_ids, peer_id_in

Discovery = Literal["dht", "static"]


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Who a peer is, and with whom it talks; what clients, servers and the peers of a run have in common."""

    identity: Path | None = None
    """Key file of the peer id, made if it does not exist. None: a new id each time."""

    secret_file: Path | None = None
    """File with the secret of a private swarm, the same for all its peers. None: no secret."""

    allowed_peers: tuple[str, ...] | None = None
    """Ids of the only peers to serve and to call. None: any."""

    def __post_init__(self) -> None:
        for name in ("identity", "secret_file"):
            path = getattr(self, name)
            if path is not None and not isinstance(path, str | Path):
                raise ConfigError(f"{name} must be the path of a file, got {path!r}")
            object.__setattr__(self, name, None if path is None else Path(path))
        if self.allowed_peers is not None:
            self._keep_tuple("allowed_peers", "peer ids, such as ['12D3Koo...']")
            if not self.allowed_peers:
                raise ConfigError("allowed_peers is empty, so no peer could be used; leave it out to allow any")

    def _keep_tuple(self, name: str, expected: str) -> None:
        """Keeps strings in a tuple: a YAML file gives them in a list."""
        given = getattr(self, name)
        is_list = isinstance(given, Collection) and not isinstance(given, str)
        if not is_list or not all(isinstance(one, str) for one in given):
            raise ConfigError(f"invalid {name} {given!r}: expected a list of {expected}")
        object.__setattr__(self, name, tuple(given))

    def node(self, **others: object) -> NodeConfig:
        """Returns the settings of this peer's node: these, and others.

        Raises:
            ConfigError: If an address or a peer id is wrong.
        """
        shared = {field.name: getattr(self, field.name) for field in fields(NodeConfig) if hasattr(self, field.name)}
        return NodeConfig(**(shared | others))

    def check_files(self) -> None:
        """Reads the secret and the identity, as the node will when it starts.

        Raises:
            ConfigError: If a file cannot be used.
        """
        if self.secret_file is not None:
            load_secret(self.secret_file)
        if self.identity is not None:
            check_identity(self.identity)


@dataclass(frozen=True, kw_only=True)
class ReachableConfig(PeerConfig):
    """How others reach a peer."""

    host_maddrs: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    """Addresses to listen on; port 0 picks a free one. By default others on this machine alone reach it:
    ``/ip4/0.0.0.0/tcp/PORT`` listens on all interfaces."""

    announce_maddrs: tuple[str, ...] = ()
    """Addresses to tell others instead, such as those of a router that forwards to this machine."""

    relays: tuple[str, ...] = field(default=(), metadata={"option": "relay"})
    """Addresses of relays (any servers that others can reach) to be reached through. ``host_maddrs`` may then be
    empty, so that the node listens nowhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("host_maddrs", "announce_maddrs", "relays"):
            self._keep_tuple(name, "addresses")
        for address in (*self.host_maddrs, *self.announce_maddrs):
            check_address(address)
        for address in self.announce_maddrs:
            if "/tcp/0" in f"{address}/" or "/udp/0/" in f"{address}/":
                raise ConfigError(f"cannot announce {address!r}: port 0 means any; give the real port")
        for address in self.relays:
            peer_id_in(address)

    @property
    def announced(self) -> tuple[str, ...]:
        """Addresses to announce instead of those listened on."""
        return (*self.announce_maddrs, *(f"{relay}/p2p-circuit" for relay in self.relays))

    @property
    def is_loopback_only(self) -> bool:
        """Whether it listens to this machine only."""
        return all(address.startswith(("/ip4/127.", "/ip6/::1/")) for address in self.host_maddrs)


@dataclass(frozen=True, kw_only=True)
class NodeConfig(ReachableConfig):
    """Settings of a [`SwarmNode`][swarm_plugins.transport.node.SwarmNode]. By default it joins nothing.

    Without ``host_maddrs`` and ``relays`` it is a client: it only sends requests, and enters no routing table.
    """

    initial_peers: tuple[str, ...] = ()
    """Addresses of peers to join by, each with ``/p2p/`` and the peer's id."""

    discovery: Discovery = "dht"
    """How servers are found. ``static``: the initial peers are the servers; nothing is announced or looked up."""

    auto_relay: bool = False
    """Look for a relay if this machine turns out to be unreachable."""

    nat_port_map: bool = True
    """Ask the router (UPnP) to forward the port, unless the node listens on loopback addresses only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_discovery(self.discovery)
        check_peer_ids(self.allowed_peers or ())
        self._keep_tuple("initial_peers", "addresses")
        for address in self.initial_peers:
            peer_id_in(address)

    @property
    def is_client(self) -> bool:
        """Whether others cannot call this node."""
        return not self.host_maddrs and not self.relays


def check_discovery(discovery: object) -> None:
    """Raises ConfigError unless servers can be found that way."""
    if discovery not in get_args(Discovery):
        raise ConfigError(f"unknown discovery {discovery!r}; known: {', '.join(get_args(Discovery))}")
