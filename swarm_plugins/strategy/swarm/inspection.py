"""Checks before the first batch that a module can be trained on the swarm."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from swarm_plugins.backbone.decoder_layer import RemoteDecoderLayer
from swarm_plugins.backbone.standin import StandIn
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.versions import ModelVersion


def remote_models(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the innermost modules that hold a list of remote blocks, by name (HF's ``LlamaModel``, say)."""
    found: dict[str, nn.Module] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, RemoteDecoderLayer):
            # model.layers.0 -> model
            path = name.split(".")[:-2]
            found[".".join(path)] = module.get_submodule(".".join(path))
    return found


def has_remote_blocks(module: nn.Module) -> bool:
    """Returns whether some decoder layer of a module runs on the swarm."""
    return any(isinstance(part, RemoteDecoderLayer) for part in module.modules())


def base_versions(module: nn.Module) -> list[ModelVersion]:
    """Returns the versions of the base models whose blocks are remote, each once, in order."""
    versions = (part.swarm_stack.version for part in module.modules() if isinstance(part, RemoteDecoderLayer))
    return list(dict.fromkeys(versions))


def check_remote(module: nn.Module) -> None:
    """Checks that some block is remote.

    Raises:
        UnsupportedError: If none is.
    """
    if not has_remote_blocks(module):
        raise UnsupportedError(
            f"{type(module).__name__} has no block on the swarm, but strategy 'swarm' was asked for: load the model "
            "in configure_model() with swarm_plugins.AutoSwarmModelForCausalLM.from_pretrained(name), not as a local "
            "model in __init__; to train a local model use strategy='auto'"
        )


def check_trainable(module: nn.Module) -> None:
    """Checks that some parameters are trainable and others frozen.

    Raises:
        ConfigError: If nothing is trainable, or nothing is frozen.
    """
    frozen = [not parameter.requires_grad for parameter in _parameters_here(module)]
    cure = (
        "wrap the model with peft.get_peft_model(model, LoraConfig(...)) in configure_model(), or choose what to "
        "train with requires_grad_()"
    )
    if all(frozen):
        raise ConfigError(
            f"nothing to train: none of the {len(frozen)} tensors of {type(module).__name__} that live here requires "
            f"a gradient (servers never change theirs); {cure}"
        )
    if not any(frozen):
        raise ConfigError(
            f"{type(module).__name__} has no adapter: nothing is frozen, so embeddings and head of the base model "
            f"would be trained, and no block; {cure}"
        )


def _parameters_here(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters whose values are on this machine."""
    seen: set[int] = set()
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if not isinstance(part, StandIn) and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter
