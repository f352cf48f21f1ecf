"""Arguments that several commands take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from swarm_plugins.errors import ConfigError
from swarm_plugins.transport.config import NodeConfig

if TYPE_CHECKING:
    from swarm_plugins.backbone.context import SwarmSettings

Model = Annotated[str, typer.Argument(help="Model: a directory, or its id on the Hub.", show_default=False)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the model on the Hub.")]
Peers = Annotated[
    list[str] | None, typer.Option(help="Address to reach the swarm by; repeatable.", envvar="SWARM_INITIAL_PEERS")
]
Way = Literal["dht", "static"]
"""Of finding servers. With ``parser=str`` the config checks it, and says in one sentence what is allowed."""
Discovery = Annotated[
    Way,
    typer.Option(
        parser=str, metavar="dht|static", help="static: the servers are those at --initial-peers; no DHT is asked."
    ),
]
Secret = Annotated[
    Path | None,
    typer.Option("--secret-file", help="Secret of a private swarm, the same for all its peers.", dir_okay=False),
]
Identity = Annotated[
    Path | None, typer.Option(help="Key file of the peer id, made if it does not exist.", dir_okay=False)
]
Served = Annotated[
    str | None, typer.Argument(help="A version, or part of its name. Default: all that the swarm serves.")
]
Adapter = Annotated[
    str | None, typer.Option(metavar="DIR|REPO[@TAG]", help="Adapter to talk with, from a folder or the Hub.")
]
System = Annotated[str | None, typer.Option(help="Instructions to the model at the start.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")]
Temperature = Annotated[
    float | None,
    typer.Option(min=0.0, help="0: always the likeliest word. Default: the model's own settings; 0 if it has none."),
]


def client_node(
    peers: Sequence[str], discovery: Way, secret_file: Path | None, identity: Path | None = None
) -> NodeConfig:
    """Returns the settings of a client's node; raises ConfigError if an address or a file is wrong."""
    node = NodeConfig(
        initial_peers=tuple(peers),
        discovery=discovery,
        secret_file=secret_file,
        identity=identity,
        host_maddrs=(),
    )
    node.check_files()
    return node


def swarm_of(node: NodeConfig) -> SwarmSettings:
    """Returns the swarm that a client's node joins, as models are loaded from it."""
    from swarm_plugins.backbone.context import SwarmSettings
    from swarm_plugins.client.config import SwarmConfig

    config = SwarmConfig(discovery=node.discovery, secret_file=node.secret_file, identity=node.identity)
    return SwarmSettings(initial_peers=node.initial_peers, config=config)


def split_addresses(entries: Sequence[str] | None) -> list[str]:
    """Splits addresses at commas and blanks."""
    return [address for entry in entries or () for address in entry.replace(",", " ").split()]


def require_addresses(entries: Sequence[str] | None) -> list[str]:
    """Returns the addresses of the swarm; raises ConfigError if there are none."""
    addresses = split_addresses(entries)
    if not addresses:
        raise ConfigError(
            "no address of the swarm: give --initial-peers ADDRESS as `swarm serve` prints it, "
            "or set SWARM_INITIAL_PEERS"
        )
    return addresses
