"""Refuses Lightning's callbacks that average weights, which need the whole module in one process."""

from __future__ import annotations

from typing import Any

import pytorch_lightning.callbacks as standalone
from lightning.pytorch import callbacks as unified

from swarm_plugins.errors import ConfigError

_AVERAGING = (
    unified.WeightAveraging,
    unified.StochasticWeightAveraging,
    standalone.WeightAveraging,
    standalone.StochasticWeightAveraging,
)


def refuse_averaging(trainer: Any, why: str) -> None:
    """Raises if a Trainer that is about to fit has a callback that averages weights.

    Args:
        trainer: The Trainer, of either package.
        why: What is wrong with a copy of the module, and what to do.

    Raises:
        ConfigError: If there is one.
    """
    averaging = [type(one).__name__ for one in trainer.callbacks if isinstance(one, _AVERAGING)]
    if averaging and trainer.state.fn == "fit":
        raise ConfigError(f"{averaging[0]} averages a copy of the whole module, but with this strategy {why}")
