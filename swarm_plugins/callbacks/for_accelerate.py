"""`save_only_trained`: states of accelerate without the base model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from swarm_plugins.errors import CheckpointError, one_line
from swarm_plugins.strategy.swarm.inspection import is_placed
from swarm_plugins.strategy.swarm.state import KEY, check_base, describe_base, load_trained, trained_state

_DESCRIPTION = "swarm_base.json"
_MAX_BYTES = 1 << 20


def save_only_trained(accelerator: Accelerator) -> None:
    """Makes ``save_state`` leave out the base models of prepared models, which ``load_state`` does not need.

    These are models on a swarm, offloaded, or loaded in memory by `AutoSwarmModelForCausalLM`; others are saved whole.
    A state loads in any number of processes and in any of the three places. ``load_state`` raises CheckpointError if
    the state belongs to another base model or does not fit, before it changes that model.

    Args:
        accelerator: It gets a hook for saving and one for loading.
    """
    accelerator.register_save_state_pre_hook(_save)
    accelerator.register_load_state_pre_hook(_load)


def _save(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
    bases = []
    for index, model in enumerate(map(_unwrapped, models)):
        if is_placed(model):
            # Copies: accelerate refuses two names for one tensor, which tied weights have.
            weights[index] = {name: one.clone() for name, one in trained_state(model).items()}
        bases.append(describe_base(model) if is_placed(model) else None)
    # Every process writes the same.
    (Path(folder) / _DESCRIPTION).write_text(json.dumps(bases))


def _load(models: list[nn.Module], folder: str) -> None:
    bases = _described(Path(folder), len(models))
    paths = [Path(folder) / f"model{f'_{index}' if index else ''}.safetensors" for index in range(len(models))]
    found = list(zip(map(_unwrapped, models), paths, bases, strict=True))
    states = [(model, _read(path)) for model, path, _ in found if is_placed(model)]
    for model, _, base in found:
        if is_placed(model):
            check_base({KEY: base}, model)
    for model, state in states:
        load_trained(model, state, strict=True)
    for model, path, _ in found:
        if not is_placed(model):
            with _readable(path):
                # Not by its state dict: of tied weights, the file has one.
                load_model(model, path)
    # What is left here is loaded by accelerate.
    models.clear()


def _read(path: Path) -> dict[str, Tensor]:
    with _readable(path):
        return load_file(path)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({one_line(error)}): give a folder that save_state wrote, with "
            "safe_serialization=True"
        ) from error


def _described(folder: Path, num_models: int) -> list[Any]:
    path = folder / _DESCRIPTION
    try:
        with path.open("rb") as file:
            bases = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({one_line(error)}): the state was not saved after save_only_trained(accelerator)"
        ) from error
    if not isinstance(bases, list) or len(bases) != num_models:
        raise CheckpointError(
            f"{folder} holds {len(bases) if isinstance(bases, list) else 'no'} models, but {num_models} are prepared: "
            "prepare those that were saved, in the same order"
        )
    return bases


def _unwrapped(model: nn.Module) -> nn.Module:
    inner: nn.Module = extract_model_from_parallel(model)
    return inner
