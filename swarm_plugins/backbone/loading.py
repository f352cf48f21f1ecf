"""Builds HF's own model class with remote blocks; reads and holds only the client's share of the weights.

Blocks at both ends may run here, so that servers see neither first nor last hidden states. They are HF's own layers
with real weights. They need the masks of an attention implementation of their own, while remote blocks need the plain
padding mask; see `register_attention`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from swarm_plugins.adapter_saves import sign_adapters
from swarm_plugins.backbone.attention import refuse_continuous_batching, register_attention
from swarm_plugins.backbone.decoder_layer import make_remote
from swarm_plugins.backbone.local_checks import check_apart, check_caches
from swarm_plugins.backbone.own_cache import own_cache_name, take_common_cache
from swarm_plugins.backbone.probe import probe_layer_loop
from swarm_plugins.backbone.saving import save_only_what_is_here
from swarm_plugins.checkpoint import (
    Checkpoint,
    block_tensors,
    client_tensors,
    find_layers,
    layer_list_name,
    model_from_tensors,
)
from swarm_plugins.checkpoint.conversions import Conversions
from swarm_plugins.checkpoint.hollow import keep_from_ddp
from swarm_plugins.checkpoint.loading import config_for, leave_unscaled, take_generation_config
from swarm_plugins.checkpoint.outline import build_outline
from swarm_plugins.checkpoint.partition import decoder_of, num_blocks_of
from swarm_plugins.checkpoint.ties import untie
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.weights.heads import quicken_head
from swarm_plugins.weights.published.placing import place, plain_names
from swarm_plugins.weights.published.weights import Published

if TYPE_CHECKING:
    from swarm_plugins.backbone.stack import RemoteStack

_SHARE = "the part that runs here: servers hold the blocks"
_LOCAL = " except local_blocks"


def load_remote(
    base_class: type[PreTrainedModel],
    checkpoint: Checkpoint,
    stack: RemoteStack,
    *,
    name: str,
    dtype: torch.dtype | str | None,
    device: str,
    config_changes: Mapping[str, Any],
) -> PreTrainedModel:
    """Returns a model of HF's ``base_class`` whose decoder layers are remote; see ``from_pretrained``.

    Raises:
        CheckpointError: If a tensor cannot be read or has a wrong shape, or the config is wrong.
        UnsupportedError: If the model needs a package that is not installed.
    """
    published = Published.of(checkpoint)
    config = config_for(base_class, copy.deepcopy(checkpoint.config))
    # transformers would make packed layers of its own.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for setting, value in config_changes.items():
        setattr(config, setting, value)
    leave_unscaled(config)
    outline = build_outline(base_class, config, torch.float32, name)
    path, conversions = layer_list_name(outline), Conversions(outline)
    check_apart(outline, path, stack)
    # Not the tower of a checkpoint whose language model alone is asked for.
    share, local = client_tensors(checkpoint, path), _local_tensors(checkpoint, path, stack.blocks)
    placing = None
    if published is not None:
        placing = place(published, outline, {name: name for name in (*share, *local)})
        share, local = plain_names(placing, share), plain_names(placing, local)
    own = [name for name in share if conversions.is_known(conversions.target(name)[0])]

    def trim(model: PreTrainedModel) -> None:
        make_remote(find_layers(model), stack, device)
        untie(model, path, [index for index in range(stack.num_blocks) if index not in stack.blocks])

    tensors = checkpoint.read([*own, *local], what=_SHARE + (_LOCAL if local else ""))
    if placing is not None:
        # What is packed here as well is widened: a head, blocks at the ends.
        tensors.update(placing.widened(torch.float32))
    model = model_from_tensors(
        base_class,
        config,
        tensors,
        "auto" if dtype is None else dtype,
        name,
        trim=trim,
        may_lack=lambda weight: not weight.startswith(f"{path}."),
    )
    model.to(torch.device(device))  # type: ignore[arg-type]  # its wrapper lacks the signature
    attention = _keep_attention(model, find_layers(model), stack.blocks) if local else None
    decoder = decoder_of(model, path)
    # Not by the model's method, which refuses families without an interface for attention: theirs is never called.
    has_images = decoder is not model.base_model
    decoder.config._attn_implementation = register_attention(attention, has_images=has_images)
    _take_caches(model, checkpoint.config, decoder, stack)
    stack.watch(decoder)
    if not local:
        # transformers refuses drafts for models with states; servers take states back.
        model._is_stateful = False
    save_only_what_is_here(model)
    keep_from_ddp(model)
    sign_adapters(model, stack.version)
    model.init_continuous_batching = refuse_continuous_batching  # type: ignore[assignment]
    _learn_layers(model, outline, stack, device)
    take_generation_config(model, checkpoint)
    quicken_head(model)
    return model


def _learn_layers(model: PreTrainedModel, outline: PreTrainedModel, stack: RemoteStack, device: str) -> None:
    """Finds out what passes between layers, and whether some of them may run here."""
    if outline._can_set_experts_implementation():
        outline.set_experts_implementation("batched_mm")  # needs no values to know shapes
    layers = find_layers(outline)
    probe_layer_loop(model.base_model, stack, device, layers[0])
    check_caches(decoder_of(model, layer_list_name(model)), stack)


def _take_caches(
    model: PreTrainedModel, config: PreTrainedConfig, decoder: PreTrainedModel, stack: RemoteStack
) -> None:
    """Lets a model that keeps states by means of its own take caches of transformers."""
    stack.own_cache = own_cache_name(config, decoder)
    if stack.own_cache is None and not hasattr(decoder, "_setup_cache"):
        return
    if any(stack.local_blocks):
        raise UnsupportedError(
            f"local_blocks={stack.local_blocks} cannot work with {type(model).__name__}, whose states are not in a "
            "cache of transformers: leave all blocks to servers (local_blocks=(0, 0))"
        )
    take_common_cache(model, decoder.config, stack.own_cache)


def _local_tensors(checkpoint: Checkpoint, layer_path: str, remote: range) -> list[str]:
    """Returns the checkpoint's names of the tensors of all blocks outside ``remote``.

    Raises:
        CheckpointError: If a block has no tensor.
    """
    num_blocks = num_blocks_of(checkpoint.config)
    parts = (range(remote.start), range(remote.stop, num_blocks))
    return [name for part in parts if part for name in block_tensors(checkpoint, layer_path, part)]


def choose_experts(model: PreTrainedModel) -> None:
    """Runs the experts on a CPU as servers do, unless the config names a way: the same bits, and faster there."""
    is_default = model.config._experts_implementation == "grouped_mm"
    if is_default and model.device.type == "cpu" and model._can_set_experts_implementation():
        model.set_experts_implementation("swarm_table")


def _keep_attention(model: PreTrainedModel, layers: nn.ModuleList, remote: range) -> str:
    """Gives local layers a config of their own that keeps the model's attention; returns its name."""
    attention: str = model.config._attn_implementation
    choose_experts(model)
    copies: dict[int, PreTrainedConfig] = {}
    for index, layer in enumerate(layers):
        for module in layer.modules() if index not in remote else ():
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                module.config = copies.setdefault(id(config), copy.deepcopy(config))  # type: ignore[assignment]
    return attention
