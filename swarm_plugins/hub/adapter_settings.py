"""What an adapter of a stranger may set: its config decides what PEFT imports, changes, allocates and searches."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from safetensors import SafetensorError, safe_open

from swarm_plugins.errors import CheckpointError, one_line
from swarm_plugins.hub import AdapterFolder
from swarm_plugins.hub.folder import CONFIG_FILE, WEIGHTS_FILE
from swarm_plugins.model_names import is_plain_module

# Settings that make PEFT import a module by its name, or unpickle a file.
_REFUSED_SETTINGS = ("megatron_config", "corda_config", "lora_ga_config", "prompt_tuning_init_state_dict_path")

# These two are for adapters that share their base with others.
_HARMLESS_TYPES = ("LORA", "IA3", "LOHA", "LOKR", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
HARMLESS_STARTS = (None, True, False, "gaussian", "orthogonal")
"""Ways to initialize LoRA that leave the base's weights alone. PiSSA, OLoRA, LoftQ and others change them."""
_CHANGES = (
    "kasa_config", "layer_replication", "eva_config", "velora_config", "monteclora_config", "arrow_config",
    "use_bdlora",
)  # fmt: skip
"""Kinds of LoRA that change the base, as KaSA, which cuts its weights, or that need more than their own tensors."""
_TENSORS = ("lora_", "ia3_", "hada_", "lokr_", "prompt_embeddings", "trainable_tokens_")
"""How tensors of adapters are called, in the last parts of their names. PEFT loads all others into the base."""
_INNER = ("base_layer", "original_module")
"""What PEFT's layers call the base's own module."""
_NAMES = (
    "target_modules", "exclude_modules", "feedforward_modules", "modules_to_save", "layers_pattern", "rank_pattern",
    "alpha_pattern",
)  # fmt: skip
"""Settings that PEFT matches as regular expressions; a hostile expression can run for hours."""
_MAX_RANK = 4096
_VIRTUAL_SIZES = ("num_virtual_tokens", "num_transformer_submodules", "token_dim", "num_layers")
_MAX_VIRTUAL_NUMBERS = 1 << 27
"""Product of the sizes above: 512 MiB in float32, 1 GiB for a prefix of keys and values."""
_MAX_ENCODER_SIZE = 1 << 14
_MAX_ENCODER_LAYERS = 64
"""Torch takes minutes for an LSTM of thousands of layers, however narrow they are."""


def check_settings(adapter: AdapterFolder, *, is_shared: bool) -> None:
    """Checks an adapter's config before PEFT reads it.

    Args:
        adapter: The adapter.
        is_shared: Whether other models use the same base weights.

    Raises:
        CheckpointError: If the config is not a JSON object, would load code or pickled files or take an unbounded
            amount of memory, or, where the base is shared, could change it or take an unbounded time.
    """
    try:
        config = json.loads((adapter.folder / CONFIG_FILE).read_bytes())
    except ValueError as exc:
        raise CheckpointError(f"{CONFIG_FILE} of {adapter.label} is not JSON ({one_line(exc)})") from exc
    check_config(config, f"{CONFIG_FILE} of {adapter.label}", is_shared=is_shared)
    if is_shared:
        _check_tensors(adapter, config.get("modules_to_save") or ())


def check_config(config: Any, label: str, *, is_shared: bool) -> None:
    """Checks a config of PEFT by itself; see `check_settings`.

    Raises:
        CheckpointError: As there.
    """
    if not isinstance(config, dict):
        raise CheckpointError(f"{label} is a {type(config).__name__}, expected a JSON object")
    found = [name for name in _REFUSED_SETTINGS if config.get(name)]
    if found:
        raise CheckpointError(
            f"{label} sets {', '.join(found)}, which would load code or pickled files; ask its author to save it "
            "without"
        )
    if fault := _size_fault(config):
        raise CheckpointError(f"{label} cannot be used: it {fault}")
    if is_shared and (fault := _start_fault(config) or _name_fault(config)):
        raise CheckpointError(f"{label} cannot share its base with other models: it {fault}")


def changes_of_base(config: Mapping[str, Any]) -> str:
    """Returns the settings of an adapter's config by which it is more than tensors beside the base's; empty if none."""
    return ", ".join(name for name in _CHANGES if config.get(name) not in (None, False))


def _start_fault(config: dict[str, Any]) -> str | None:
    kind, start = config.get("peft_type"), config.get("init_lora_weights")
    if kind not in _HARMLESS_TYPES:
        return f"has the type {str(kind)[:40]!r}; known: {', '.join(_HARMLESS_TYPES)}"
    if found := changes_of_base(config):
        return f"sets {found}, which changes the base: convert it to plain LoRA"
    if start not in HARMLESS_STARTS:
        return f"sets init_lora_weights={str(start)[:40]!r}, which changes the base: convert it to plain LoRA"
    if (bias := config.get("bias")) not in (None, "none"):
        return f"sets bias={str(bias)[:40]!r}, which trains the base's own biases: set it to 'none'"
    return None


def _check_tensors(adapter: AdapterFolder, saved: Collection[str]) -> None:
    """Refuses tensors that PEFT would load into the base itself."""
    try:
        with safe_open(adapter.folder / WEIGHTS_FILE, "pt") as file:
            names = list(file.keys())
    except SafetensorError as exc:
        raise CheckpointError(f"the weights of {adapter.label} are corrupt ({one_line(exc)}): fetch it again") from exc
    for name in names:
        parts = name.removeprefix("base_model.model.").split(".")
        is_own = any(part.startswith(_TENSORS) for part in parts[-2:]) or not set(saved).isdisjoint(parts[:-1])
        if not is_own or not set(_INNER).isdisjoint(parts[-2:]):
            raise CheckpointError(
                f"{adapter.label} cannot share its base with other models: its tensor {name[:200]!r} belongs to the "
                "base; save it with save_embedding_layers=False, or bias='none'"
            )


def _name_fault(config: dict[str, Any]) -> str | None:
    for name in _NAMES:
        value = config.get(name) or ()
        patterns = [value] if not isinstance(value, list | dict | tuple) else list(value)
        if not all(map(is_plain_module, patterns)):
            return f"has a pattern as {name}: name the modules instead"
    return None


def _size_fault(config: dict[str, Any]) -> str | None:
    ranks = config.get("rank_pattern") or {}
    ranks = [config.get("r") or 1, *(ranks.values() if isinstance(ranks, dict) else ranks)]
    if not _are_sizes(ranks, _MAX_RANK):
        return f"has a rank above {_MAX_RANK}"
    virtual = [config.get(name) or 1 for name in _VIRTUAL_SIZES]
    if not _are_sizes(virtual, _MAX_VIRTUAL_NUMBERS) or math.prod(virtual) > _MAX_VIRTUAL_NUMBERS:
        return f"has virtual tokens of more than {_MAX_VIRTUAL_NUMBERS} numbers"
    if not _are_sizes([config.get("encoder_hidden_size") or 1], _MAX_ENCODER_SIZE):
        return f"has an encoder larger than {_MAX_ENCODER_SIZE}"
    if not _are_sizes([config.get("encoder_num_layers") or 1], _MAX_ENCODER_LAYERS):
        return f"has an encoder of more than {_MAX_ENCODER_LAYERS} layers"
    return None


def _are_sizes(values: list[Any], most: int) -> bool:
    return all(type(value) is int and 1 <= value <= most for value in values)
