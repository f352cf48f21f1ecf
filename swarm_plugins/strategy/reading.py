"""What all strategies have: checkpoints are read without running code from them, and precision is checked at once."""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from swarm_plugins.errors import CheckpointError, ConfigError, SwarmError, one_line

if TYPE_CHECKING:
    from lightning.fabric.strategies.strategy import Strategy as _FabricBase
    from lightning.pytorch.strategies import Strategy as _TrainerBase
else:
    _FabricBase = _TrainerBase = object

_DAMAGE = (RuntimeError, ValueError)
"""Raised for damaged archives, but also by modules and optimizers that a state does not fit."""


class TrainerStrategyBase(_TrainerBase):
    """A mixin for the strategies of a Trainer."""

    take_precision: Callable[[Any], None]
    """Takes Lightning's precision plugin, or raises ConfigError."""

    @property
    def precision_plugin(self) -> Any:
        """Lightning's precision plugin; checked when it is set, which a Trainer does when it is made."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self.take_precision(plugin)
        self._precision_plugin = plugin

    @property
    def _module(self) -> Any:
        if self.lightning_module is None:
            raise RuntimeError(
                "the strategy has no module yet: a Trainer connects it in fit, validate, test or predict"
            )
        return self.lightning_module

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint: tensors, numbers and text, wherever it comes from.

        Raises:
            CheckpointError: If the file is not a checkpoint.
            ConfigError: If ``weights_only`` is False.
        """
        check_weights_only(weights_only)
        with readable(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only=True)


class FabricStrategyBase(_FabricBase):
    """A mixin for the strategies of Fabric."""

    take_precision: Callable[[Any], None]
    """Takes Lightning's precision plugin, or raises ConfigError."""

    @property
    def precision(self) -> Any:
        """Lightning's precision plugin; checked when it is set, which Fabric does when it is made."""
        return super().precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self.take_precision(plugin)
        self._precision = plugin


def check_weights_only(weights_only: bool | None) -> None:
    """Checks that a checkpoint may be read without running code from it.

    Raises:
        ConfigError: If the caller asks for the opposite.
    """
    if weights_only is False:
        raise ConfigError(
            "weights_only=False would run code that the checkpoint holds: this strategy reads tensors, numbers "
            "and text only. Leave the argument out; classes that a checkpoint must hold are allowed one by one, with "
            "torch.serialization.add_safe_globals([...])"
        )


@contextlib.contextmanager
def readable(path: Any, *, is_loading: bool = False) -> Iterator[None]:
    """Translates errors while reading a checkpoint to CheckpointError.

    Args:
        path: The file.
        is_loading: Whether objects load their state inside too; their own errors then stay as they are.

    Raises:
        CheckpointError: If the file is missing or cannot be read.
    """
    errors = (pickle.UnpicklingError, EOFError) + (() if is_loading else _DAMAGE)
    try:
        yield
    except SwarmError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {str(path)!r}; give the path of a .ckpt file") from error
    except errors as error:
        is_advice = isinstance(error, pickle.UnpicklingError)
        refused = re.search(r"Unsupported global: GLOBAL ([\w.]+)", str(error)) if is_advice else None
        if refused is not None:
            own = f"; if you wrote this file, allow it by torch.serialization.add_safe_globals([{refused[1]}])"
            raise CheckpointError(
                f"{str(path)!r} holds a {refused[1]}, but only tensors, numbers and text are read from checkpoints: "
                f"leave it out by save_hyperparameters(ignore=[...]) in the module{'' if '://' in str(path) else own}"
            ) from error
        # torch's unpickler advises to trust the file, which must not be repeated.
        reason = "not what torch.save writes of tensors and numbers" if is_advice else one_line(error)
        raise CheckpointError(
            f"{str(path)!r} cannot be read as a checkpoint ({reason}): it is damaged, or not from Lightning; give "
            "another one"
        ) from error
