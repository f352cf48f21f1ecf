"""Loads a mixture-of-experts model as HF's own class, its experts left where they are."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.adapters import take_over_adapters
from swarm_plugins.offload.cache import BoundedCache, make_cache
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.experts import IMPLEMENTATION
from swarm_plugins.offload.formats.choice import expert_format
from swarm_plugins.offload.linears import quantize_linears
from swarm_plugins.offload.loans import ExpertLoans
from swarm_plugins.offload.parts import Parts, find_parts, load_rest
from swarm_plugins.offload.standin import turn_into_offloaded
from swarm_plugins.offload.types import ExpertFormat

__all__ = ["load_offloaded"]


def load_offloaded(
    name_or_dir: str | Path,
    config: OffloadConfig | None = None,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> PreTrainedModel:
    """Loads a model whose experts stay on disk, a bounded set of them in memory.

    The model is of HF's own class and works with whatever takes one: ``generate``, PEFT, Trainers. Its experts are
    read from the original files when a token is routed to them, and cannot be changed; LoRA on them works.

    Args:
        name_or_dir: A directory, or the id of a repository on the Hub, whose files are downloaded first.
        config: Budgets in bytes; by default what is free.
        revision: Branch, tag or commit on the Hub.
        dtype: Floating type to compute in; None: the checkpoint's.
        device: Where to compute; None: a CUDA device if there is one, else the CPU.

    Returns:
        The model, in evaluation mode.

    Raises:
        ConfigError: If there is no such model.
        CheckpointError: If a file or tensor is missing, truncated or of a wrong shape; names it.
        UnsupportedError: If the model has no experts, or experts that cannot be offloaded.
        CapacityError: If the budget does not hold the experts of one token.
    """
    settings = config or OffloadConfig()
    place = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    parts = find_parts(name_or_dir, revision=revision, dtype=dtype)
    formats = _formats(parts, settings, place)
    model = load_rest(parts)
    if settings.other_bits in (4, 8) and parts.other_bits is None:
        quantize_linears(model, settings.other_bits)
    model.to(place)  # type: ignore[arg-type]  # the wrapper around it has lost its signature
    _attach(model, parts, formats, make_cache(parts.store, formats, settings, place), place)
    return model


def _formats(parts: Parts, settings: OffloadConfig, device: torch.device) -> dict[int, ExpertFormat]:
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
                f"{what} is {asked}, but {parts.checkpoint.name} holds {stored} bits: leave {what} out, or give the "
                f"model that it was made from, {store.manifest.base}"
            )
    return {layer: store.format(layer, parts.dtype, device) for layer in parts.paths}


def _attach(
    model: PreTrainedModel,
    parts: Parts,
    formats: Mapping[int, ExpertFormat],
    cache: BoundedCache,
    device: torch.device,
) -> None:
    loans = {layer: ExpertLoans(layer, form, cache) for layer, form in formats.items()}
    for layer, path in parts.paths.items():
        turn_into_offloaded(model.get_submodule(path), parts.outline.get_submodule(path), device, loans[layer])
        model.get_submodule(path.rpartition(".")[0]).register_forward_pre_hook(take_over_adapters)
    model.set_experts_implementation(IMPLEMENTATION)
    # A function: a bound method would be copied with the model, cache and all.
    model.offload_stats = lambda: cache.stats()  # type: ignore[assignment]
    # Copies of the model share the loans, not the model.
    weakref.finalize(next(iter(loans.values())), cache.close)
