"""Refuses PEFT features that cannot work on remote blocks, at injection and with the cure.

Servers hold the weights and apply shipped adapters. A client cannot read base weights (initialisations, merging), train
them, or add other computations to a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from peft import PeftConfig, PeftType
from peft.tuners.ia3.layer import Linear as IA3Linear
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from swarm_plugins.backbone.peft_parts import method_of
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.peft_methods import PEFT_METHODS

SUPPORTED_LAYERS = (LoraLinear, ParamWrapper, IA3Linear)
"""Layers of PEFT that servers can apply."""
WHAT_WORKS = (
    "remote blocks support LoRA (also DoRA, aLoRA, rslora, target_parameters, lora_bias, dropout), "
    + ", ".join(name for name in PEFT_METHODS if name != "LORA")
    + ", IA3, prompt tuning, p-tuning, prefix tuning"
)
_READS_WEIGHTS = ("pissa", "olora", "loftq", "corda", "eva", "lora_ga", "mica")
_DECOMPOSES = "it starts from a decomposition of the base's weights, which are on servers"
_SINGLE_ELEMENTS = "it trains single elements of the weights, at places that its layers keep outside their tensors"
REFUSED_METHODS = {
    "ADAMSS": _DECOMPOSES,
    "ADAPTION_PROMPT": "it replaces the attention",
    "BOFT": "its layer multiplies matrices as wide as the module, and compiles an extension where there is CUDA",
    "DEFT": "it starts from a product with the base's weights, which are on servers",
    "DELORA": "it starts from norms of the columns of the base's weights, which are on servers",
    "FOURIERFT": _SINGLE_ELEMENTS,
    "FROD": _DECOMPOSES,
    "GLORA": "PEFT applies it to torch.nn.Linear itself only, not to a class derived from it",
    "HRA": "its layer multiplies two matrices as wide as the module for each rank, in every call",
    "LN_TUNING": "it trains the norms of the blocks, which are on servers; the final norm is here",
    "OSF": _DECOMPOSES,
    "PEANUT": "its layer works on a copy of the base's weight",
    "POLY": "its layers need the task of each row",
    "PSOFT": _DECOMPOSES,
    "PVERA": "it draws random numbers in each forward, which a second one would not repeat",
    "SHADOW": "it runs a second small model next to the blocks",
    "SHIRA": _SINGLE_ELEMENTS,
    "SUPERTUNING": _SINGLE_ELEMENTS,
    "TINYLORA": _DECOMPOSES,
    "UNILORA": _SINGLE_ELEMENTS,
    "WAVEFT": _SINGLE_ELEMENTS,
    "XLORA": "it mixes adapters by the hidden states of another forward",
}
"""Why methods that would change remote blocks cannot work there."""
_LOCAL_FIELDS = frozenset(field.name for field in dataclasses.fields(PeftConfig)) | frozenset({
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "init_weights",
})  # fmt: skip
"""Fields of configs that say where an adapter is and what it starts from."""
_OTHER_CHANGES = ("layer_replication", "megatron_config")
"""Options of LoRA that PEFT does not count as variants, yet do more than a low-rank product."""


def check_inserted(name: str, module: nn.Module) -> None:
    """Raises UnsupportedError for a module put into a remote block that servers could not apply: it would never run."""
    if isinstance(module, AuxiliaryTrainingWrapper):
        raise UnsupportedError(
            f"{name!r} in a remote block cannot be wrapped by {type(module).__name__} (modules_to_save or "
            f"trainable_token_indices): its weights are on servers and cannot be trained; {WHAT_WORKS}"
        )
    if getattr(module, "fan_in_fan_out", False):
        raise UnsupportedError(
            f"{name!r} in a remote block stores its weight as [in, out] (fan_in_fan_out, Conv1D): adapters on it are "
            f"not supported; adapt linear layers; {WHAT_WORKS}"
        )
    if type(module) not in SUPPORTED_LAYERS and not method_of(module):
        kind = f"{type(module).__module__.removeprefix('peft.tuners.')}.{type(module).__name__}"
        raise UnsupportedError(
            f"{name!r} in a remote block cannot be replaced by {kind}: servers could not apply it; {WHAT_WORKS}"
        )


def check_config(config: Any, remote_modules: Iterable[str]) -> None:
    """Raises UnsupportedError if an adapter's config asks for something that cannot work on remote modules."""
    remote_modules = list(remote_modules)
    _check_trained_modules(config, remote_modules)
    if not _targets_any(config, remote_modules):
        return
    if config.peft_type == PeftType.LORA:
        _check_lora(config)
    elif config.peft_type.value in PEFT_METHODS:
        _check_method(config)
    elif config.peft_type != PeftType.IA3:
        reason = REFUSED_METHODS.get(config.peft_type.value, "servers do not know it")
        raise UnsupportedError(f"{config.peft_type.value} cannot work on remote blocks: {reason}; {WHAT_WORKS}")


def _check_method(config: Any) -> None:
    """Refuses options of a method that servers do not know, as far as they are used: nothing is left out silently."""
    method = PEFT_METHODS[config.peft_type.value]
    for field in dataclasses.fields(config):
        if field.name in method.options or field.name in method.local or field.name in _LOCAL_FIELDS:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value, works = getattr(config, field.name), method.fixed.get(field.name, default)
        if value != works:
            raise UnsupportedError(
                f"{field.name}={value!r} of {config.peft_type.value} cannot work on remote blocks; use {works!r}"
            )


def _check_lora(config: Any) -> None:
    init = config.init_lora_weights
    # EVA does not change base weights, so a trained adapter can be loaded.
    is_loaded_eva = init == "eva" and config.inference_mode
    if isinstance(init, str) and init.lower().startswith(_READS_WEIGHTS) and not is_loaded_eva:
        raise UnsupportedError(
            f"init_lora_weights={init!r} reads base weights or activations, which are on servers; "
            "use init_lora_weights=True, 'gaussian' or 'orthogonal'"
        )
    variants = {field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")}
    if config.alora_invocation_tokens and config.target_parameters:
        raise UnsupportedError(
            "alora_invocation_tokens with target_parameters: PEFT applies aLoRA to linear layers only; leave "
            "target_parameters out"
        )
    for option in (*sorted(variants - {"use_dora", "alora_invocation_tokens"}), *_OTHER_CHANGES):
        if getattr(config, option, None):
            raise UnsupportedError(
                f"{option}={getattr(config, option)!r} cannot work on remote blocks: it needs base weights or adds "
                f"other computations to a layer; leave it out; {WHAT_WORKS}"
            )


def _check_trained_modules(config: Any, remote_modules: list[str]) -> None:
    """Refuses to train base modules as a whole."""
    indices = getattr(config, "trainable_token_indices", None)
    named = {
        "modules_to_save": list(getattr(config, "modules_to_save", None) or ()),
        "trainable_token_indices": list(indices) if isinstance(indices, dict) else [],
    }
    for option, names in named.items():
        for name in names:
            found = next((module for module in remote_modules if module.endswith(name)), None)
            if found is not None:
                raise UnsupportedError(
                    f"{option} names {name!r}, which is {found!r} of a remote block: its weights are on servers and "
                    f"cannot be trained; name only local modules (embeddings, norm, head); {WHAT_WORKS}"
                )


def _targets_any(config: Any, remote_modules: list[str]) -> bool:
    if config.peft_type == PeftType.XLORA:
        # It has no targets of its own: it replaces other adapters' forward.
        return True
    if config.peft_type == PeftType.TRAINABLE_TOKENS and config.target_modules is None:
        # The embedding, which is local.
        return False
    if getattr(config, "target_parameters", None) or getattr(config, "target_modules", None) is None:
        # Targeted parameters and PEFT's default targets lie in blocks.
        return True
    if config.target_modules == "all-linear":
        return True
    return any(check_target_module_exists(config, module) for module in remote_modules)
