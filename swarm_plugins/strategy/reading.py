"""Checkpoints are read without running code from them."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from swarm_plugins.errors import CheckpointError, ConfigError, SwarmError, one_line

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as _Base
else:
    _Base = object

_DAMAGE = (RuntimeError, ValueError)
"""Raised for damaged archives, but also by modules and optimizers that a state does not fit."""


class ReadsWeightsOnly(_Base):
    """A mixin for the strategies of a Trainer."""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint: tensors, numbers and text, wherever it comes from.

        Raises:
            CheckpointError: If the file is not a checkpoint.
            ConfigError: If ``weights_only`` is False.
        """
        check_weights_only(weights_only)
        with readable(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only=True)


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
        # torch's unpickler advises to trust the file, which must not be repeated.
        is_advice = isinstance(error, pickle.UnpicklingError)
        reason = "not what torch.save writes of tensors and numbers" if is_advice else one_line(error)
        raise CheckpointError(
            f"{str(path)!r} cannot be read as a checkpoint ({reason}): it is damaged, or not from Lightning; give "
            "another one"
        ) from error
