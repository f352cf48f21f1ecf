"""The state of a run's optimizer as a file of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from swarm_plugins.errors import CheckpointError, one_line
from swarm_plugins.tuning.tuner import Tuner

_FILE = "optimizer.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"
"""Of one tensor: one that had no gradient has missed some, or all and has no state then."""


def save_optimizer(tuner: Tuner, folder: Path) -> None:
    """Writes the optimizer's state into an adapter's folder."""
    tensors = {
        f"{name}.{moment}": tuner.optimizer.state[parameter][moment]
        for name, parameter in tuner.parameters.items()
        if parameter in tuner.optimizer.state
        for moment in (*_MOMENTS, _STEP)
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
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a dict
        states = {name: _state(tensors, name, parameter) for name, parameter in tuner.parameters.items()}
        if unknown := {name.rpartition(".")[0] for name in tensors}.difference(states):
            raise CheckpointError(f"{file.name} has a state of {min(unknown)}, which the adapter lacks")
    except (OSError, KeyError, ValueError, SafetensorError) as exc:
        if isinstance(exc, CheckpointError):
            raise
        raise CheckpointError(
            f"the optimizer's state cannot be read ({one_line(exc)}): load the weights alone, with load_state"
        ) from exc
    tuner.num_steps = num_steps
    tuner.optimizer.state.clear()
    tuner.optimizer.state.update({tuner.parameters[name]: state for name, state in states.items() if state})


def _state(tensors: Mapping[str, Tensor], name: str, parameter: Tensor) -> dict[str, Tensor]:
    names = {part: f"{name}.{part}" for part in (_STEP, *_MOMENTS)}
    if tensors.keys().isdisjoint(names.values()):
        return {}
    # As AdamW keeps them: moments with the parameter, the count of steps on the CPU.
    state = {part: tensors[key] if part == _STEP else tensors[key].to(parameter.device) for part, key in names.items()}
    if any(state[moment].shape != parameter.shape for moment in _MOMENTS) or state[_STEP].ndim:
        raise CheckpointError(f"{_FILE}: {name} has another shape than the adapter")
    return state
