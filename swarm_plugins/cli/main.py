"""Assembles the commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from swarm_plugins import __version__
from swarm_plugins.cli.api import api
from swarm_plugins.cli.audit import audit
from swarm_plugins.cli.chat import chat, run
from swarm_plugins.cli.demo import demo, demo_model
from swarm_plugins.cli.eval import evaluate
from swarm_plugins.cli.fit import fit
from swarm_plugins.cli.hub import hub, push
from swarm_plugins.cli.merge import merge
from swarm_plugins.cli.plan import plan, quantize
from swarm_plugins.cli.serve import serve
from swarm_plugins.cli.status import drain, identity, status
from swarm_plugins.cli.top import top
from swarm_plugins.noise import no_bars_in_pipes

app = typer.Typer(
    name="swarm",
    help="Fine-tune and use language models that do not fit your machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Serve and join": (serve, drain, identity),
    "Use": (chat, api),
    "Train and publish": (fit, evaluate, merge, push, hub),
    "Offload experts": (plan, run, quantize),
    "Inspect": (status, top, audit),
    "Try": (demo, demo_model),
}
_PASSING_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
_NAMES = {evaluate: "eval"}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        app.command(
            _NAMES.get(_command), rich_help_panel=_panel, context_settings=_PASSING_ON if _command is fit else None
        )(_command)


def main() -> None:
    """Runs the ``swarm`` command."""
    no_bars_in_pipes()
    app()
