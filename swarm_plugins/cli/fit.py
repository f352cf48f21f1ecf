"""``swarm fit``: trains by a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm_plugins.cli.support.output import one_sentence_errors
from swarm_plugins.cli.support.prepared import find_own_modules
from swarm_plugins.noise import quiet_recipe
from swarm_plugins.offload.text import OFFLOAD_HELP, OFFLOAD_WORDS


def fit(
    context: typer.Context,
    config: Annotated[
        list[Path],
        typer.Option(help="Recipe (YAML) with trainer, model and data; repeat: later ones win.", show_default=False),
    ],
    local_swarm: Annotated[
        int,
        typer.Option(
            metavar="SERVERS", help="Serve the recipe's model with this many servers on this machine meanwhile.", min=0
        ),
    ] = 0,
    offload: Annotated[
        str | None,
        typer.Option(
            metavar="none|fast=SIZE,...",
            help=f"Run the model on this machine: none has it in memory, else experts stay on disk: {OFFLOAD_HELP}",
            show_default=False,
        ),
    ] = None,
    ckpt_path: Annotated[Path | None, typer.Option(help="Checkpoint of an earlier run to go on from.")] = None,
) -> None:
    """Train by a recipe, through Lightning.

    Any key of the recipe can be given as an option after the others, such as --trainer.max_epochs 2 or --model.base
    DIR; --print_config shows all of them. Classes and functions may be your own, in modules of the working directory.
    The swarm is the recipe's (strategy.init_args.initial_peers), else --local-swarm, else the one of the environment
    variable SWARM_INITIAL_PEERS; with --offload there is none.
    """
    quiet_recipe()
    with one_sentence_errors("fit", OFFLOAD_WORDS):
        from swarm_plugins.recipes.fitting import run_recipe

        find_own_modules()
        outcome = run_recipe(
            config,
            context.args,
            num_servers=local_swarm,
            offload=offload,
            ckpt_path=ckpt_path,
            warn=lambda text: typer.echo(f"swarm fit: {text}", err=True),
        )
        if outcome:  # the first of several processes tells it
            typer.echo(outcome)
