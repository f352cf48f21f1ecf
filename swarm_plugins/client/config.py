"""Settings of a client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from swarm_plugins.errors import ConfigError
from swarm_plugins.transport.config import Discovery, PeerConfig, check_discovery

_CHOICES = {
    "codec": ("none", "float16", "bfloat16", "rotated8", "auto"),
    "verify": ("auto", "on", "off"),
    "push": ("auto", "on", "off"),
}
_THIS_MACHINE = ("/ip4/127.", "/ip6/::1/")
"""Addresses of a swarm that the user runs, as `LocalSwarm` does."""


@dataclass(frozen=True, kw_only=True)
class SwarmConfig(PeerConfig):
    """Settings of a client: deadlines, retries, packing of tensors, choice of servers.

    ``allowed_peers`` are the only servers to use, ``identity`` is for servers that allow some peers only.
    """

    connect_timeout_s: float = 20.0
    """Longest wait for the network to start and for a stream to open."""

    request_timeout_s: float = 120.0
    """Longest wait for the answer to one request."""

    info_timeout_s: float = 5.0
    """Longest wait for a server to say what it serves; slower ones are left out of the plan."""

    refresh_s: float = 30.0
    """Age in seconds above which the client's view of the swarm is refreshed before the next plan."""

    max_retries: int = 8
    """Failed requests that one forward, backward or session step may survive; one more raises. With at least 1, a
    server's first failure does not count while another has not been asked, nor does its first lost stream."""

    min_batch_tokens: int = 256
    """Servers that accept fewer tokens per request are used only for blocks that no other server holds."""

    codec: Literal["none", "float16", "bfloat16", "rotated8", "auto"] = "none"
    """How hidden states and their gradients are packed on the wire. ``none`` keeps every bit, the 16-bit ones halve
    the bytes of float32, ``rotated8`` (8 bits of rotated blocks) quarters them. ``auto``: ``rotated8`` for
    messages of 64 KiB and more with servers some milliseconds away, else ``none``. ``none`` also with servers that do
    not know the codec."""

    micro_batches: Literal["auto"] | int = "auto"
    """Chunks in which the rows of a batch without a cache go through the chain, so that its servers work at the same
    time; at most one for each row. ``auto``: as many as pay, by the times that servers took before."""

    push: Literal["auto", "on", "off"] = "auto"
    """Whether servers hand the steps of a session on to each other. ``auto``: if they are some milliseconds away."""

    discovery: Discovery = "dht"
    """How servers are found: in the DHT that the initial peers belong to, or ``static``: they are the servers."""

    local_fallback: bool = False
    """Whether blocks without a living server run here, from the checkpoint, until the swarm has them again; experts
    stay on disk and are read as needed."""

    local_blocks: tuple[int, int] = (0, 0)
    """How many blocks at the start and at the end of the model run here with their own weights: servers see only
    hidden states from the middle of the model. Someone who knows the model can still read most tokens from those."""

    verify: Literal["auto", "on", "off"] = "auto"
    """Whether answers are spot-checked against the checkpoint. ``auto``: unless only ``allowed_peers`` are used, or the
    swarm is joined by addresses of this machine (``/ip4/127...``) alone."""

    verify_bytes: int = 1 << 30
    """Most bytes of blocks that are kept in memory for checks. Of experts at holders, one is in memory at a time."""

    def wants_checks(self, initial_peers: Sequence[str]) -> bool:
        """Returns whether answers are checked in a swarm that is joined by some addresses; see ``verify``."""
        is_trusted = self.allowed_peers is not None or all(one.startswith(_THIS_MACHINE) for one in initial_peers)
        return self.verify == "on" or (self.verify == "auto" and not is_trusted)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_discovery(self.discovery)
        for name in ("connect_timeout_s", "request_timeout_s", "info_timeout_s", "refresh_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a number of seconds above 0, got {value!r}")
        for name, least in (("max_retries", 0), ("min_batch_tokens", 1), ("verify_bytes", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} must be a whole number, {least} or more; got {value!r}")
        wanted = self.micro_batches
        if wanted != "auto" and (type(wanted) is not int or wanted < 1):
            raise ConfigError(f"invalid micro_batches {wanted!r}: expected 'auto' or a whole number, 1 or more")
        if type(self.local_fallback) is not bool:
            raise ConfigError(f"local_fallback must be True or False, got {self.local_fallback!r}")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")
        object.__setattr__(self, "local_blocks", _checked_local_blocks(self.local_blocks))


def _checked_local_blocks(local: object) -> tuple[int, int]:
    """Returns two counts of blocks; a YAML file gives them in a list."""
    if isinstance(local, (tuple, list)) and [type(count) for count in local] == [int, int] and min(local) >= 0:
        return local[0], local[1]
    raise ConfigError(
        f"invalid local_blocks {local!r}: expected two numbers of 0 or more, the blocks at the start and at the end of "
        "the model that run here, such as (2, 1)"
    )
