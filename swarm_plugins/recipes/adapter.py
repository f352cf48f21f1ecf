"""Builds a recipe's adapter, adds it to a model and writes it to disk."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors import SafetensorError
from transformers import PreTrainedModel

from swarm_plugins.backbone.refusals import WHAT_WORKS
from swarm_plugins.callbacks.saving import find_adapter, manifest_of
from swarm_plugins.errors import CheckpointError, ConfigError, SwarmError, one_line
from swarm_plugins.hub.folder import write_folder

log = logging.getLogger(__name__)


def adapter_config(settings: Mapping[str, Any], *, task_type: str) -> PeftConfig:
    """Returns PEFT's config of a type and its settings, for PEFT's name of a task.

    Raises:
        ConfigError: If the type or a setting does not exist.
    """
    kind = str(settings.get("peft_type", "")).upper()
    known = PEFT_TYPE_TO_CONFIG_MAPPING
    if kind not in {str(name.value) for name in known}:
        raise ConfigError(
            f"adapter.peft_type is {settings.get('peft_type')!r}, which PEFT does not know; {WHAT_WORKS}: LORA, IA3, "
            "PROMPT_TUNING, P_TUNING or PREFIX_TUNING"
        )
    chosen = next(config for name, config in known.items() if name.value == kind)
    allowed = sorted(field.name for field in dataclasses.fields(chosen) if field.init)
    unknown = sorted(set(settings) - set(allowed) - {"peft_type"})
    if unknown:
        raise ConfigError(f"adapter has no setting {unknown[0]!r}; {kind} has {', '.join(allowed)}")
    config: PeftConfig = chosen(**{**settings, "peft_type": kind, "task_type": task_type})
    return config


def put_on(base: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """Adds an adapter to a model.

    Raises:
        ConfigError: If PEFT refuses a value, or the model lacks a target module.
    """
    try:
        model: PeftModel = get_peft_model(base, config)
    except SwarmError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        names = sorted({name.rpartition(".")[2] for name, part in base.named_modules() if not list(part.children())})
        raise ConfigError(
            f"the adapter cannot be put on {type(base).__name__}: {one_line(error)}. Correct the recipe's "
            f"adapter; modules of the model are {', '.join(name for name in names if name)}"
        ) from error
    return model


def save_adapter(model: PeftModel, folder: Path, *, step: int) -> Path:
    """Writes the adapter in PEFT's format, and what it was trained on; as `save_whole` does. Returns its folder.

    Args:
        model: With the adapter.
        folder: Where to write.
        step: Optimizer steps so far.
    """

    def write(whole: Path) -> None:
        # "auto" would ask the Hub for the base model's vocabulary size.
        model.save_pretrained(str(whole), save_embedding_layers=False)
        manifest_of(find_adapter(model), event="end", step=step, metrics={}).write(whole)

    return save_whole(folder, "the adapter", write)


def save_whole(folder: Path, what: str, write: Callable[[Path], object]) -> Path:
    """Writes a folder and returns its place, numbered if an earlier run took the name.

    Args:
        folder: Where to write.
        what: What is written, for messages.
        write: Writes it into a new folder.

    Raises:
        OSError: If it cannot be written; nothing is left behind.
        CheckpointError: If the weights cannot be written.
    """
    try:
        place = write_folder(folder, write)
    except SafetensorError as error:
        raise CheckpointError(f"{what} cannot be written to {folder} ({one_line(error)}): free some space") from error
    if place != folder:
        log.warning("%s exists from an earlier run: %s is in %s", folder, what, place)
    return place
