"""Experts of a span that stay on disk: a server with little memory hosts more blocks."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from swarm_plugins.checkpoint import Checkpoint, layer_list_name
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.ahead.prefetch import install_prefetch
from swarm_plugins.offload.cache.cache import make_cache
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.interfaces import ExpertCache
from swarm_plugins.offload.model.attach import attach_experts, check_budget, formats_of
from swarm_plugins.offload.model.moe_checkpoint import MoeCheckpoint
from swarm_plugins.offload.store.quantized_store import QuantizedStore

__all__ = ["offload_experts", "offloaded_parts", "quantized_linears"]


def offloaded_parts(
    checkpoint: Checkpoint,
    store: QuantizedStore | None,
    blocks: range,
    quantization: str,
    config: OffloadConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> MoeCheckpoint:
    """Finds the experts of a span.

    Args:
        checkpoint: The model.
        store: What `swarm quantize` made of it, if the checkpoint is that.
        blocks: The span's blocks.
        quantization: Of the other weights; must be ``none``.
        config: The settings.
        dtype: Floating type to compute in.
        device: Where the span computes.

    Raises:
        ConfigError: If settings contradict each other.
        CapacityError: If the budget does not hold one expert for each reader and one to compute with.
        CheckpointError: If a tensor is missing, truncated or of a wrong shape.
        UnsupportedError: If the blocks have no experts, or experts that cannot be offloaded.
    """
    if quantization != "none":
        raise ConfigError(
            f"quantization is {quantization!r} and experts are offloaded: give the width of the experts by "
            "expert_bits (bits=4 in --offload), and leave quantization at 'none'"
        )
    if config.other_bits not in (None, 16, None if store is None else store.manifest.other_bits):
        raise ConfigError(
            f"other_bits is {config.other_bits}: a span keeps its other weights as they are, leave it out"
        )
    moe = MoeCheckpoint.inspect(checkpoint, store, dtype=dtype, layers=blocks)
    check_budget(moe, formats_of(moe, config, device), config, device)
    moe.fetch()
    return moe


def quantized_linears(moe: MoeCheckpoint | None, layer_path: str, blocks: range) -> dict[str, str]:
    """Returns the names of the quantized linear layers of some blocks, and their paths in the span's model.

    Args:
        moe: What a store consists of; anything else has none.
        layer_path: Path of the layer list in the span's model.
        blocks: The blocks.
    """
    if moe is None or moe.quantized is None:
        return {}
    whole = layer_list_name(moe.outline)
    return {
        name: layer_path + name.removeprefix(whole)
        for name in moe.quantized.manifest.linears
        if any(name.startswith(f"{whole}.{block}.") for block in blocks)
    }


def offload_experts(
    model: PreTrainedModel, moe: MoeCheckpoint, config: OffloadConfig, device: torch.device
) -> ExpertCache | None:
    """Makes the experts of a span borrow their weights from memory of bounded size.

    Args:
        model: HF's base model, cut down to the span.
        moe: Where the experts are.
        config: Budgets.
        device: Where the span computes.

    Returns:
        What lends them; None if the span has none.

    Raises:
        CapacityError: If the budget does not hold one expert for each reader and one to compute with.
    """
    if not moe.paths:
        return None
    formats = formats_of(moe, config, device)
    cache = make_cache(moe.store, formats, config, device)
    attach_experts(model, moe, formats, cache, device)
    install_prefetch(model, cache)
    return cache
