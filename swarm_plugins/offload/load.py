"""Loads a mixture-of-experts model as HF's own class and leaves its experts on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from swarm_plugins.checkpoint.hollow import keep_from_ddp
from swarm_plugins.checkpoint.loading import mark_base
from swarm_plugins.offload.cache.budget import choose_device
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.model.attach import attach_experts, check_budget, formats_of
from swarm_plugins.offload.model.moe_checkpoint import MoeCheckpoint
from swarm_plugins.offload.model.saving import refuse_saving
from swarm_plugins.weights.choice import width_on
from swarm_plugins.weights.linears import quantize_linears


def load_offloaded(
    name_or_dir: str | Path,
    config: OffloadConfig | None = None,
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
) -> PreTrainedModel:
    """Loads a model whose experts stay on disk, with a bounded set of them in memory.

    The model has HF's own class and works with ``generate``, PEFT and Trainers. Its experts are read from the original
    files when a token is routed to them, and cannot be changed; LoRA on them works.

    Args:
        name_or_dir: A directory, or the id of a repository on the Hub, whose files are downloaded once the budget has
            been found large enough.
        config: Budgets in bytes; by default what is free.
        revision: Branch, tag or commit on the Hub.
        dtype: Floating type to compute in, or its name such as ``bfloat16``; None or ``auto``: the checkpoint's.
        device: Where to compute; None: a CUDA device if there is one, else the CPU.
        token: Access token of the Hub.
        cache_dir: Cache of the Hub's files.

    Returns:
        The model, in evaluation mode.

    Raises:
        ConfigError: If there is no such model or device, or ``dtype`` is not a supported floating type.
        CheckpointError: If a file or tensor is missing, truncated or of a wrong shape; names it.
        UnsupportedError: If the model has no experts, or experts that cannot be offloaded.
        CapacityError: If the budget does not hold one expert of the largest size for each reader and one to compute
            with.
    """
    settings = config or OffloadConfig()
    place = choose_device(device)
    moe = MoeCheckpoint.open(name_or_dir, revision=revision, dtype=dtype, token=token, cache_dir=cache_dir)
    check_budget(moe, formats_of(moe, settings, place), settings, place)
    moe.store.fetch()
    model = moe.load_rest(place)
    if settings.other_bits not in (None, 16) and moe.other_bits is None:
        quantize_linears(model, width_on(settings.other_bits, place))
    cache = attach_experts(model, moe, settings, place)
    # A function: a bound method would be copied with the model, cache and all.
    model.offload_stats = lambda: cache.stats()  # type: ignore[assignment]
    mark_base(model, moe.base_version)
    keep_from_ddp(model)
    refuse_saving(model)
    # A compiled graph cannot hold experts that come and go; generate() would make one for a static cache on CUDA.
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.disable_compile = True
    return model
