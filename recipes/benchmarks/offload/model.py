"""Writes a large mixture of experts with random weights, for figures that depend only on size.

Its routers are random too, which makes caches look better than on real text; reports say so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from swarm_plugins.checkpoint.outline import meta_model
from swarm_plugins.checkpoint.range_cache import default_cache
from swarm_plugins.demo.writing import Shards, new_folder
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.model.outline import experts_modules

_ABOUT_FILE = "random_model.json"
_FORMAT = 1
_SHARD_BYTES = 500_000_000
# Tensors are windows into one table of random numbers: as fast as the disk; drawing each would take minutes.
_TABLE_VALUES = 1 << 25
_SPARE_BYTES = 1_000_000_000
_LAYERS = 16

_Shape = tuple[str, tuple[int, ...]]


def olmoe_config(scale: float = 1.0) -> PreTrainedConfig:
    """Returns the config of OLMoE-1B-7B (Muennighoff et al. 2024), with a share of its 16 layers (13.8 GB in bfloat16).

    Raises:
        ConfigError: If the share is not above 0 and at most 1.
    """
    if not 0 < scale <= 1:
        raise ConfigError(f"invalid --random-model {scale:g}: expected more than 0 and at most 1")
    config: PreTrainedConfig = AutoConfig.for_model(
        "olmoe",
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=max(1, round(_LAYERS * scale)),
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return config


def default_folder(config: PreTrainedConfig, seed: int = 0) -> Path:
    """Returns the model's folder in the cache."""
    return default_cache() / f"random-olmoe-{config.num_hidden_layers}-layers-{seed}"


def write_random_moe(
    config: PreTrainedConfig,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Path:
    """Writes an OLMoE model, shard by shard, unless the folder already holds it; experts are stored one by one.

    ``progress`` gets the bytes written and the bytes in total.

    Raises:
        ConfigError: If the folder holds something else.
        CheckpointError: If the disk has too little room.
    """
    about = {"format": _FORMAT, "seed": seed, "dtype": str(dtype), "config": json.loads(config.to_json_string())}
    if folder.exists():
        _check_same(folder, about)
        return folder
    shards = list(_shards(config, dtype))
    total = sum(math.prod(shape) for shard in shards for _, shape in shard) * dtype.itemsize
    cure = "make a smaller model: --random-model 0.1"
    with new_folder(folder, needed_bytes=total + _SPARE_BYTES, cure=cure) as out:
        config.dtype = dtype
        config.architectures = ["OlmoeForCausalLM"]
        config.save_pretrained(out)
        numbers, files = _Numbers(seed, dtype), Shards(out, len(shards))
        for shard in shards:
            files.write({name: numbers.take(name, shape) for name, shape in shard})
            progress(files.num_bytes, total)
        (out / _ABOUT_FILE).write_text(json.dumps(about, indent=1))
    return folder


def _check_same(folder: Path, about: dict[str, object]) -> None:
    try:
        found = json.loads((folder / _ABOUT_FILE).read_text())
    except (OSError, ValueError):
        found = None
    if found != about:
        raise ConfigError(f"{folder} exists and is not this random model: give another folder or remove it")


def _shards(config: PreTrainedConfig, dtype: torch.dtype) -> Iterator[list[_Shape]]:
    shard: list[_Shape] = []
    size = 0
    for name, shape in _shapes(config, dtype):
        num_bytes = math.prod(shape) * dtype.itemsize
        if shard and size + num_bytes > _SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append((name, shape))
        size += num_bytes
    yield shard


def _shapes(config: PreTrainedConfig, dtype: torch.dtype) -> Iterator[_Shape]:
    """Yields names and shapes of all tensors: HF's own, but experts one by one."""
    model = meta_model(config, dtype)
    experts = experts_modules(model)
    inside = {id(parameter) for module in experts.values() for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            yield name, tuple(parameter.shape)
    inner, width = config.intermediate_size, config.hidden_size
    for layer in experts:
        for expert in range(config.num_experts):
            for name, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
                yield f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight", shape


class _Numbers:
    """An endless supply of normal random numbers."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._table = torch.randn(_TABLE_VALUES, generator=self._generator).to(dtype)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._table.dtype)
        values = torch.empty(math.prod(shape), dtype=self._table.dtype)
        half = _TABLE_VALUES // 2
        for piece in values.split(half):
            start = int(torch.randint(half, (), generator=self._generator))
            piece.copy_(self._table[start : start + len(piece)])
        # Scaled by the root of the input width, so that activations keep their size; embeddings have no inputs.
        return values.mul_(1.0 if "embed" in name else shape[-1] ** -0.5).reshape(shape)
