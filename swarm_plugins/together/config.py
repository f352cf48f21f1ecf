"""Settings of a run that is trained together."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from swarm_plugins.errors import ConfigError
from swarm_plugins.transport.config import NodeConfig
from swarm_plugins.transport.run_messages import MAX_RUN_PEERS

_AGREED = ("outer_lr", "outer_momentum", "max_norm_ratio", "straggler_s", "dead_s")
_FORMER_RULES = "alternate_lora=False, aggregation=mean"
"""Rules that once were settings, so that peers of earlier versions with their defaults can take part."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a run in which several Trainers improve one adapter (DiLoCo, arXiv 2311.08105).

    All peers of a run must agree on ``outer_lr``, ``outer_momentum``, ``max_norm_ratio``, ``straggler_s`` and
    ``dead_s``.
    """

    steps_per_round: int = 50
    """Local optimizer steps after which a peer closes a round (``H`` in DiLoCo). Slower peers then contribute what they
    have, once they have made a quarter of their own steps."""

    outer_lr: float = 0.7
    """Learning rate of the outer step, with the mean of all updates as its gradient."""

    outer_momentum: float = 0.5
    """Nesterov momentum of the outer step. DiLoCo has 0.9 for hundreds of rounds; runs of tens of rounds overshoot
    with that."""

    max_norm_ratio: float = 2.0
    """Updates are scaled down to this many times the median norm of the round."""

    straggler_s: float = 60.0
    """How long the round waits for other peers' updates after the first one."""

    poll_s: float = 1.0
    """How often peers tell each other where they are."""

    dead_s: float = 10.0
    """Peers that have not answered for so long are not waited for."""

    transfer_s: float = 600.0
    """Longest time in which an update or the shared state may arrive."""

    max_peers: int = 32
    """Most peers; further ones are refused. Each keeps the updates of all peers in memory."""

    allowed_peers: tuple[str, ...] | None = None
    """Ids of the only peers that may take part. None: everyone who knows the run and its secret."""

    secret_file: Path | None = None
    """File with a secret that all peers of the run share. None: everyone who knows the ``run_id`` may take part."""

    identity: Path | None = None
    """Key file of this peer's id in the run, created if it is missing. None: a new id each time."""

    host_maddrs: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    """Addresses on which other peers reach this one: ``/ip4/0.0.0.0/tcp/PORT`` for other machines."""

    announce_maddrs: tuple[str, ...] = ()
    """Addresses to announce instead, such as a router's."""

    relays: tuple[str, ...] = ()
    """Addresses of relays, for a machine that cannot be reached."""

    def __post_init__(self) -> None:
        for name in ("straggler_s", "poll_s", "dead_s", "transfer_s", "max_norm_ratio", "outer_lr"):
            _check_number(name, getattr(self, name), 0.0, math.inf)
        if self.dead_s < 3 * self.poll_s:
            raise ConfigError(
                f"dead_s={self.dead_s} is too short for poll_s={self.poll_s}: living peers would count as lost; make "
                "dead_s three times as long or more"
            )
        if not (isinstance(self.outer_momentum, int | float) and 0 <= self.outer_momentum < 1):
            raise ConfigError(f"outer_momentum must be at least 0 and below 1, got {self.outer_momentum!r}")
        if type(self.steps_per_round) is not int or self.steps_per_round < 1:
            raise ConfigError(f"steps_per_round must be a whole number, 1 or more; got {self.steps_per_round!r}")
        if type(self.max_peers) is not int or not 1 <= self.max_peers <= MAX_RUN_PEERS:
            raise ConfigError(f"max_peers must be a whole number from 1 to {MAX_RUN_PEERS}, got {self.max_peers!r}")
        for name in ("allowed_peers", "host_maddrs", "announce_maddrs", "relays"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        for name in ("secret_file", "identity"):
            path = getattr(self, name)
            object.__setattr__(self, name, None if path is None else Path(path))
        self.node(()).check_files()

    @property
    def rules(self) -> str:
        """What peers must agree on, for people; the text is compared as a whole."""
        agreed = (f"{name}={float(getattr(self, name))}" for name in _AGREED)
        return ", ".join((_FORMER_RULES, *agreed))

    def node(self, initial_peers: tuple[str, ...], swarm_secret: Path | None = None) -> NodeConfig:
        """Returns the settings of the node by which other peers reach this one."""
        return NodeConfig(
            initial_peers=initial_peers,
            host_maddrs=self.host_maddrs,
            announce_maddrs=self.announce_maddrs,
            relays=self.relays,
            identity_path=self.identity,
            secret_file=swarm_secret,
        )


def _check_number(name: str, value: object, above: float, below: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < below:
        raise ConfigError(f"{name} must be a finite number above {above:g}, got {value!r}")


def _texts(name: str, given: object) -> tuple[str, ...] | None:
    """Returns strings; a YAML file gives them in a list."""
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Collection) or not all(isinstance(one, str) for one in given):
        raise ConfigError(f"{name} must be a list of strings, got {given!r}")
    return tuple(given)
