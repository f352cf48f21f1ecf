"""Loads a span: the tensors of its blocks only.

The model is HF's own base model, cut down: blocks outside the span are parameter-free, embeddings and final norm have
no values (`outside`).
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

from swarm_plugins.blocks.calls import BlockList, Passing
from swarm_plugins.blocks.cut_model import CutModel
from swarm_plugins.blocks.kv import KVPool
from swarm_plugins.blocks.outside import fill_in, take_out
from swarm_plugins.blocks.probing.probe import Traits, probe
from swarm_plugins.blocks.quantize import arrange_block, check_quantization, quantize_block
from swarm_plugins.blocks.span import Span
from swarm_plugins.borders import check_borders, tied_blocks
from swarm_plugins.checkpoint import (
    Checkpoint,
    block_tensors,
    find_layers,
    layer_list_name,
    layer_prefix,
    model_from_tensors,
)
from swarm_plugins.checkpoint.loading import class_for_task, empty_modules, leave_out, leave_unscaled
from swarm_plugins.checkpoint.outline import build_outline
from swarm_plugins.checkpoint.partition import decoder_of, num_blocks_of, places_in_blocks
from swarm_plugins.checkpoint.ties import shared_with_others, untie
from swarm_plugins.errors import CheckpointError, ConfigError, SwarmError, UnsupportedError, one_line
from swarm_plugins.moe import is_fused_experts
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.model.attach import attach_experts, check_budget, formats_of
from swarm_plugins.offload.model.moe_checkpoint import MoeCheckpoint
from swarm_plugins.offload.store.quantized_store import QuantizedStore, open_quantized
from swarm_plugins.weights.names import INT8_KERNELS, check_kv_bits
from swarm_plugins.weights.published.placing import Placing, place, plain_names
from swarm_plugins.weights.published.weights import Published
from swarm_plugins.weights.published.widening import experts_only, widening_of

log = logging.getLogger(__name__)

DEFAULT_KV_BYTES = 1 << 30
_OTHER_TOKENS = {
    "moshi": "its attention leaves the window to the cache of transformers, and sees too much without it",
}
"""Families whose blocks would run, with other results."""
ExpertsElsewhere = Callable[[int, nn.Module, nn.Module], object]
"""Makes a block's experts, which have no weights, run; takes block, experts, and a copy of them on the meta device."""
GROUP_BYTES = 1 << 30
"""Most bytes of a checkpoint that are loaded at once, unless one block is larger."""


def load_span(
    checkpoint: Checkpoint,
    blocks: range,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    quantization: str = "none",
    kernel: str | None = None,
    kv_bytes: int = DEFAULT_KV_BYTES,
    kv_bits: int | None = None,
    pool: KVPool | None = None,
    offload: OffloadConfig | None = None,
    elsewhere: ExpertsElsewhere | None = None,
    progress: bool = False,
) -> Span:
    """Loads consecutive blocks of a model and makes them ready to run.

    Args:
        checkpoint: Where the weights are: a model, or a store that `swarm quantize` made.
        blocks: Global indices of the blocks, consecutive.
        dtype: Floating type to compute in. None: the checkpoint's.
        device: Where to run.
        quantization: ``none``, ``int8``, ``int4`` or ``nf4``: how the weights of linear layers and experts are kept. A
            checkpoint that is published in few bits keeps its own with ``none``.
        kernel: How products with them are formed on a CPU: one of `swarm_plugins.weights.choice.candidates`. None: the
            first of them, without looking which is fast here.
        kv_bytes: Budget for the keys and values of all sessions.
        kv_bits: 8: sessions keep them as codes. None: as wide as they are computed.
        pool: A budget that another span has, to share; ``kv_bytes`` is not used then.
        offload: Budgets of experts that stay on disk, to be read when tokens are routed to them; some blocks may have
            none. None: experts are loaded, which a quantized store's cannot be.
        elsewhere: Converts the experts of each block that has any, which are then not read. None: they are here.
        progress: Whether to show a progress bar while reading.

    Returns:
        The span, in evaluation mode, its weights frozen.

    Raises:
        ConfigError: If the blocks are not in the model or do not run apart from others, or a setting is unknown.
        CheckpointError: If weights are missing.
        UnsupportedError: If the model's blocks cannot be run apart from the rest of it, or the model has no experts to
            offload.
        CapacityError: If the budget does not hold one expert for each reader and one to compute with.
    """
    if blocks.step != 1 or not blocks:
        raise ConfigError(f"blocks must be a non-empty range of consecutive indices, got {blocks}")
    _check_widths(quantization, kv_bits)
    tied = tied_blocks(checkpoint.config)
    check_borders(blocks, tied, num_blocks_of(checkpoint.config))
    pool = pool or KVPool(kv_bytes)
    store, published = open_quantized(checkpoint), Published.of(checkpoint)
    _check_stored(store, published, checkpoint, quantization, offload, elsewhere)
    config = _span_config(checkpoint)
    base_class = _base_class(checkpoint.config, config)
    wanted = dtype or getattr(config, "dtype", None) or torch.float32
    outline = build_outline(base_class, config, wanted, checkpoint.name)
    path = layer_list_name(outline)
    where = torch.device(device)
    moe = None
    if offload is not None:
        _check_offload(offload, store, quantization)
        moe = MoeCheckpoint.inspect(checkpoint, store, dtype=wanted, layers=blocks)
        check_budget(moe, formats_of(moe, offload, where), offload, where)
        moe.store.fetch()
        if moe.placing is not None:
            told = widening_of(experts_only(moe.placing), wanted, keeps_experts=True, device=where)
            log.info("offloaded experts: %s", told)
    elif elsewhere is not None:
        moe = MoeCheckpoint.inspect(checkpoint, dtype=wanted, layers=blocks)
        moe.check_has_experts(blocks)
    loader = _BlockLoader(
        checkpoint, base_class, config, path, wanted, where, quantization, kernel, moe, published, outline
    )
    first, *further = loader.groups(blocks)
    model = loader.load(first, progress)
    for group in further:
        _move_blocks(loader.load(group, progress), model, path, group)
    experts = None
    if moe is not None and offload is not None:
        experts = attach_experts(model, moe, offload, where) if moe.paths else None
        if store is not None:
            store.install_linears(model, where, _quantized_linears(moe, path, blocks))
    elif moe is not None and elsewhere is not None:
        prefix = f"{base_class.base_model_prefix}."
        for block, name in moe.paths.items():
            elsewhere(block, model.get_submodule(name.removeprefix(prefix)), moe.outline.get_submodule(name))
    cut = CutModel(model, path, blocks, wanted, tied)
    return Span(cut, _probed(cut, kv_bits), pool, experts)


def _check_widths(quantization: str, kv_bits: int | None) -> None:
    check_quantization(quantization)
    check_kv_bits(kv_bits)


def _probed(cut: CutModel, kv_bits: int | None) -> Traits:
    try:
        traits = probe(cut)
        if kv_bits is None:
            return traits
        return traits._replace(kv_layouts={block: one.coded() for block, one in traits.kv_layouts.items()})
    except SwarmError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
        raise UnsupportedError(
            f"blocks of {type(cut.model).__name__} do not run with the caches of a server "
            f"({one_line(error, with_kind=True)}): use a model of another family"
        ) from error


@dataclass(frozen=True)
class _BlockLoader:
    """Loads some blocks of a model at a time."""

    checkpoint: Checkpoint
    base_class: type[PreTrainedModel]
    config: PreTrainedConfig
    path: str
    """Of the layer list in the base model."""
    dtype: torch.dtype
    device: torch.device
    quantization: str
    kernel: str | None
    moe: MoeCheckpoint | None
    """Tells which weights stay on disk; None: all are loaded."""
    published: Published | None
    """Finds weights that are packed in the checkpoint. None: it has none."""
    outline: PreTrainedModel
    """The base model without storage."""

    def groups(self, blocks: range) -> list[range]:
        """Cuts a span into runs of blocks of bounded size: a block exists twice while it is converted."""
        self._names(blocks)  # finds faults of the whole range at once
        groups: list[range] = []
        size = 0
        for block in blocks:
            num_bytes = sum(self.checkpoint.tensors[name].num_bytes for name in self._names(range(block, block + 1)))
            if groups and size + num_bytes <= GROUP_BYTES:
                groups[-1] = range(groups[-1].start, block + 1)
                size += num_bytes
            else:
                groups.append(range(block, block + 1))
                size = num_bytes
        return groups

    def load(self, blocks: range, progress: bool) -> PreTrainedModel:
        """Returns the base model with some blocks only, frozen."""

        def trim(model: PreTrainedModel) -> None:
            layers = enumerate(find_layers(model))
            kept = [layer if index in blocks else Passing(layer) for index, layer in layers]
            model.set_submodule(self.path, BlockList(kept))
            take_out(model, self.path)
            untie(model, self.path, blocks)
            if self.moe is not None:
                empty_modules(module for module in model.modules() if is_fused_experts(module))
                leave_out(model, _quantized_linears(self.moe, self.path, blocks).values())
            if placing is not None:
                placing.leave_out(model)

        names, placing = self._names(blocks), None
        if self.published is not None:
            placing = place(self.published, self.outline, {name: self._spelled(name) for name in names})
            names = plain_names(placing, names)
            log.info(
                "blocks %d:%d: %s", blocks.start, blocks.stop, widening_of(placing, self.dtype, device=self.device)
            )
        tensors, name = self._read(names, blocks, progress), self.checkpoint.name
        biases = {} if placing is None else self._take_biases(placing, tensors)
        try:
            model = model_from_tensors(self.base_class, self.config, tensors, self.dtype, name, trim=trim)
        except CheckpointError:
            _check_experts(names, name)
            raise
        model.requires_grad_(False)
        nn.Module.to(model, self.device)
        fill_in(model, self.dtype, self.device)
        if placing is not None:
            placing.install(
                model, biases, self.dtype, self.device, self.kernel if self.kernel in INT8_KERNELS else None
            )
        self._arrange(model, blocks)
        return model

    def _arrange(self, model: PreTrainedModel, blocks: range) -> None:
        if self.quantization != "none":
            for block in blocks:
                quantize_block(_layers(model, self.path)[block], self.quantization, kernel=self.kernel)
        elif self.kernel is not None and self.kernel not in INT8_KERNELS and self.device.type == "cpu":
            for block in blocks:
                arrange_block(_layers(model, self.path)[block], self.kernel)

    def _take_biases(self, placing: Placing, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Takes out of plain tensors what goes into packed layers, and adds the weights that cannot stay packed."""
        tensors.update({self._spelled(name): wide for name, wide in placing.widened_others(self.dtype).items()})
        return placing.take_biases(tensors)

    def _names(self, blocks: range) -> list[str]:
        names = block_tensors(self.checkpoint, self.path, blocks)
        names += [name for name in self._shared(blocks) if name not in names]
        if self.moe is None:
            return names
        others = frozenset(self.moe.others)
        return [name for name in names if name in others]

    def _read(self, names: Sequence[str], blocks: range, progress: bool) -> dict[str, Tensor]:
        read = self.checkpoint.read(names, progress=progress, what=f"blocks {blocks.start}:{blocks.stop}")
        tensors = {self._spelled(name): tensor for name, tensor in read.items()}
        path = f"{self.base_class.base_model_prefix}.{self.path}"
        for name, targets in self._shared(blocks).items():
            # None if it is packed: then the parameters are missed.
            if name in read:
                tensors.update((f"{path}.{one}", read[name]) for one in targets)
        return tensors

    def _shared(self, blocks: range) -> dict[str, list[str]]:
        return shared_with_others(self.checkpoint, self.outline, self.path, blocks)

    def _spelled(self, name: str) -> str:
        # HF's conversions are written for the names of a whole causal language model.
        prefix = layer_prefix(self.checkpoint, self.path)
        # A weight that is packed has another name in the checkpoint.
        place = places_in_blocks(self.checkpoint, self.path).get(name, name[len(prefix) :])
        return f"{self.base_class.base_model_prefix}.{self.path}.{place}"


def _check_stored(
    store: QuantizedStore | None,
    published: Published | None,
    checkpoint: Checkpoint,
    quantization: str,
    offload: OffloadConfig | None,
    elsewhere: ExpertsElsewhere | None,
) -> None:
    if published is not None and quantization != "none":
        raise ConfigError(
            f"quantization is {quantization!r} and {checkpoint.name} is published as {published.name}: leave "
            "quantization at 'none', its weights stay as they are"
        )
    if store is None:
        return
    if elsewhere is not None:
        raise ConfigError(
            f"{checkpoint.name} is a quantized store, and experts are at other peers: give the model that it was made "
            f"from, {store.manifest.base}, and quantize its other weights while serving (quantization='int8', 'int4' "
            "or 'nf4')"
        )
    if offload is None:
        raise ConfigError(
            f"{checkpoint.name} is a quantized store, whose experts are read on demand: set how much memory they may "
            "take with fast_bytes"
        )


def _check_offload(config: OffloadConfig, store: QuantizedStore | None, quantization: str) -> None:
    if quantization != "none":
        raise ConfigError(
            f"quantization is {quantization!r} and experts are offloaded: give the width of the experts by "
            "expert_bits (bits=4 in --offload), and leave quantization at 'none'"
        )
    if config.other_bits not in (None, 16, None if store is None else store.manifest.other_bits):
        raise ConfigError(
            f"other_bits is {config.other_bits}: a span keeps its other weights as they are, leave it out"
        )


def _quantized_linears(moe: MoeCheckpoint | None, layer_path: str, blocks: range) -> dict[str, str]:
    """Returns the names of a store's quantized linear layers in some blocks, with their paths in the span's model."""
    if moe is None or moe.quantized is None:
        return {}
    whole = layer_list_name(moe.outline)
    return {
        name: layer_path + name.removeprefix(whole)
        for name in moe.quantized.manifest.linears
        if any(name.startswith(f"{whole}.{block}.") for block in blocks)
    }


def _check_experts(names: Iterable[str], checkpoint_name: str) -> None:
    """Checks that all experts of a block have the same tensors; HF's error about fusing does not name the missing."""
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


def _move_blocks(source: PreTrainedModel, target: PreTrainedModel, path: str, blocks: range) -> None:
    """Moves blocks from one model to another."""
    for block in blocks:
        layer = _layers(source, path)[block]
        for module in layer.modules():
            # The span switches settings in the one config that all modules read.
            if getattr(module, "config", None) is source.config:
                module.config = target.config  # type: ignore[assignment]
        _layers(target, path)[block] = layer


def _span_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    # A copy: the attention implementation is switched in it while calls run.
    config = copy.deepcopy(checkpoint.config.get_text_config(decoder=True))
    if config.model_type in _OTHER_TOKENS:
        raise UnsupportedError(f"{config.model_type} cannot be served: {_OTHER_TOKENS[config.model_type]}")
    # transformers would make packed layers of its own.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for flag in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if getattr(config, flag, False):
            setattr(config, flag, False)
    leave_unscaled(config)
    return config


def _base_class(whole: PreTrainedConfig, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Returns the class of the base model for the config of a checkpoint's language model."""
    language: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(whole), None)
    is_known = type(config) in MODEL_MAPPING or whole.is_encoder_decoder
    if is_known or type(config) is type(whole) or language is None or language.config_class is not type(config):
        return class_for_task(config, "model", MODEL_MAPPING)
    # No task is mapped to the decoder alone (Emu 3).
    outline = build_outline(language, config, torch.float32, config.name_or_path or config.model_type)
    base = type(decoder_of(outline, layer_list_name(outline)))
    return class_for_task(config, "model", MODEL_MAPPING) if base is language else base


def _layers(model: nn.Module, path: str) -> nn.ModuleList:
    layers = model.get_submodule(path)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedError(f"the decoder layers of {type(model).__name__} are a {type(layers).__name__}")
    return layers
