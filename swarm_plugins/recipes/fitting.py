"""Runs a recipe: LightningCLI reads it, a Trainer trains, and what was trained survives a run that ends early."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer

from swarm_plugins.backbone.context import OnThisMachine, SwarmSettings, active_place
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.errors import ConfigError, one_line
from swarm_plugins.local_swarm import LocalSwarm
from swarm_plugins.recipes.reading import read_recipe
from swarm_plugins.strategy.swarm.member import SwarmMember

_PEERS = "SWARM_PEERS_OF_FIRST_PROCESS"
"""Environment variable for the processes that the first one starts."""


class KeepTrained(Callback):
    """Writes a checkpoint when a run fails or is interrupted: Lightning's own come at the end of an epoch."""

    def __init__(self) -> None:
        self.kept: Path | None = None
        """The checkpoint, if one was written."""
        self.fault: str | None = None
        """Why none could be written."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Writes the checkpoint; never raises, so as not to hide the error that ended the run."""
        # Ranks that go on would not take part in gathering what they hold.
        if trainer.global_step == 0 or trainer.fast_dev_run or trainer.world_size > 1:
            return
        # The run's own disk may be full.
        for folder in (Path(trainer.log_dir or trainer.default_root_dir), Path(tempfile.gettempdir())):
            path = _free(folder, f"interrupted-step={trainer.global_step}")
            try:
                # Lightning logs a remark if `weights_only` is not given.
                trainer.save_checkpoint(path, weights_only=False)
            except Exception as error:  # noqa: BLE001 - the error that ended the run is the one to show
                # A full disk, which torch's writer reports as RuntimeError, or a state that cannot be written.
                self.fault = (
                    f"cannot write the checkpoint {path} ({one_line(error)}): if the disk is full, free some space"
                )
                path.unlink(missing_ok=True)
            else:
                self.kept = path
                return

    @property
    def advice(self) -> str | None:
        """What to tell the user, if anything."""
        if self.kept is not None:
            return f"what was trained is in {self.kept}; go on with --ckpt-path {shlex.quote(str(self.kept))}"
        return self.fault


def _free(folder: Path, stem: str) -> Path:
    path, number = folder / f"{stem}.ckpt", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}.ckpt", number + 1
    return path


def run_recipe(
    recipes: Sequence[Path],
    options: Sequence[str],
    *,
    warn: Callable[[str], object],
    num_servers: int = 0,
    offload: str | None = None,
    ckpt_path: Path | None = None,
) -> str:
    """Trains from recipes and returns a line with the last metrics and the place of what was saved.

    Args:
        recipes: YAML files; later ones win.
        options: Keys of the recipe as command-line options; they win over the files.
        warn: Called with the place of the checkpoint if the run ends early.
        num_servers: Servers to start on this machine for the recipe's model. 0: none.
        offload: Runs the model's blocks on this machine: ``fast=8GB`` or ``none``. None: as the recipe says.
        ckpt_path: Checkpoint to resume from.

    Raises:
        ConfigError: If a file is missing, a key or value is wrong, or the recipe cannot be run.
    """
    for recipe in recipes:
        if not recipe.is_file():
            raise ConfigError(f"there is no recipe {str(recipe)!r}; those that come with the package lie in recipes/")
    if ckpt_path is not None and not ckpt_path.is_file():
        raise ConfigError(f"there is no checkpoint {str(ckpt_path)!r}; give the path of a .ckpt file")
    cli = read_recipe([*(f"--config={recipe}" for recipe in recipes), *options])
    with _place_of(cli, num_servers, offload), _kept(cli.trainer, warn), _lightning_errors():
        cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=ckpt_path and str(ckpt_path))
    if not cli.trainer.is_global_zero:
        return ""
    parts = [f"{name} {float(value):.4f}" for name, value in sorted(cli.trainer.callback_metrics.items())]
    saved = getattr(cli.model, "saved", None)
    return ", ".join([*parts, *([f"saved in {saved}"] if saved else [])]) or "done"


def _place_of(cli: Any, num_servers: int, offload: str | None) -> contextlib.AbstractContextManager[None]:
    if offload is None and not num_servers:
        return contextlib.nullcontext()
    if offload is not None and num_servers:
        raise ConfigError("--offload and --local-swarm say two places for the blocks: give one of them")
    strategy, option = cli.trainer.strategy, "--local-swarm" if offload is None else "--offload"
    if not isinstance(strategy, SwarmMember):
        raise ConfigError(
            f"{option} says where the blocks of a base model run, but the recipe's strategy is "
            f"{type(strategy).__name__}, which trains the whole model: leave it out, or set --trainer.strategy swarm"
        )
    if offload is None:
        return _swarm_of(cli.model, num_servers, cli.trainer)
    return active_place(OnThisMachine.read(offload, option))


@contextlib.contextmanager
def _swarm_of(model: Any, num_servers: int, trainer: Trainer) -> Iterator[None]:
    base = getattr(model, "base", None)
    if not isinstance(base, str):
        raise ConfigError(
            f"--local-swarm cannot know what to serve: {type(model).__name__} has no attribute base with the name of "
            "its model; start 'swarm serve' and set SWARM_INITIAL_PEERS"
        )
    servers = LocalSwarm(base, num_servers=num_servers, revision=getattr(model, "revision", None))
    with _first_serves(servers, trainer) as peers:
        settings = SwarmSettings(initial_peers=tuple(peers), config=SwarmConfig())
        with active_place(settings):
            yield


@contextlib.contextmanager
def _first_serves(servers: LocalSwarm, trainer: Trainer) -> Iterator[list[str]]:
    """Starts servers in the first process, which starts the others later."""
    if not trainer.is_global_zero:
        peers = os.environ.get(_PEERS, "").split()
        if not peers:
            raise ConfigError(
                "--local-swarm belongs to one process, which starts the others: use --trainer.devices N without "
                "torchrun, or start 'swarm serve' and set SWARM_INITIAL_PEERS"
            )
        yield peers
        return
    with servers as swarm:
        os.environ[_PEERS] = " ".join(swarm.initial_peers)
        try:
            yield swarm.initial_peers
        finally:
            os.environ.pop(_PEERS, None)


@contextlib.contextmanager
def _kept(trainer: Trainer, warn: Callable[[str], object]) -> Iterator[None]:
    keeper = KeepTrained()
    trainer.callbacks.append(keeper)  # type: ignore[attr-defined]  # set by one of its connectors
    try:
        yield
    finally:
        if keeper.advice is not None:
            warn(keeper.advice)


@contextlib.contextmanager
def _lightning_errors() -> Iterator[None]:
    try:
        yield
    except SystemExit:
        # How Lightning answers Ctrl-C, once it has told its callbacks.
        raise KeyboardInterrupt from None
    except MisconfigurationException as error:
        raise ConfigError(one_line(error, max_chars=1000)) from error
