"""Loads a mixture-of-experts model as HF's own class, its experts left where they are."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from swarm_plugins.checkpoint import Checkpoint, model_from_tensors
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.experts import IMPLEMENTATION
from swarm_plugins.offload.formats.plain import PlainFormat
from swarm_plugins.offload.interim_cache import make_cache
from swarm_plugins.offload.layout import locate_experts
from swarm_plugins.offload.loans import ExpertLoans
from swarm_plugins.offload.model_sizes import experts_modules, stored_dtype
from swarm_plugins.offload.sources import CheckpointStore
from swarm_plugins.offload.standin import turn_into_offloaded
from swarm_plugins.offload.types import ExpertFormat

__all__ = ["load_offloaded"]

_TASKS: tuple[Mapping[Any, Any], ...] = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)


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
    checkpoint = Checkpoint.open(name_or_dir, revision=revision)
    place = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    compute_dtype = dtype or getattr(checkpoint.config, "dtype", None) or stored_dtype(checkpoint)
    model_class = _model_class(checkpoint)
    outline = _outline(model_class, checkpoint.config, compute_dtype)
    paths = _experts_paths(outline, checkpoint)
    located = locate_experts(outline, paths, checkpoint.tensors)
    files = {
        info.file for tensors in located.experts.values() for one in tensors for group in one.groups for info in group
    }
    store = CheckpointStore(located.experts, {file: checkpoint.file_path(file) for file in sorted(files)})
    formats = {
        layer: _format(store, layer, outline.get_submodule(path), compute_dtype) for layer, path in paths.items()
    }
    model = model_from_tensors(
        _class_without_experts(model_class, list(paths.values())),
        checkpoint.config,
        checkpoint.read(located.others),
        compute_dtype,
        checkpoint.name,
    )
    model.__class__ = model_class
    model.to(place)  # type: ignore[arg-type]  # the wrapper around it has lost its signature
    _attach(model, outline, paths, formats, make_cache(store, formats, settings, place), place)
    model.name_or_path = checkpoint.name
    generation = checkpoint.generation_config()
    if generation is not None and model.can_generate():
        model.generation_config = generation
    return model


def _model_class(checkpoint: Checkpoint) -> type[PreTrainedModel]:
    """Returns the class that the config names, if it is for a task that is supported, or the causal language model."""
    config = checkpoint.config
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{checkpoint.name} is stored quantized ({config.quantization_config}): give the unquantized checkpoint; "
            "its experts can be quantized with OffloadConfig(expert_bits=...)"
        )
    found: list[type[PreTrainedModel]] = []
    for task in _TASKS:
        if type(config) in task:
            known = task[type(config)]
            found.extend(known if isinstance(known, (tuple, list)) else [known])
    for one in found:
        if one.__name__ in (config.architectures or ()):
            return one
    if not found:
        raise UnsupportedError(
            f"transformers has no language model for model_type {config.model_type!r} of {checkpoint.name}; supported "
            "are decoder-only mixture-of-experts models"
        )
    return found[0]


def _outline(model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return model_class(copy.deepcopy(config))
    finally:
        torch.set_default_dtype(before)


def _experts_paths(outline: PreTrainedModel, checkpoint: Checkpoint) -> dict[int, str]:
    """Returns the path of the fused experts of each layer that has any."""
    names = {module: name for name, module in outline.named_modules()}
    paths = {layer: names[module] for layer, module in experts_modules(outline).items()}
    if paths:
        return paths
    others = {type(module).__name__ for name, module in outline.named_modules() if name.endswith(".experts")}
    if others:
        raise UnsupportedError(
            f"the experts of {checkpoint.name} ({', '.join(sorted(others))}) do not run through transformers' experts "
            "interface, so they cannot be offloaded: load the model with transformers itself"
        )
    raise UnsupportedError(
        f"{checkpoint.name} ({type(outline).__name__}) has no experts: mixture-of-experts models can be offloaded, "
        "load a dense one with transformers itself"
    )


def _format(store: CheckpointStore, layer: int, module: nn.Module, dtype: torch.dtype) -> ExpertFormat:
    is_transposed = store.is_transposed(layer) != bool(module.is_transposed)
    return PlainFormat(store.stored_layout(layer), dtype, is_transposed=is_transposed)


def _class_without_experts(model_class: type[PreTrainedModel], paths: list[str]) -> type[PreTrainedModel]:
    """Makes a subclass that constructs itself without the weights of experts, for the time of loading."""

    def init(self: Any, config: PreTrainedConfig) -> None:
        model_class.__init__(self, config)
        for path in paths:
            module = self.get_submodule(path)
            module._parameters.clear()
            # Or transformers would initialise what it thinks is missing.
            module._is_hf_initialized = True

    # HF looks conversions up by the class's name and capabilities by its module's source.
    attributes = {"__init__": init, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), attributes)


def _attach(
    model: PreTrainedModel,
    outline: PreTrainedModel,
    paths: Mapping[int, str],
    formats: Mapping[int, ExpertFormat],
    cache: Any,
    device: torch.device,
) -> None:
    for layer, path in paths.items():
        loans = ExpertLoans(layer, formats[layer], cache)
        turn_into_offloaded(model.get_submodule(path), outline.get_submodule(path), device, loans)
    model.set_experts_implementation(IMPLEMENTATION)
    weakref.finalize(model, cache.close)
