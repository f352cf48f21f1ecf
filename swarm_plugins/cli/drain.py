"""``swarm drain``: asks a server of one's own to let open sessions end, and then to end itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm_plugins.cli.support.arguments import Discovery, Peers, Secret, split_addresses
from swarm_plugins.cli.support.output import one_sentence_errors
from swarm_plugins.errors import ConfigError


def drain(
    server: Annotated[str, typer.Argument(help="Address of the server, or its peer id.", show_default=False)],
    identity: Annotated[
        Path, typer.Option(help="The server's identity file, which proves that it is yours.", show_default=False)
    ],
    initial_peers: Peers = None,
    discovery: Discovery = "dht",
    secret_file: Secret = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for its answer.")] = 10.0,
) -> None:
    """Let a server's open sessions end, and then the server; new ones go elsewhere at once."""
    with one_sentence_errors("drain"):
        peers = [server] if server.startswith("/") else split_addresses(initial_peers)
        if not peers:
            raise ConfigError(
                f"{server!r} is a peer id: give the server's address instead, or --initial-peers to find it by"
            )
        import asyncio

        from swarm_plugins.transport.identity import load_identity

        owner = load_identity(identity)
        wanted = server.rpartition("/p2p/")[2]
        if owner.peer_id != wanted:
            raise ConfigError(f"{identity} is the identity of {owner.peer_id}, not of {wanted}: give the server's own")
        from swarm_plugins.server.rpc.drain import ask_to_drain
        from swarm_plugins.transport.config import NodeConfig

        config = NodeConfig(
            initial_peers=tuple(peers),
            discovery=discovery,  # type: ignore[arg-type]  # checked there
            secret_file=secret_file,
            client_mode=True,
        )
        accepted = asyncio.run(ask_to_drain(config, owner, timeout_s=timeout))
        typer.echo(
            f"{wanted} drains: {accepted.sessions} sessions are open; it ends when they have, "
            f"{accepted.drain_s:g} s from now at the latest."
        )
