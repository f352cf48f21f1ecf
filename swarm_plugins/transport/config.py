"""Settings of a node. Imports nothing heavy: commands check them before anything else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swarm_plugins.errors import ConfigError
from swarm_plugins.transport.admission.gate import load_secret
from swarm_plugins.transport.identity import check_identity
from swarm_plugins.transport.reach.addresses import check_address, check_peer_ids, peer_id_in

DISCOVERIES = ("dht", "static")


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Settings of a [`SwarmNode`][swarm_plugins.transport.node.SwarmNode]. By default it joins nothing."""

    initial_peers: tuple[str, ...] = ()
    """Addresses of peers to join through, each with ``/p2p/`` and the peer's id. Empty: start a new swarm."""

    known_peers: tuple[str, ...] = ()
    """Addresses of further peers to call. Unlike with ``initial_peers``, the node starts if none of them answers."""

    host_maddrs: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    """Addresses to listen on; port 0 picks a free one. ``/ip4/0.0.0.0/tcp/PORT`` listens on all interfaces."""

    announce_maddrs: tuple[str, ...] = ()
    """Addresses to announce instead, such as those of a router that forwards to this machine."""

    identity_path: Path | None = None
    """File with the private key that makes the peer id, created if missing. None: a new id each time."""

    discovery: Literal["dht", "static"] = "dht"
    """How servers are found. ``static``: the initial peers are the servers; nothing is announced or looked up."""

    secret_file: Path | None = None
    """File with the secret of a private swarm: this node talks only with peers that know it too. None: with any."""

    allowed_peers: tuple[str, ...] | None = None
    """Ids of the only peers to talk with, in either direction. None: any."""

    client_mode: bool = False
    """Only send requests: no listening socket, no entry in the DHT's routing tables."""

    relays: tuple[str, ...] = ()
    """Addresses of relays, each with ``/p2p/`` and the relay's id, to be reached through. ``host_maddrs`` may then be
    empty, so that the node listens nowhere."""

    use_auto_relay: bool = False
    """Become reachable through relays, for servers behind a firewall."""

    nat_port_map: bool = True
    """Ask the router (UPnP) to forward the port, unless the node listens on loopback addresses only."""

    start_timeout_s: float = 60.0
    """Longest start of the libp2p daemon; a second attempt follows."""

    dht_timeout_s: float = 20.0
    """Longest look-up or announcement."""

    def __post_init__(self) -> None:
        if self.discovery not in DISCOVERIES:
            raise ConfigError(f"unknown discovery {self.discovery!r}; known: {', '.join(DISCOVERIES)}")
        check_peer_ids(self.allowed_peers)
        for name in ("initial_peers", "known_peers", "host_maddrs", "announce_maddrs", "relays"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} must be a sequence of addresses, got one string: put it in a list")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for address in (*self.host_maddrs, *self.announce_maddrs):
            check_address(address)
        for address in self.announce_maddrs:
            if "/tcp/0" in f"{address}/" or "/udp/0/" in f"{address}/":
                raise ConfigError(f"cannot announce {address!r}: port 0 means any; give the real port")
        for address in (*self.initial_peers, *self.known_peers, *self.relays):
            peer_id_in(address)
        if not self.client_mode and not self.host_maddrs and not self.relays:
            raise ConfigError(
                "host_maddrs is empty: a server needs an address to listen on, such as /ip4/0.0.0.0/tcp/0"
            )
        if not (self.start_timeout_s > 0 and self.dht_timeout_s > 0):
            raise ConfigError(
                f"timeouts must be positive, got start {self.start_timeout_s} s and DHT {self.dht_timeout_s} s"
            )

    @property
    def announced(self) -> tuple[str, ...]:
        """Addresses to announce instead of those listened on."""
        return (*self.announce_maddrs, *(f"{relay}/p2p-circuit" for relay in self.relays))

    @property
    def is_loopback_only(self) -> bool:
        """Whether the node can be reached from this machine only."""
        return all(address.startswith(("/ip4/127.", "/ip6/::1/")) for address in self.host_maddrs)

    def check_files(self) -> None:
        """Reads the secret and the identity, as the node will when it starts.

        Raises:
            ConfigError: If a file cannot be used.
        """
        if self.secret_file is not None:
            load_secret(self.secret_file)
        if self.identity_path is not None:
            check_identity(self.identity_path)
