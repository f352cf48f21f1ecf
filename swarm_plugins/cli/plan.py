"""``swarm plan``: says what becomes of a model in a given memory, before anything is downloaded or loaded."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from swarm_plugins.cli.support.errors import one_sentence_errors
from swarm_plugins.noise import quiet_command

__all__ = ["plan"]


def plan(
    model: Annotated[str, typer.Argument(help="Model: a directory, or its id on the Hub.")],
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Fast memory in all, such as 8GB. Default: most of what is free.")
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="RAM for experts of a CUDA device. Default: most of the free."),
    ] = None,
    context: Annotated[int, typer.Option(min=1, max=1_000_000, help="Tokens that prompt and answer may have.")] = 2048,
    disk_rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Read per second. Default: measured on the model's own files.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu or cuda.")] = "cpu",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the model.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print numbers for programs.")] = False,
) -> None:
    """Say what fits where, which speed to expect and which settings to use, from the headers of a model's files."""
    quiet_command()
    with one_sentence_errors("plan"):
        from swarm_plugins.sizes import parse_bytes

        memory_bytes = None if memory is None else parse_bytes(memory)
        ram_bytes = None if ram is None else parse_bytes(ram)
        disk_bytes_per_s = None if disk_rate is None else _positive(parse_bytes(disk_rate), disk_rate)
        # What takes seconds to import comes after what may be wrong at once.
        from rich.console import Console

        from swarm_plugins.cli.support.plan_table import as_dict, print_plan
        from swarm_plugins.offload.plan.planning import plan_model

        planned = plan_model(
            model,
            revision=revision,
            memory_bytes=memory_bytes,
            ram_bytes=ram_bytes,
            context_tokens=context,
            disk_bytes_per_s=disk_bytes_per_s,
            device=device,
        )
        if json:
            typer.echo(json_module.dumps(as_dict(planned), indent=1))
            return
        console = Console()
        # A pipe has no width of its own; 80 columns would fold the tables.
        print_plan(console if console.is_terminal else Console(width=120), planned)


def _positive(rate: int, text: str) -> int:
    from swarm_plugins.errors import ConfigError

    if rate < 1:
        raise ConfigError(f"--disk-rate {text} is no speed: give bytes per second, such as 500MB")
    return rate
