"""Loads a span: the tensors of its blocks only, through transformers' own loading.

The model is HF's own base class, cut down: blocks outside the span are parameter-free, embeddings and final norm are
absent. So every conversion that HF's loader does (per-expert weights to fused ones, renamed tensors) happens here
too, and HF's own forward runs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from swarm_plugins.blocks.kv import KVPool
from swarm_plugins.blocks.layers import BlockList, Passing
from swarm_plugins.blocks.span import Span
from swarm_plugins.checkpoint import Checkpoint, block_tensors, find_layers, layer_list_name, layer_prefix
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError

__all__ = ["DEFAULT_KV_BYTES", "load_span"]

log = logging.getLogger(__name__)

DEFAULT_KV_BYTES = 1 << 30


def load_span(
    checkpoint: Checkpoint,
    blocks: range,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    quantization: str = "none",
    kv_bytes: int = DEFAULT_KV_BYTES,
    progress: bool = False,
) -> Span:
    """Loads consecutive blocks of a model and makes them ready to run.

    Args:
        checkpoint: Where the weights are.
        blocks: Global indices of the blocks, consecutive.
        dtype: Floating type to compute in. None: the checkpoint's.
        device: Where to run.
        quantization: ``none``, ``int8`` or ``nf4``: how the weights of linear layers and experts are kept.
        kv_bytes: Budget for the keys and values of all sessions.
        progress: Whether to show a progress bar while reading.

    Returns:
        The span, in evaluation mode, its weights frozen.

    Raises:
        ConfigError: If the blocks are not in the model, or a setting is unknown.
        CheckpointError: If weights are missing.
        UnsupportedError: If the model's blocks cannot be run apart from the rest of it.
    """
    if blocks.step != 1 or not blocks:
        raise ConfigError(f"blocks must be a non-empty range of consecutive indices, got {blocks}")
    config = _span_config(checkpoint)
    base_class = _base_class(config)
    path = _layer_path(base_class, config)
    names = block_tensors(checkpoint, path, blocks)
    prefix = layer_prefix(checkpoint, path)
    # HF's conversions are written for the names of a whole causal language model.
    target = f"{base_class.base_model_prefix}.{path}."
    tensors = {
        target + name[len(prefix) :]: tensor for name, tensor in checkpoint.read(names, progress=progress).items()
    }
    model = _load(_cut_class(base_class, path, blocks), config, tensors, dtype, checkpoint.name)
    nn.Module.to(model, device)
    return Span(model, path, blocks, KVPool(kv_bytes))


def _span_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    # A copy: the attention implementation is switched in it while calls run.
    config = copy.deepcopy(checkpoint.config.get_text_config(decoder=True))
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{checkpoint.name} is stored quantized ({config.quantization_config}): give the unquantized checkpoint, "
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


def _cut_class(base_class: type[PreTrainedModel], path: str, blocks: range) -> type[PreTrainedModel]:
    """Makes a subclass that constructs the cut-down model."""

    def init(self: Any, config: PreTrainedConfig) -> None:
        base_class.__init__(self, config)
        _cut(self, path, blocks)

    # HF looks conversions up by the class's name and capabilities by its module's source.
    attributes = {"__init__": init, "__module__": base_class.__module__, "__qualname__": base_class.__qualname__}
    return type(base_class.__name__, (base_class,), attributes)


def _cut(model: nn.Module, path: str, blocks: range) -> None:
    layers = find_layers(model)
    kept = [layer if index in blocks else Passing(layer) for index, layer in enumerate(layers)]
    parent_path, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent_path), name, BlockList(kept))
    top = path.partition(".")[0]
    for name, child in list(model.named_children()):
        # Whatever else has weights (embeddings, final norm) is the client's; `Span` checks that hidden states then
        # really pass unchanged.
        if name != top and next(child.parameters(), None) is not None:
            setattr(model, name, nn.Identity())


def _load(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: dict[str, Tensor],
    dtype: torch.dtype | None,
    name: str,
) -> PreTrainedModel:
    wanted = dtype or getattr(config, "dtype", None) or torch.float32
    with _no_progress_bar():
        loaded: Any = model_class.from_pretrained(
            None, config=config, state_dict=tensors, dtype=wanted, output_loading_info=True
        )
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{name} lacks {len(missing)} tensors of its blocks, such as {missing[0]}: fetch it again"
        )
    wrong = sorted(str(entry) for entry in info["mismatched_keys"])
    if wrong:
        raise CheckpointError(f"{name} has {len(wrong)} tensors of a wrong shape, such as {wrong[0]}: not its config")
    model.train(False)
    model.requires_grad_(False)
    return model


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Silences HF's bar, which shows the conversion of tensors that are in memory already."""
    was_enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            hf_logging.enable_progress_bar()
