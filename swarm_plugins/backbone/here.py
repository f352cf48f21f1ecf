"""Loads a model whose blocks run in this process: in memory, or with its experts offloaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedModel

from swarm_plugins.backbone.context import OnThisMachine
from swarm_plugins.backbone.loading import choose_experts
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.loading import class_for_task, mark_base, take_generation_config
from swarm_plugins.errors import ConfigError, UnsupportedError, one_line
from swarm_plugins.model_names import expanded
from swarm_plugins.offload.load import load_offloaded

_OF_A_HEAD = ("num_labels", "id2label", "label2id", "classifier_dropout")


def load_here(
    base_class: type[PreTrainedModel],
    checkpoint: Checkpoint,
    place: OnThisMachine,
    *,
    name_or_dir: str | Path,
    dtype: torch.dtype | str | None,
    device: str | torch.device | None,
    config_changes: Mapping[str, Any],
    hub: Mapping[str, Any],
) -> PreTrainedModel:
    """Returns a model of HF's ``base_class``, in evaluation mode, that knows the version of its base.

    Raises:
        ConfigError: If transformers cannot load it.
        UnsupportedError: If it is to be offloaded, and has no experts or is to get a new head.
        CapacityError: If the budget is too small.
    """
    where = device or place.device
    if place.offload is None:
        return _in_memory(base_class, checkpoint, str(name_or_dir), dtype, where or "cpu", config_changes, hub)
    tasks = MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    stored = class_for_task(checkpoint.config, "language model", *tasks)
    if base_class is not stored or any(name in config_changes for name in _OF_A_HEAD):
        raise UnsupportedError(
            f"{checkpoint.name} can be offloaded as the {stored.__name__} that it is, not as a "
            f"{base_class.__name__} with a new head: pass offload='none' to have all of it in memory, or use a swarm"
        )
    model = load_offloaded(name_or_dir, place.offload, dtype=dtype, device=where, **hub)
    for setting, value in config_changes.items():
        setattr(model.config, setting, value)
    return model


def _in_memory(
    base_class: type[PreTrainedModel],
    checkpoint: Checkpoint,
    name: str,
    dtype: torch.dtype | str | None,
    device: str | torch.device,
    config_changes: Mapping[str, Any],
    hub: Mapping[str, Any],
) -> PreTrainedModel:
    version = checkpoint.version
    # The commit that was resolved, whatever a branch becomes meanwhile.
    pinned = hub if version.is_local else {**hub, "revision": version.revision}
    given = {key: value for key, value in {**config_changes, **pinned}.items() if value is not None}
    try:
        model: Any = base_class.from_pretrained(str(expanded(name)), dtype=dtype or "auto", **given)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model {name!r} cannot be loaded ({one_line(error)}): give another one") from error
    model.to(torch.device(device))
    take_generation_config(model, checkpoint)
    choose_experts(model)
    mark_base(model, version)
    loaded: PreTrainedModel = model.eval()
    return loaded
