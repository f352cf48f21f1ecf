"""``swarm status``: who serves which blocks of which model version."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarm_plugins.cli.support.errors import one_sentence_errors

if TYPE_CHECKING:
    from swarm_plugins.cli._status.survey import ModelStatus

__all__ = ["status"]

_PIPE_CHARS = 200


def status(
    model: Annotated[
        str | None, typer.Argument(help="A version, or part of its name. None: all that the swarm serves.")
    ] = None,
    initial_peers: Annotated[
        list[str] | None,
        typer.Option(help="Address to reach the swarm by; repeatable.", envvar="SWARM_INITIAL_PEERS"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for one server.")] = 5.0,
) -> None:
    """Show who serves which blocks: coverage, load, free KV cache; and which blocks are missing."""
    with one_sentence_errors("status"):
        import asyncio

        from rich.console import Console

        from swarm_plugins.cli._status.survey import survey
        from swarm_plugins.cli._status.table import print_tables
        from swarm_plugins.errors import ConfigError, MissingBlocksError

        peers = [address for entry in initial_peers or [] for address in entry.replace(",", " ").split()]
        if not peers:
            raise ConfigError(
                "no address of the swarm: give --initial-peers ADDRESS as `swarm serve` prints it, "
                "or set SWARM_INITIAL_PEERS"
            )
        found = asyncio.run(survey(tuple(peers), model, timeout_s=timeout))
        if json:
            typer.echo(json_format.dumps([_plain(one) for one in found], indent=2))
        elif found:
            console = Console()
            # A pipe has no width of its own; 80 columns would shorten what programs look for.
            print_tables(found, console if console.is_terminal else Console(width=_PIPE_CHARS), initial_peers=peers)
        if model is not None and not found:
            raise MissingBlocksError(f"nobody in this swarm serves {model!r}; `swarm status` without it lists what is")
        if not found and not json:
            typer.echo("Nobody serves anything in this swarm.")


def _plain(one: ModelStatus) -> dict[str, Any]:
    import msgspec

    return {
        "version": one.version,
        "model": one.model,
        "num_blocks": one.num_blocks,
        "coverage": one.coverage,
        "missing_blocks": one.missing,
        "servers": [
            {"peer": server.peer, "is_reachable": server.is_reachable, **msgspec.structs.asdict(server.info)}
            for server in one.servers
        ],
    }
