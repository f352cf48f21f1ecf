"""``swarm status`` shows the servers of each model version; ``swarm drain`` and ``swarm identity`` serve operators."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from swarm_plugins.cli.support.arguments import Served
from swarm_plugins.cli.support.config_options import Given, options_of
from swarm_plugins.cli.support.joining import JOINING, client_node, client_options, swarm_of
from swarm_plugins.cli.support.output import one_sentence_errors
from swarm_plugins.errors import ConfigError, MissingBlocksError
from swarm_plugins.transport.config import NodeConfig

SERVER_TIMEOUT_S = 5.0
_DRAIN_ANSWER_S = 10.0


@client_options
def status(
    given: Given,
    model: Served = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for one server.")] = SERVER_TIMEOUT_S,
    web: Annotated[bool, typer.Option("--web", help="Show it in a browser, live, until Ctrl-C.")] = False,
    host: Annotated[str, typer.Option(help="Address of this machine for --web.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for --web; 0: any free one.")] = 0,
) -> None:
    """Show who serves which blocks, load and free KV cache; what is missing; whom your clients leave out, and why."""
    with one_sentence_errors("status"):
        config = client_node(given)
        if web:
            if json:
                raise ConfigError("--web and --json exclude each other: the page has its JSON at /api/v1/state")
            _watch(config, model, timeout, host, port)
            return
        # What takes seconds to import comes after what may be wrong at once.
        print_status(config, model, "status", timeout_s=timeout, as_json=json)


def print_status(
    config: NodeConfig,
    wanted: str | None,
    command: str,
    *,
    timeout_s: float = SERVER_TIMEOUT_S,
    within_s: float | None = None,
    as_json: bool = False,
) -> None:
    """Surveys a swarm once and prints it.

    Raises:
        MissingBlocksError: If nothing that was asked for is served.
        TransportError: If the swarm cannot be reached.
    """
    import asyncio

    from swarm_plugins.cli.support.status_table import print_tables, table_console
    from swarm_plugins.survey import Joining, survey
    from swarm_plugins.verification.quarantine import user_quarantine

    caught = user_quarantine().reasons()
    found = asyncio.run(survey(config, wanted, timeout_s=timeout_s, within_s=within_s, quarantined=caught))
    if as_json:
        typer.echo(json_format.dumps([one.as_dict() for one in found], indent=2))
    if wanted is not None and not found:
        raise MissingBlocksError(
            f"no server of this swarm serves {wanted!r}; run `swarm {command}` without it to list what is served"
        )
    if not as_json:
        print_tables(found, table_console(), Joining(config.initial_peers, config.discovery, config.secret_file))


def _watch(node: NodeConfig, model: str | None, timeout_s: float, host: str, port: int) -> None:
    """Serves the page's view of the swarm until Ctrl-C."""
    from swarm_plugins.web.serving import listen, serve_app
    from swarm_plugins.web.swarm_state import SwarmSource, watching_app

    with listen(host, port) as listener, swarm_of(node).connection() as connection:
        app = watching_app(SwarmSource(connection, wanted=model, timeout_s=timeout_s))
        serve_app(app, host, port, lambda url: typer.echo(f"swarm status: {url}/ (Ctrl-C ends it)"), listener=listener)


@options_of(NodeConfig, only=JOINING)
def drain(
    given: Given,
    server: Annotated[str, typer.Argument(help="Address of the server, or its peer id.", show_default=False)],
    identity: Annotated[
        Path, typer.Option(help="The server's identity file, which proves that it is yours.", show_default=False)
    ],
) -> None:
    """Let a server's open sessions end, and then the server; new ones go elsewhere at once."""
    with one_sentence_errors("drain"):
        given = given if not server.startswith("/") else {**given, "initial_peers": [server]}
        if not given["initial_peers"]:
            raise ConfigError(
                f"{server!r} is a peer id: give the server's address instead, or --initial-peers to find it by"
            )
        from swarm_plugins.transport.identity import load_identity

        owner = load_identity(identity)
        wanted = server.rpartition("/p2p/")[2]
        if owner.peer_id != wanted:
            raise ConfigError(f"{identity} is the identity of {owner.peer_id}, not of {wanted}: give the server's own")
        config = client_node(given)
        import asyncio

        from swarm_plugins.server.rpc.drain import ask_to_drain

        accepted = asyncio.run(ask_to_drain(config, owner, timeout_s=_DRAIN_ANSWER_S))
        typer.echo(
            f"{wanted} drains; open sessions: {accepted.sessions}; it ends when they have, "
            f"{accepted.drain_s:g} s from now at the latest."
        )


def identity(
    file: Annotated[Path, typer.Argument(help="Key file, made if it does not exist.", show_default=False)],
) -> None:
    """Print the peer id that a key file gives a server or a client; make the file if it does not exist."""
    with one_sentence_errors("identity"):
        from swarm_plugins.transport.identity import create_identity_file, load_identity

        if not file.exists():
            create_identity_file(file)
        typer.echo(load_identity(file).peer_id)
