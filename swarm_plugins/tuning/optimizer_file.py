"""The state of a run's optimizer as a file of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarm_plugins.errors import CheckpointError, one_line
from swarm_plugins.tuning.tuner import Tuner

_FILE = "optimizer.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_optimizer(tuner: Tuner, folder: Path) -> None:
    """Writes the optimizer's state into an adapter's folder."""
    tensors = {
        f"{name}.{moment}": tuner.optimizer.state[parameter][moment]
        for name, parameter in tuner.parameters.items()
        if parameter in tuner.optimizer.state
        for moment in _MOMENTS
    }
    save_file(tensors, folder / _FILE, metadata={"num_steps": str(tuner.num_steps)})


def load_optimizer(tuner: Tuner, folder: Path) -> None:
    """Gives a tuner the optimizer's state of a checkpoint, to go on as if it had never stopped.

    Raises:
        CheckpointError: If there is none, or it is another adapter's.
    """
    file = folder / _FILE
    try:
        with safe_open(file, "pt") as stored:
            num_steps = int((stored.metadata() or {})["num_steps"])
            for name, parameter in tuner.parameters.items() if num_steps else ():
                moments = {moment: stored.get_tensor(f"{name}.{moment}") for moment in _MOMENTS}
                if any(one.shape != parameter.shape for one in moments.values()):
                    raise CheckpointError(f"{file.name}: {name} has another shape than the adapter")
                tuner.optimizer.state[parameter] = {"step": torch.tensor(float(num_steps)), **moments}
    except (OSError, KeyError, ValueError, SafetensorError) as exc:
        if isinstance(exc, CheckpointError):
            raise
        raise CheckpointError(
            f"the optimizer's state cannot be read ({one_line(exc)}): load the weights alone, with load_state"
        ) from exc
    tuner.num_steps = num_steps
