"""Attaches offloaded experts to a model that was loaded without them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.ahead.announce import ReadingAhead
from swarm_plugins.offload.ahead.prefetch import install_prefetch
from swarm_plugins.offload.cache.budget import choose_fast_bytes
from swarm_plugins.offload.cache.cache import BoundedCache, make_cache
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.formats.experts import expert_format
from swarm_plugins.offload.formats.published import PublishedExperts
from swarm_plugins.offload.interfaces import ExpertFormat
from swarm_plugins.offload.model.experts import IMPLEMENTATION, turn_into_offloaded
from swarm_plugins.offload.model.loans import ExpertLoans
from swarm_plugins.offload.model.moe_checkpoint import MoeCheckpoint
from swarm_plugins.offload.model.outline import check_picks
from swarm_plugins.offload.model.peft_wrappers import AdapterWatch
from swarm_plugins.weights.widths import width_text


def formats_of(moe: MoeCheckpoint, settings: OffloadConfig, device: torch.device) -> dict[int, ExpertFormat]:
    """Returns how to multiply with the experts of each layer.

    Raises:
        ConfigError: If the experts are stored in other bits than the settings ask for.
    """
    store = moe.quantized
    if store is None:
        _check_published(moe, settings)
        return {layer: _format_of(moe, layer, settings, device) for layer in moe.paths}
    for what, asked, stored in (
        ("expert_bits", settings.expert_bits, store.manifest.expert_bits),
        ("other_bits", settings.other_bits, moe.other_bits),
    ):
        if asked is not None and stored is not None and asked != stored:
            raise ConfigError(
                f"{what} is {asked}, but {moe.checkpoint.name} holds {width_text(stored)}: leave {what} out, or give "
                f"the model that it was made from, {store.manifest.base}"
            )
    return {layer: store.format(layer, moe.dtype, device) for layer in moe.paths}


def _format_of(moe: MoeCheckpoint, layer: int, settings: OffloadConfig, device: torch.device) -> ExpertFormat:
    stored = moe.store.stored_layout(layer)
    if layer in moe.packed:
        return PublishedExperts(stored, moe.packed[layer], device)
    is_transposed = moe.is_transposed[layer]
    return expert_format(stored, settings.expert_bits, moe.dtype, device, is_transposed=is_transposed)


def _check_published(moe: MoeCheckpoint, settings: OffloadConfig) -> None:
    if moe.placing is None:
        return
    for what, asked in (("expert_bits", settings.expert_bits), ("other_bits", settings.other_bits)):
        if asked is not None:
            raise ConfigError(
                f"{what} is {asked}, but {moe.checkpoint.name} is published as {moe.placing.published.name}: leave "
                f"{what} out, its weights stay as they are"
            )


def check_budget(
    moe: MoeCheckpoint, formats: Mapping[int, ExpertFormat], settings: OffloadConfig, device: torch.device
) -> None:
    """Checks a given budget against the headers, before gigabytes are downloaded or read for nothing.

    Raises:
        CapacityError: If it is too small to compute with.
    """
    if settings.fast_bytes is not None:
        sizes = {layer: form.computed.num_bytes for layer, form in formats.items()}
        choose_fast_bytes(settings, sizes, moe.store.num_experts, device)


def attach_experts(
    model: PreTrainedModel, moe: MoeCheckpoint, settings: OffloadConfig, device: torch.device
) -> BoundedCache:
    """Makes the experts of a model borrow their weights from memory of bounded size; returns the lender.

    The files of the experts have been fetched. Nothing is read or allocated yet.

    Raises:
        CapacityError: If the memory is too small to compute with.
    """
    formats = formats_of(moe, settings, device)
    cache = make_cache(moe.store, formats, settings, device)
    cache.check_picks(check_picks(moe.outline, moe.paths, moe.checkpoint.name))
    # Paths start at the whole model; a base model lies at its prefix there.
    prefix = f"{moe.outline.base_model_prefix}." if model.base_model is model else ""
    ahead = ReadingAhead(cache, cache.num_experts if cache.config.prefetch else {})
    for layer, whole_path in moe.paths.items():
        path = whole_path.removeprefix(prefix)
        loans = ExpertLoans(layer, formats[layer], cache, ahead)
        turn_into_offloaded(model.get_submodule(path), moe.outline.get_submodule(whole_path), device, loans)
        model.get_submodule(path.rpartition(".")[0]).register_forward_pre_hook(AdapterWatch())
    model.set_experts_implementation(IMPLEMENTATION)
    install_prefetch(model, cache)
    # Copies of the model share the loans and what these share, not the model, and layers may be taken out of either.
    weakref.finalize(ahead, cache.close)
    return cache
