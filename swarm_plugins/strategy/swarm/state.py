"""Checkpoints of the trained tensors, tied to the version of their base model."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from swarm_plugins import __version__
from swarm_plugins.backbone.inserting import INSERTED
from swarm_plugins.errors import CheckpointError
from swarm_plugins.strategy.swarm.inspection import base_versions, placed_models
from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

KEY = "swarm_plugins"
"""Key of a checkpoint under which it describes its base."""
KEY_OF_RUN = "swarm_plugins_run"
"""Key of a checkpoint of Fabric for the state of a run that is trained together."""
_MAX_NAMES = 3


def trained_state(module: nn.Module) -> dict[str, Any]:
    """Returns the part of a module's state that a run changes.

    These are the trainable parameters, and buffers outside of the base model (running averages of a head, say) or of
    modules that were inserted between its blocks. The base model itself is read again by its name; it may be many times
    as large.
    """
    kept = _trainable_names(module) | _own_buffers(module)
    return {name: value for name, value in module.state_dict().items() if name in kept}


def load_trained(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Restores a state.

    Raises:
        CheckpointError: If a shape differs or, if ``strict``, a trainable tensor is missing or unknown to the module.
    """
    here = module.state_dict()
    cure = "build the same adapter (kind, rank, target modules) as the run that wrote it, or start without ckpt_path"
    unexpected = [name for name in state if name not in here]
    missing = sorted(_trainable_names(module) - set(state))
    if strict and (unexpected or missing):
        parts = [f"{len(missing)} trainable tensor(s) are missing in it: {_some(missing)}"] if missing else []
        parts += [f"{len(unexpected)} have no place in the model: {_some(unexpected)}"] if unexpected else []
        raise CheckpointError(f"the checkpoint does not fit {type(module).__name__}: {'; '.join(parts)}; {cure}")
    fitting = {name: value for name, value in state.items() if name in here}
    for name, value in fitting.items():
        if isinstance(value, Tensor) and isinstance(here[name], Tensor) and value.shape != here[name].shape:
            raise CheckpointError(
                f"the checkpoint does not fit {type(module).__name__}: {name!r} has shape {tuple(value.shape)} in it, "
                f"{tuple(here[name].shape)} in the model; {cure}"
            )
    module.load_state_dict(fitting, strict=False)


def describe_base(module: nn.Module) -> dict[str, Any]:
    """Returns a checkpoint's description of its base, in plain strings that load without trusting the file."""
    return {"version": __version__, "base": [str(version) for version in base_versions(module)]}


def describe_bases(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Returns a description of the bases of several modules, each by the name that it has in the checkpoint."""
    found = {name: describe_base(module)["base"] for name, module in modules.items()}
    return {"version": __version__, "base": list(dict.fromkeys(itertools.chain(*found.values()))), "bases": found}


def check_bases(checkpoint: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
    """Checks that a checkpoint was trained on these base models, each module on its own.

    Raises:
        CheckpointError: If one was trained on another.
    """
    described = checkpoint.get(KEY)
    bases = described.get("bases") if isinstance(described, Mapping) else None
    if not isinstance(bases, Mapping):  # of an earlier version, or not ours
        bases = {}
    for name, module in modules.items():
        check_base({KEY: {"base": bases[name]}} if name in bases else checkpoint, module)


def check_base(checkpoint: Mapping[str, Any], module: nn.Module) -> None:
    """Checks that a checkpoint was trained on this base model.

    Raises:
        CheckpointError: If it was trained on another one.
    """
    described = checkpoint.get(KEY)
    if not isinstance(described, Mapping) or not isinstance(described.get("base"), list):
        log.warning("the checkpoint does not say on which base model it was trained; it was not made by this strategy")
        return
    there = [ModelVersion.parse(str(text)) for text in described["base"]]
    here = base_versions(module)
    # Versions are equal when their weights are: a renamed directory is the same model.
    if {version.key for version in there} != {version.key for version in here}:
        raise CheckpointError(
            f"the checkpoint was trained on {_all(there)}, but the model here is {_all(here)}: its tensors mean "
            "nothing there. Load that version of the base model (from_pretrained(name, revision=...)), or start "
            "without ckpt_path"
        )


def _trainable_names(module: nn.Module) -> set[str]:
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if parameter.requires_grad}


def _own_buffers(module: nn.Module) -> set[str]:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    bases = tuple(f"{name}." if name else "" for name in placed_models(module))
    inserted = tuple(f"{path}.{name}." for path, one in module.named_modules() for name in getattr(one, INSERTED, ()))
    return {
        name
        for name in module.state_dict()
        if name not in parameters and (name.startswith(inserted) or not (bases and name.startswith(bases)))
    }


def _some(names: Collection[str]) -> str:
    shown = ", ".join(repr(name) for name in list(names)[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"


def _all(versions: Collection[ModelVersion]) -> str:
    return ", ".join(str(version) for version in versions) or "no model that this strategy places"
