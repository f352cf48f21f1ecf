"""Options by which a client joins a swarm, the same for all commands that do."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from swarm_plugins.cli.support.config_options import Given, options_of, parsed
from swarm_plugins.errors import ConfigError
from swarm_plugins.transport.config import NodeConfig

if TYPE_CHECKING:
    from swarm_plugins.backbone.context import SwarmSettings


JOINING = ("initial_peers", "discovery", "secret_file")
"""Settings of a node that say how it joins a swarm."""
client_options = options_of(NodeConfig, only=(*JOINING, "identity"))


def client_node(given: Given, *, without: Collection[str] = (), advice: str = "") -> NodeConfig:
    """Returns the settings of a client's node from what is typed.

    Args:
        given: What is typed.
        without: Fields to leave out.
        advice: What else helps if there is no address.

    Raises:
        ConfigError: If there is no address of a swarm, or an address or a file is wrong.
    """
    fields = {name: value for name, value in parsed(NodeConfig, given).items() if name not in without}
    node = NodeConfig(**fields, host_maddrs=())
    if not node.initial_peers and "initial_peers" not in without:
        raise ConfigError(
            "no address of the swarm: give --initial-peers ADDRESS as `swarm serve` prints it, "
            f"or set SWARM_INITIAL_PEERS{advice}"
        )
    node.check_files()
    return node


def swarm_of(node: NodeConfig) -> SwarmSettings:
    """Returns the swarm that a client's node joins, as models are loaded from it."""
    from swarm_plugins.backbone.context import SwarmSettings
    from swarm_plugins.client.config import SwarmConfig

    config = SwarmConfig(discovery=node.discovery, secret_file=node.secret_file, identity=node.identity)
    return SwarmSettings(initial_peers=node.initial_peers, config=config)
