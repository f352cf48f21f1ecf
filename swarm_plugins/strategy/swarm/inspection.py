"""Checks before the first batch that a module can be trained where its blocks are."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from swarm_plugins.backbone.context import OnThisMachine, Place
from swarm_plugins.backbone.decoder_layer import RemoteDecoderLayer
from swarm_plugins.backbone.standin import StandIn
from swarm_plugins.checkpoint.loading import marked_base
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.versions import ModelVersion


def placed_models(module: nn.Module) -> dict[str, ModelVersion]:
    """Returns the version of each base model whose blocks have a place: on a swarm, offloaded, or in memory here.

    The keys are names of the innermost modules that hold the lists of blocks (HF's ``LlamaModel``, say).
    """
    found: dict[str, ModelVersion] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        version = marked_base(part)
        if version is not None:
            found[name] = version
        elif isinstance(part, RemoteDecoderLayer):
            # model.layers.0 -> model
            found[".".join(name.split(".")[:-2])] = part.swarm_stack.version
    return found


def is_placed(module: nn.Module) -> bool:
    """Returns whether a base model in a module was loaded where the strategy says."""
    return any(isinstance(part, RemoteDecoderLayer) or marked_base(part) is not None for part in module.modules())


def base_versions(module: nn.Module) -> list[ModelVersion]:
    """Returns the versions of the base models, each once, in order."""
    return list(dict.fromkeys(placed_models(module).values()))


def check_placed(module: nn.Module, place: Place | None) -> None:
    """Checks that a base model was loaded where the strategy says.

    Raises:
        UnsupportedError: If there is none, or it has its blocks on a swarm although it should be on this machine.
    """
    if not is_placed(module):
        raise UnsupportedError(
            f"{type(module).__name__} has no block on the swarm, but strategy 'swarm' was asked for: load the model "
            "in configure_model() with swarm_plugins.AutoSwarmModelForCausalLM.from_pretrained(name), not as a local "
            "model in __init__; to train a local model use strategy='auto'"
        )
    if isinstance(place, OnThisMachine) and any(isinstance(part, RemoteDecoderLayer) for part in module.modules()):
        raise UnsupportedError(
            f"the blocks of {type(module).__name__} are on a swarm, but the strategy was told to run them on this "
            "machine (offload): load the model in configure_model(), or inside fabric.init_module(), without "
            "initial_peers and connection"
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
