"""Peers, device and precision of the strategies for Trainer and Fabric."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swarm_plugins.backbone.context import OnThisMachine, Place, SwarmSettings, active_place, find_place
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.strategy.swarm.processes import DEFAULT_TIMEOUT_S, Processes
from swarm_plugins.together.config import RunConfig

if TYPE_CHECKING:
    from swarm_plugins.together.shared_run import SharedRun

_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


class SwarmMember(Processes):
    """Mixed into the strategies; keeps settings, and joins the swarm in `setup_environment`."""

    strategy_name = "swarm"
    place: Place | None = None
    """Where blocks run, once `join` has found it."""
    _connection: Any = None
    shared_run: SharedRun | None = None
    """The run that is trained together, while it is under way."""

    def __init__(
        self,
        initial_peers: Sequence[str] | str | None = None,
        *,
        swarm: SwarmConfig | None = None,
        offload: OffloadConfig | str | None = None,
        run_id: str | None = None,
        run: RunConfig | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__()
        self.initial_peers = initial_peers
        self.swarm = swarm
        self.offload = offload
        self.run_id = run_id or os.environ.get("SWARM_RUN_ID") or None
        self.run = run
        self.timeout_s = timeout_s

    def setup_environment(self) -> None:
        """Meets the other processes and joins the swarm: before the model is built, and not when one is constructed."""
        super().setup_environment()  # type: ignore[misc]  # of Lightning's strategy, mixed in after this class
        self.set_world_ranks()
        self.open_group()
        with self.together():
            self.join()

    def _configure_launcher(self) -> None:
        if self.is_distributed and self.run_id is not None:
            raise ConfigError(
                f"run {self.run_id!r} has one process of each peer, got {self.world_size}: the processes of one user "
                "would count as peers and average twice; pass devices=1, or leave out run_id"
            )
        super()._configure_launcher()

    def join(self) -> None:
        """Joins the swarm if its peers are known by now; a model loaded later may name its own.

        Raises:
            ConfigError: If an address or ``offload`` is malformed, or two places are given.
            TransportError: If the swarm cannot be joined.
        """
        self.place = find_place(self.initial_peers, self.swarm, self.offload)
        if isinstance(self.place, OnThisMachine):
            if self.run_id is not None:
                raise ConfigError(
                    f"run {self.run_id!r} is joined through a swarm, but blocks run on this machine (offload): leave "
                    "out run_id, or offload"
                )
            self.place = dataclasses.replace(self.place, device=str(self.root_device))
        elif self.place is not None:
            # Held as long as this strategy: models that are loaded through the same peers share it.
            self._connection = self.place.connection().start()

    @property
    def settings(self) -> SwarmSettings | None:
        """The swarm, if blocks run on one that is known by now."""
        return self.place if isinstance(self.place, SwarmSettings) else None

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which newly loaded models find their place."""
        return contextlib.nullcontext() if self.place is None else active_place(self.place)

    def take_precision(self, plugin: Any) -> None:
        """Checks Lightning's precision plugin.

        Raises:
            ConfigError: If it cannot work with remote blocks.
        """
        if "bitsandbytes" in type(plugin).__name__.lower():
            raise ConfigError(
                f"precision plugin {type(plugin).__name__} cannot work with strategy 'swarm': it quantizes weights, "
                "but the blocks' weights are on servers ('swarm serve --quantization' does it there); "
                f"use precision {' or '.join(map(repr, _PRECISIONS))}"
            )
        name = getattr(plugin, "precision", None)
        if plugin is not None and name not in _PRECISIONS:
            raise ConfigError(
                f"precision {name!r} cannot work with strategy 'swarm': hidden states or their gradients would "
                f"overflow or lose their type on the way; use {' or '.join(map(repr, _PRECISIONS))}"
            )


# Python names the function in its errors about arguments, and users know only the strategies.
SwarmMember.__init__.__qualname__ = "SwarmStrategy.__init__"
