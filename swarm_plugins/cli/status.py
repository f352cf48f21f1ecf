"""``swarm status``: the servers of each model version and the blocks they hold."""

from __future__ import annotations

import json as json_format
from typing import Annotated

import typer

from swarm_plugins.cli.support.arguments import Discovery, Identity, Peers, Secret, require_addresses
from swarm_plugins.cli.support.output import one_sentence_errors, wide_console
from swarm_plugins.errors import MissingBlocksError

_PIPE_CHARS = 200


def status(
    model: Annotated[
        str | None, typer.Argument(help="A version, or part of its name. Default: all that the swarm serves.")
    ] = None,
    initial_peers: Peers = None,
    discovery: Discovery = "dht",
    secret_file: Secret = None,
    identity: Identity = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for one server.")] = 5.0,
) -> None:
    """Show who serves which blocks, load and free KV cache; what is missing; whom your clients leave out, and why."""
    with one_sentence_errors("status"):
        peers = require_addresses(initial_peers)
        import asyncio

        from swarm_plugins.cli.support.status_table import print_tables
        from swarm_plugins.survey import survey
        from swarm_plugins.transport.config import NodeConfig
        from swarm_plugins.verification.quarantine import user_quarantine

        config = NodeConfig(
            initial_peers=tuple(peers),
            discovery=discovery,  # type: ignore[arg-type]  # checked there
            secret_file=secret_file,
            identity_path=identity,
            client_mode=True,
        )
        excluded = {peer: caught.reason for peer, caught in user_quarantine().peers().items()}
        found = asyncio.run(survey(config, model, timeout_s=timeout, quarantined=excluded))
        if json:
            typer.echo(json_format.dumps([one.as_dict() for one in found], indent=2))
        elif found:
            print_tables(found, wide_console(_PIPE_CHARS), initial_peers=peers)
        if model is not None and not found:
            raise MissingBlocksError(
                f"no server of this swarm serves {model!r}; run `swarm status` without it to list what is served"
            )
        if not found and not json:
            typer.echo("No server serves anything in this swarm.")
