"""Puts offloaded experts into a model that was loaded without any."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.ahead.announce import ReadingAhead
from swarm_plugins.offload.ahead.trial import PayTrial
from swarm_plugins.offload.cache.budget import choose_fast_bytes
from swarm_plugins.offload.cache.cache import BoundedCache
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.formats.experts import expert_format
from swarm_plugins.offload.interfaces import ExpertFormat
from swarm_plugins.offload.model.adapters import AdapterWatch
from swarm_plugins.offload.model.experts import IMPLEMENTATION
from swarm_plugins.offload.model.loans import ExpertLoans
from swarm_plugins.offload.model.parts import Parts
from swarm_plugins.offload.model.standin import turn_into_offloaded
from swarm_plugins.offload.widths import width_text

__all__ = ["attach_experts", "check_budget", "formats_of"]


def formats_of(parts: Parts, settings: OffloadConfig, device: torch.device) -> dict[int, ExpertFormat]:
    """Returns how to multiply with the experts of each layer.

    Raises:
        ConfigError: If the experts are stored in other bits than is asked for.
    """
    store = parts.quantized
    if store is None:
        return {
            layer: expert_format(
                parts.store.stored_layout(layer),
                settings.expert_bits,
                parts.dtype,
                device,
                is_transposed=parts.is_transposed[layer],
            )
            for layer in parts.paths
        }
    for what, asked, stored in (
        ("expert_bits", settings.expert_bits, store.manifest.expert_bits),
        ("other_bits", settings.other_bits, parts.other_bits),
    ):
        if asked is not None and stored is not None and asked != stored:
            raise ConfigError(
                f"{what} is {asked}, but {parts.checkpoint.name} holds {width_text(stored)}: leave {what} out, or give "
                f"the model that it was made from, {store.manifest.base}"
            )
    return {layer: store.format(layer, parts.dtype, device) for layer in parts.paths}


class _Shared:
    """Exists as long as any layer's loans do."""


def check_budget(
    parts: Parts, formats: Mapping[int, ExpertFormat], settings: OffloadConfig, device: torch.device
) -> None:
    """Checks a budget that was given against the headers, before gigabytes are downloaded or read for nothing.

    Raises:
        CapacityError: If it is too small to compute with.
    """
    if settings.fast_bytes is not None:
        sizes = {layer: form.computed.num_bytes for layer, form in formats.items()}
        choose_fast_bytes(settings, sizes, parts.store.num_experts, device)


def attach_experts(
    model: PreTrainedModel,
    parts: Parts,
    formats: Mapping[int, ExpertFormat],
    cache: BoundedCache,
    device: torch.device,
) -> None:
    """Makes the experts of a model borrow their weights.

    Args:
        model: The model that the parts were found for, or its base model; its experts have no weights.
        parts: Where the experts are.
        formats: What their bytes mean, by layer.
        cache: Lends them. It is closed when nothing borrows from it any more.
        device: Where they compute.
    """
    # The parts' paths start at the whole model; a base model is what its prefix names there.
    prefix = f"{parts.outline.base_model_prefix}." if model.base_model is model else ""
    trial = PayTrial() if cache.config.prefetch == "auto" else None
    ahead = ReadingAhead(cache, cache.num_experts, trial) if cache.config.prefetch else None
    shared = _Shared()
    loans = {layer: ExpertLoans(layer, form, cache, ahead, shared) for layer, form in formats.items()}
    for layer, whole_path in parts.paths.items():
        path = whole_path.removeprefix(prefix)
        turn_into_offloaded(model.get_submodule(path), parts.outline.get_submodule(whole_path), device, loans[layer])
        model.get_submodule(path.rpartition(".")[0]).register_forward_pre_hook(AdapterWatch())
    model.set_experts_implementation(IMPLEMENTATION)
    # Copies of the model share the loans, not the model, and layers may be taken out of either.
    weakref.finalize(shared, cache.close)
