"""Runs a recipe: LightningCLI reads it, a Trainer does the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from swarm_plugins.backbone import SwarmSettings, active_swarm
from swarm_plugins.cli._fit.keeping import KeepTrained
from swarm_plugins.cli._fit.reading import read_recipe
from swarm_plugins.client import SwarmConfig
from swarm_plugins.errors import ConfigError
from swarm_plugins.local_swarm import LocalSwarm

__all__ = ["run_recipe"]


def run_recipe(
    recipes: Sequence[Path],
    options: Sequence[str],
    *,
    num_servers: int = 0,
    threads: int = 1,
    ckpt_path: Path | None = None,
) -> None:
    """Trains by a recipe and prints the last metrics.

    Args:
        recipes: YAML files; later ones win.
        options: Keys of the recipe as command-line options; they win over the files.
        num_servers: Servers to start on this machine for the recipe's model. 0: none.
        threads: Threads of each of them.
        ckpt_path: Checkpoint to go on from.

    Raises:
        ConfigError: If a file is missing, a key or value is wrong, or the recipe cannot be run.
    """
    for recipe in recipes:
        if not recipe.is_file():
            raise ConfigError(f"there is no recipe {str(recipe)!r}; those that come with the package lie in recipes/")
    if ckpt_path is not None and not ckpt_path.is_file():
        raise ConfigError(f"there is no checkpoint {str(ckpt_path)!r}; give the path of a .ckpt file")
    cli = read_recipe([*(f"--config={recipe}" for recipe in recipes), *options])
    with _swarm_of(cli.model, num_servers, threads), _kept(cli.trainer), _lightning_errors():
        cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=ckpt_path and str(ckpt_path))
    metrics = {name: float(value) for name, value in sorted(cli.trainer.callback_metrics.items())}
    typer.echo(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()) or "done")


@contextlib.contextmanager
def _swarm_of(model: Any, num_servers: int, threads: int) -> Iterator[None]:
    """Serves the recipe's model for the length of a run, if that is wanted."""
    if num_servers == 0:
        yield
        return
    base = getattr(model, "base", None)
    if not isinstance(base, str):
        raise ConfigError(
            f"--local-swarm cannot know what to serve: {type(model).__name__} has no attribute base with the name of "
            "its model; start 'swarm serve' and set SWARM_INITIAL_PEERS"
        )
    with contextlib.ExitStack() as stack:
        swarm = stack.enter_context(LocalSwarm(base, num_servers=num_servers, threads=threads))
        settings = SwarmSettings(initial_peers=tuple(swarm.initial_peers), config=SwarmConfig())
        stack.enter_context(active_swarm(settings))
        yield


@contextlib.contextmanager
def _kept(trainer: Trainer) -> Iterator[None]:
    keeper = KeepTrained()
    trainer.callbacks.append(keeper)  # type: ignore[attr-defined]  # set by one of its connectors
    try:
        yield
    finally:
        if keeper.advice is not None:
            typer.echo(f"swarm fit: {keeper.advice}", err=True)


@contextlib.contextmanager
def _lightning_errors() -> Iterator[None]:
    try:
        yield
    except SystemExit:
        # How Lightning answers Ctrl-C, once it has told its callbacks.
        raise KeyboardInterrupt from None
    except MisconfigurationException as error:
        raise ConfigError(" ".join(str(error).split())) from error
