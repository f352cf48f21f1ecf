"""Loads a span: the tensors of its blocks only, through transformers' own loading.

The model is HF's own base class, cut down: blocks outside the span are parameter-free, embeddings and final norm are
absent. So every conversion that HF's loader does (per-expert weights to fused ones, renamed tensors) happens here
too, and HF's own forward runs.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

from swarm_plugins.blocks.calls import BlockList, Passing
from swarm_plugins.blocks.cut_model import CutModel
from swarm_plugins.blocks.kv import KVPool
from swarm_plugins.blocks.offloaded import offload_experts, offloaded_parts, quantized_linears, remove_experts
from swarm_plugins.blocks.probe import probe
from swarm_plugins.blocks.quantize import check_quantization, quantize_block
from swarm_plugins.blocks.span import Span
from swarm_plugins.checkpoint import (
    Checkpoint,
    block_tensors,
    find_layers,
    layer_list_name,
    layer_prefix,
    model_from_tensors,
)
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.formats.linears import replace_module
from swarm_plugins.offload.store.quantized_store import QuantizedStore, open_quantized

__all__ = ["DEFAULT_KV_BYTES", "load_span"]

log = logging.getLogger(__name__)

DEFAULT_KV_BYTES = 1 << 30
GROUP_BYTES = 1 << 30
"""Most bytes of a checkpoint that are loaded at once, if a block is not larger."""

_IsWanted = Callable[[str], bool]


def load_span(
    checkpoint: Checkpoint,
    blocks: range,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    quantization: str = "none",
    kv_bytes: int = DEFAULT_KV_BYTES,
    offload: OffloadConfig | None = None,
    progress: bool = False,
) -> Span:
    """Loads consecutive blocks of a model and makes them ready to run.

    Args:
        checkpoint: Where the weights are: a model, or a store that `swarm quantize` made.
        blocks: Global indices of the blocks, consecutive.
        dtype: Floating type to compute in. None: the checkpoint's.
        device: Where to run.
        quantization: ``none``, ``int8`` or ``nf4``: how the weights of linear layers and experts are kept.
        kv_bytes: Budget for the keys and values of all sessions.
        offload: Budgets of experts that stay on disk, to be read when tokens are routed to them. None: they are loaded,
            which those of a quantized store are not.
        progress: Whether to show a progress bar while reading.

    Returns:
        The span, in evaluation mode, its weights frozen.

    Raises:
        ConfigError: If the blocks are not in the model, or a setting is unknown.
        CheckpointError: If weights are missing.
        UnsupportedError: If the model's blocks cannot be run apart from the rest of it, or have no experts to offload.
        CapacityError: If the budget does not hold one expert for each reader and one to compute with.
    """
    if blocks.step != 1 or not blocks:
        raise ConfigError(f"blocks must be a non-empty range of consecutive indices, got {blocks}")
    check_quantization(quantization)
    pool = KVPool(kv_bytes)
    store = open_quantized(checkpoint)
    if store is not None and offload is None:
        raise ConfigError(
            f"{checkpoint.name} is a store that swarm quantize made, whose experts are read when they are needed: say "
            "how much memory they may take with fast_bytes"
        )
    config = _span_config(checkpoint, store)
    base_class = _base_class(config)
    path = _layer_path(base_class, config)
    wanted = dtype or getattr(config, "dtype", None) or torch.float32
    parts = None
    if offload is not None:
        parts = offloaded_parts(checkpoint, store, blocks, quantization, offload, wanted, torch.device(device))
    is_wanted = None if parts is None else frozenset(parts.others).__contains__
    model: PreTrainedModel | None = None
    for group in _groups(checkpoint, path, blocks, is_wanted):
        tensors = _read(checkpoint, base_class, path, group, progress, is_wanted)
        linears = quantized_linears(parts, path, group).values()
        cut_class = _cut_class(base_class, path, group, has_experts=parts is None, without=linears)
        part = model_from_tensors(cut_class, config, tensors, wanted, checkpoint.name)
        part.requires_grad_(False)
        nn.Module.to(part, device)
        if quantization != "none":
            for block in group:
                quantize_block(_layers(part, path)[block], quantization, wanted)
        model = part if model is None else _joined(model, part, path, group)
    if model is None:
        raise ConfigError(f"blocks {blocks} are empty")
    experts = None
    if parts is not None and offload is not None:
        experts = offload_experts(model, parts, offload, torch.device(device))
        if store is not None:
            store.install_linears(model, torch.device(device), quantized_linears(parts, path, blocks))
    cut = CutModel(model, path, blocks, wanted)
    return Span(cut, probe(cut), pool, experts)


def _groups(checkpoint: Checkpoint, path: str, blocks: range, is_wanted: _IsWanted | None) -> list[range]:
    """Cuts a span into runs of blocks of bounded size: while one is converted, it exists twice."""
    _names(checkpoint, path, blocks, is_wanted)  # says at once what is wrong with the whole range
    groups: list[range] = []
    size = 0
    for block in blocks:
        infos = (checkpoint.tensors[name] for name in _names(checkpoint, path, range(block, block + 1), is_wanted))
        num_bytes = sum(info.end - info.start for info in infos)
        if groups and size + num_bytes <= GROUP_BYTES:
            groups[-1] = range(groups[-1].start, block + 1)
            size += num_bytes
        else:
            groups.append(range(block, block + 1))
            size = num_bytes
    return groups


def _names(checkpoint: Checkpoint, path: str, blocks: range, is_wanted: _IsWanted | None) -> list[str]:
    """Returns the tensors of blocks, all of them or those that are wanted."""
    names = block_tensors(checkpoint, path, blocks)
    return names if is_wanted is None else [name for name in names if is_wanted(name)]


def _read(
    checkpoint: Checkpoint,
    base_class: type[PreTrainedModel],
    path: str,
    blocks: range,
    progress: bool,
    is_wanted: _IsWanted | None,
) -> dict[str, Tensor]:
    names = _names(checkpoint, path, blocks, is_wanted)
    _check_experts(names, checkpoint.name)
    prefix = layer_prefix(checkpoint, path)
    # HF's conversions are written for the names of a whole causal language model.
    target = f"{base_class.base_model_prefix}.{path}."
    tensors = checkpoint.read(names, progress=progress)
    return {target + name[len(prefix) :]: tensor for name, tensor in tensors.items()}


def _check_experts(names: Iterable[str], checkpoint_name: str) -> None:
    """Checks that every expert of a block has the same tensors, which HF's fusing does not say clearly."""
    indices: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        before, marker, after = name.partition(".experts.")
        index, _, rest = after.partition(".")
        if marker and index.isdigit():
            indices[before][rest].add(int(index))
    for before, by_rest in indices.items():
        everywhere = set().union(*by_rest.values())
        for rest, found in by_rest.items():
            for lacking in sorted(everywhere - found):
                missing = f"{before}.experts.{lacking}.{rest}"
                raise CheckpointError(f"{checkpoint_name} lacks {missing}, which other experts have: fetch it again")


def _joined(model: PreTrainedModel, part: PreTrainedModel, path: str, blocks: range) -> PreTrainedModel:
    """Moves blocks from one model to another."""
    layers, source = _layers(model, path), _layers(part, path)
    for block in blocks:
        for module in source[block].modules():
            # The span switches settings in the one config that all modules read.
            if getattr(module, "config", None) is part.config:
                module.config = model.config  # type: ignore[assignment]
        layers[block] = source[block]
    return model


def _span_config(checkpoint: Checkpoint, store: QuantizedStore | None) -> PreTrainedConfig:
    # A copy: the attention implementation is switched in it while calls run.
    config = copy.deepcopy(checkpoint.config.get_text_config(decoder=True))
    quantization = getattr(config, "quantization_config", None)
    if store is not None and quantization is not None:
        del config.quantization_config
    elif quantization is not None:
        raise UnsupportedError(
            f"{checkpoint.name} is stored quantized ({quantization}): give the unquantized checkpoint, "
            "and quantize while serving with quantization='int8' or 'nf4'"
        )
    for flag in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if getattr(config, flag, False):
            setattr(config, flag, False)
    return config


def _base_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    try:
        base_class: Any = MODEL_MAPPING[type(config)]
    except KeyError:
        raise UnsupportedError(
            f"transformers has no model for the config {type(config).__name__} (model_type {config.model_type!r}); "
            "known are the decoder models of the installed transformers"
        ) from None
    found: type[PreTrainedModel] = base_class[0] if isinstance(base_class, tuple) else base_class
    return found


def _layer_path(base_class: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    with torch.device("meta"):
        return layer_list_name(base_class(copy.deepcopy(config)))


def _cut_class(
    base_class: type[PreTrainedModel], path: str, blocks: range, *, has_experts: bool, without: Collection[str]
) -> type[PreTrainedModel]:
    """Makes a subclass that constructs the cut-down model, some of its modules left out."""

    def init(self: Any, config: PreTrainedConfig) -> None:
        base_class.__init__(self, config)
        _cut(self, path, blocks)
        if not has_experts:
            remove_experts(self)
        for name in without:
            replace_module(self, name, nn.Identity())

    # HF looks conversions up by the class's name and capabilities by its module's source.
    attributes = {"__init__": init, "__module__": base_class.__module__, "__qualname__": base_class.__qualname__}
    return type(base_class.__name__, (base_class,), attributes)


def _layers(model: nn.Module, path: str) -> nn.ModuleList:
    layers = model.get_submodule(path)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedError(f"the decoder layers of {type(model).__name__} are a {type(layers).__name__}")
    return layers


def _cut(model: nn.Module, path: str, blocks: range) -> None:
    layers = find_layers(model)
    kept = [layer if index in blocks else Passing(layer) for index, layer in enumerate(layers)]
    parent_path, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent_path), name, BlockList(kept))
    top = path.partition(".")[0]
    for name, child in list(model.named_children()):
        # Whatever else has weights (embeddings, final norm) is the client's; `Span` checks that hidden states then
        # really pass unchanged.
        # OLMo's final norm has no weights and is told by its name; a rotary embedding has none either and stays.
        is_norm = type(child).__name__.endswith("Norm")
        if name != top and (is_norm or next(child.parameters(), None) is not None):
            setattr(model, name, nn.Identity())
    outside = [name for name, _ in model.named_parameters() if not name.startswith(f"{path}.")]
    if outside:
        raise UnsupportedError(
            f"{type(model).__name__} has weights beside its blocks that cannot be cut off, such as {outside[0]}: it "
            "adds positions or projects hidden states in its own forward, so its blocks cannot be served apart from it"
        )
