"""A mixture-of-experts model taken apart: where its experts are, and HF's own class with all the rest."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.offload.formats.linears import replace_module
from swarm_plugins.offload.model.outline import (
    build_outline,
    check_picks,
    experts_modules,
    refuse_quantized,
    stored_dtype,
)
from swarm_plugins.offload.store.checkpoint_store import CheckpointStore
from swarm_plugins.offload.store.locate import locate_experts
from swarm_plugins.offload.store.quantized_store import QuantizedStore, is_quantized_store, open_quantized
from swarm_plugins.offload.widths import Width

__all__ = ["Parts", "find_parts", "load_rest", "parts_of"]

_TASKS: tuple[Mapping[Any, Any], ...] = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a checkpoint consists of."""

    checkpoint: Checkpoint
    config: PreTrainedConfig
    dtype: torch.dtype
    """To compute in."""
    model_class: type[PreTrainedModel]
    outline: PreTrainedModel
    """The whole model on the meta device."""
    paths: Mapping[int, str]
    """Of the fused experts, by index of the layer."""
    store: CheckpointStore | QuantizedStore
    """Of which no file has been fetched."""
    is_transposed: Mapping[int, bool]
    """Whether weights of experts lie as ``[in, out]``, by index of the layer."""
    others: list[str]
    """Names, in the checkpoint, of all tensors that are plain weights of the rest."""
    quantized: QuantizedStore | None
    """The store, if it is one that `swarm quantize` made."""

    @property
    def other_bits(self) -> Width | None:
        """Width of the other weights if they are quantized, else None."""
        bits = None if self.quantized is None else self.quantized.manifest.other_bits
        return None if bits == 16 else bits

    def fetch(self) -> None:
        """Brings the files of the experts here: on the Hub, gigabytes.

        Raises:
            CheckpointError: If a file is missing or cannot be fetched.
        """
        self.store.fetch()


def find_parts(name_or_dir: str | Path, *, revision: str | None = None, dtype: torch.dtype | None = None) -> Parts:
    """Finds the experts of a model, and what else it has, from the headers of its files.

    Args:
        name_or_dir: A directory, or the id of a repository on the Hub.
        revision: Branch, tag or commit on the Hub; for a quantized store, the revision of the model that it was made
            from.
        dtype: Floating type to compute in; None: the checkpoint's.

    Raises:
        ConfigError: If there is no such model, or ``dtype`` is none to compute in.
        CheckpointError: If a file or tensor is missing, truncated or of a wrong shape; names it.
        UnsupportedError: If the model has no experts, or experts that cannot be offloaded.
    """
    is_store = is_quantized_store(name_or_dir)
    checkpoint = Checkpoint.open(name_or_dir, revision=None if is_store else revision)
    return parts_of(checkpoint, open_quantized(checkpoint, base_revision=revision if is_store else None), dtype=dtype)


def parts_of(
    checkpoint: Checkpoint,
    quantized: QuantizedStore | None = None,
    *,
    dtype: torch.dtype | None = None,
    layers: range | None = None,
) -> Parts:
    """Finds the experts of a checkpoint that is open, from the headers of its files.

    Args:
        checkpoint: The model.
        quantized: The store of its experts, if it is one.
        dtype: Floating type to compute in; None: the checkpoint's.
        layers: The layers whose experts are wanted; None: all. A quantized store need not have any in them.

    Raises:
        ConfigError: If ``dtype`` is none to compute in.
        CheckpointError: If a file or tensor is missing, truncated or of a wrong shape, or no model can be made of the
            config; names it.
        UnsupportedError: If there are no experts in these layers, or experts that cannot be offloaded.
    """
    config = checkpoint.config
    if quantized is not None:
        config = copy.deepcopy(config)
        del config.quantization_config
    compute_dtype = _compute_dtype(checkpoint, dtype)
    model_class = _model_class(checkpoint.name, config)
    outline = _outline(model_class, config, compute_dtype, checkpoint.name)
    paths = _experts_paths(outline, checkpoint.name)
    check_picks(outline, paths, checkpoint.name)
    if quantized is not None:
        quantized.check_fits(outline, paths)
    if layers is not None:
        paths = {layer: path for layer, path in paths.items() if layer in layers}
        if not paths and quantized is None:
            raise UnsupportedError(
                f"blocks {layers.start}:{layers.stop} of {checkpoint.name} have no experts: "
                "serve them without offloading"
            )
    store: CheckpointStore | QuantizedStore
    if quantized is not None:
        store, others = quantized.of_layers(paths), quantized.other_tensors()
        is_transposed = dict.fromkeys(paths, False)
    else:
        located = locate_experts(outline, paths, checkpoint.tensors)
        found = CheckpointStore(located.experts, checkpoint.file_path)
        is_transposed = {
            layer: found.is_transposed(layer) != bool(outline.get_submodule(path).is_transposed)
            for layer, path in paths.items()
        }
        store, others = found, located.others
    return Parts(
        checkpoint=checkpoint,
        config=config,
        dtype=compute_dtype,
        model_class=model_class,
        outline=outline,
        paths=paths,
        store=store,
        is_transposed=is_transposed,
        others=others,
        quantized=quantized,
    )


def load_rest(parts: Parts, device: torch.device) -> PreTrainedModel:
    """Loads everything that is no expert.

    Args:
        parts: What there is.
        device: Where to compute.

    Returns:
        HF's own class, its experts without weights, in evaluation mode.

    Raises:
        CheckpointError: If a tensor is missing, truncated or of a wrong shape.
    """
    linears = () if parts.quantized is None else tuple(parts.quantized.manifest.linears)
    model = model_from_tensors(
        _class_without(parts.model_class, tuple(parts.paths.values()), linears),
        parts.config,
        parts.checkpoint.read(parts.others),
        parts.dtype,
        parts.checkpoint.name,
    )
    model.__class__ = parts.model_class
    model.to(device)  # type: ignore[arg-type]  # the wrapper around it has lost its signature
    if parts.quantized is not None:
        parts.quantized.install_linears(model, device)
    model.name_or_path = model.config.name_or_path = parts.checkpoint.name
    generation = parts.checkpoint.generation_config()
    if generation is not None and model.can_generate():
        model.generation_config = generation
    return model


def _model_class(name: str, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Returns the class that the config names, if it is for a task that is supported, or the causal language model."""
    refuse_quantized(config, name)
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
            f"transformers has no language model for model_type {config.model_type!r} of {name}; supported "
            "are decoder-only mixture-of-experts models"
        )
    return found[0]


def _compute_dtype(checkpoint: Checkpoint, wanted: torch.dtype | None) -> torch.dtype:
    if wanted is not None and wanted not in _DTYPES:
        raise ConfigError(f"dtype is {wanted!r}; allowed are {', '.join(map(str, _DTYPES))}")
    found: torch.dtype = wanted or getattr(checkpoint.config, "dtype", None) or stored_dtype(checkpoint)
    if found not in _DTYPES:
        raise UnsupportedError(
            f"the config of {checkpoint.name} says dtype {found!r}; give the one to compute in, "
            f"one of {', '.join(map(str, _DTYPES))}"
        )
    return found


def _outline(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype, name: str
) -> PreTrainedModel:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return build_outline(lambda: model_class(copy.deepcopy(config)), model_class.__name__, name)
    finally:
        torch.set_default_dtype(before)


def _experts_paths(outline: PreTrainedModel, name: str) -> dict[int, str]:
    """Returns the path of the fused experts of each layer that has any."""
    names = {module: path for path, module in outline.named_modules()}
    paths = {layer: names[module] for layer, module in experts_modules(outline).items()}
    if paths:
        return paths
    others = {type(module).__name__ for path, module in outline.named_modules() if path.endswith(".experts")}
    if others:
        raise UnsupportedError(
            f"the experts of {name} ({', '.join(sorted(others))}) do not run through transformers' experts "
            "interface, so they cannot be offloaded: load the model with transformers itself"
        )
    raise UnsupportedError(
        f"{name} ({type(outline).__name__}) has no experts: mixture-of-experts models can be offloaded, "
        "load a dense one with transformers itself"
    )


def _class_without(
    model_class: type[PreTrainedModel], experts: Iterable[str], linears: Iterable[str]
) -> type[PreTrainedModel]:
    """Makes a subclass that constructs itself without the weights of some modules, for the time of loading."""

    def init(self: Any, config: PreTrainedConfig) -> None:
        model_class.__init__(self, config)
        for path in experts:
            module = self.get_submodule(path)
            module._parameters.clear()
            # Or transformers would initialise what it thinks is missing.
            module._is_hf_initialized = True
        for path in linears:
            replace_module(self, path, nn.Identity())

    # HF looks conversions up by the class's name and capabilities by its module's source.
    attributes = {"__init__": init, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), attributes)
