"""Settings of a run that is trained together."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from swarm_plugins.errors import ConfigError
from swarm_plugins.transport.config import NodeConfig, ReachableConfig
from swarm_plugins.transport.run_messages import MAX_RUN_PEERS

_AGREED = ("outer_lr", "outer_momentum", "max_norm_ratio", "straggler_s", "dead_s")
_RULES = "aggregation=mean, norms=of two thirds, rounds=agreed"
"""Rules that are not settings; peers of earlier versions have others, and are refused."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(ReachableConfig):
    """Settings of a run in which several Trainers improve one adapter (DiLoCo, arXiv 2311.08105).

    All peers of a run must agree on ``outer_lr``, ``outer_momentum``, ``max_norm_ratio``, ``straggler_s``, ``dead_s``
    and ``allowed_peers``, where each may leave out itself. ``identity``, ``secret_file`` and ``allowed_peers`` are
    those of the run, not of the swarm in which its peers find each other.
    """

    steps_per_round: int = 50
    """Local optimizer steps after which a peer closes a round (``H`` in DiLoCo). Slower peers then contribute what they
    have, once they have made a quarter of their own steps or half of ``straggler_s`` is over."""

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.host_maddrs and not self.relays:
            raise ConfigError(
                "host_maddrs is empty: a peer of a run needs an address to listen on, such as /ip4/0.0.0.0/tcp/0, or a "
                "relay"
            )
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
        self.check_files()

    def rules_of(self, peer: str) -> str:
        """Returns, as readable text, the settings that all peers must share; compared as a whole."""
        agreed = [f"{name}={float(getattr(self, name))}" for name in _AGREED]
        if self.allowed_peers is not None:
            # Peers that do not admit the same ones would never close a round together.
            peers = sorted({*self.allowed_peers, peer})
            digest = hashlib.blake2b(" ".join(peers).encode(), digest_size=8).hexdigest()
            agreed.append(f"allowed_peers={len(peers)} peers ({digest})")
        return ", ".join((_RULES, *agreed))

    def node_in(self, initial_peers: tuple[str, ...], swarm_secret: Path | None) -> NodeConfig:
        """Returns the settings of the node by which other peers reach this one in a swarm."""
        return self.node(initial_peers=initial_peers, secret_file=swarm_secret, allowed_peers=None)


def _check_number(name: str, value: object, above: float, below: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < below:
        raise ConfigError(f"{name} must be a finite number above {above:g}, got {value!r}")
