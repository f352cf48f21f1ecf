"""Sizes of a mixture-of-experts model, measured without weights.

The model is built and run on the meta device: HF's own modules show its experts, cache and routers, so that no family
needs a table of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from swarm_plugins.checkpoint import Checkpoint, find_layers
from swarm_plugins.errors import CheckpointError, UnsupportedError, one_line
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.model.attach import formats_of
from swarm_plugins.offload.model.moe_checkpoint import MoeCheckpoint
from swarm_plugins.offload.model.outline import stored_dtype
from swarm_plugins.offload.plan.sessions import SessionSizes, cache_bytes, session_sizes
from swarm_plugins.offload.store.quantized_store import open_quantized
from swarm_plugins.weights.formats.stacked import StackedFormat
from swarm_plugins.weights.published.placing import plain_names
from swarm_plugins.weights.published.weights import Published
from swarm_plugins.weights.published.widening import Held, Widening, held_weights, widening_of
from swarm_plugins.weights.stored import StoredFormat
from swarm_plugins.weights.widths import Width


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One decoder layer that has experts."""

    layer: int
    num_experts: int
    expert_bytes: int
    """Of one expert in memory, in the form that products use."""
    experts_per_token: int
    stored_bytes: int
    """Of one expert in its file."""

    @property
    def num_bytes(self) -> int:
        """Of all experts of the layer."""
        return self.num_experts * self.expert_bytes


class PackedProducts(NamedTuple):
    """Products of a token with packed weights whose forms in memory are alike."""

    sample: StoredFormat
    """The largest form, to measure by."""
    num_weights: int
    """Of all, numbers and not matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSizes:
    """What is special about a checkpoint that was published in few bits."""

    widening: Widening
    products: tuple[PackedProducts, ...]
    """Those of a token, by what packed weights become in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model."""

    layers: tuple[ExpertLayer, ...]
    """Those with experts."""
    num_layers: int
    dtype: torch.dtype
    """To compute in: the type of most of the checkpoint's bytes, if it is not quantized."""
    other_bytes: int
    """Of everything outside experts: always in fast memory."""
    context_tokens: int
    cache_bytes: int
    """Of the cache of one row after ``context_tokens``: keys, values and states."""
    session: SessionSizes
    """Of a row on servers."""
    activation_bytes: int
    """Estimated memory of a forward over ``context_tokens`` in addition to weights and cache."""
    quantized_bits: Width | None = None
    """Width of the experts of a quantized store."""
    published: PublishedSizes | None = None
    """Of a checkpoint in few bits."""

    @property
    def is_packed(self) -> bool:
        """Whether weights are in few bits already."""
        return self.quantized_bits is not None or self.published is not None

    @property
    def expert_bits(self) -> Width:
        """Width of the experts as they are stored."""
        return self.dtype.itemsize * 8 if self.quantized_bits is None else self.quantized_bits

    @property
    def expert_bytes(self) -> int:
        """Of all experts."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def largest_expert_bytes(self) -> int:
        return max(layer.expert_bytes for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Of the experts that one token is computed with, in memory."""
        return sum(layer.experts_per_token * layer.expert_bytes for layer in self.layers)

    @property
    def token_stored_bytes(self) -> int:
        """Of the experts that one token is computed with, in files."""
        return sum(layer.experts_per_token * layer.stored_bytes for layer in self.layers)


def model_sizes(
    checkpoint: Checkpoint,
    *,
    context_tokens: int = 2048,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> ModelSizes:
    """Returns the sizes of a model, its cache at some length included, from its config and file headers.

    Args:
        checkpoint: The model.
        context_tokens: Length of the cache.
        dtype: Type to compute in. None: the one that `load_offloaded` would take by itself.
        device: Where to compute; None: on the CPU, where some packed weights are repacked.

    Raises:
        CheckpointError: If no model can be made of the config, or the headers belong to another model.
        UnsupportedError: If the model has no experts that can be offloaded, or cannot be built without weights.
    """
    store = open_quantized(checkpoint)
    if dtype is None and store is None and Published.of(checkpoint) is None:
        dtype = stored_dtype(checkpoint)
    moe = MoeCheckpoint.inspect(checkpoint, store, dtype=dtype)
    _check_shapes(moe)
    model, dtype = moe.outline, moe.dtype
    model.eval()
    experts = {layer: model.get_submodule(path) for layer, path in moe.paths.items()}
    found = _dry_run(model, experts, context_tokens, checkpoint.name)
    where = torch.device("cpu") if device is None else device
    formats = formats_of(moe, OffloadConfig(), where)
    layers = tuple(
        ExpertLayer(
            layer, moe.store.num_experts[layer], form.computed.num_bytes, found.picked[layer], form.stored.num_bytes
        )
        for layer, form in formats.items()
    )
    held = [] if moe.placing is None else held_weights(replace(moe.placing, experts={}), dtype, device=where)
    published = _published_sizes(moe, layers, held, where)
    in_experts = {id(parameter) for module in experts.values() for parameter in module.parameters()}
    other = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in in_experts)
    return ModelSizes(
        layers=layers,
        num_layers=len(find_layers(model)),
        dtype=dtype,
        other_bytes=other - (_saved_bytes(moe, held, where) if store is None else store.saved_bytes(dtype)),
        quantized_bits=None if store is None else store.manifest.expert_bits,
        context_tokens=context_tokens,
        cache_bytes=found.cache_bytes,
        session=found.session,
        activation_bytes=_activation_bytes(checkpoint.config, max(layer.experts_per_token for layer in layers), dtype)
        + (0 if published is None else published.widening.product_bytes),
        published=published,
    )


def _saved_bytes(moe: MoeCheckpoint, linears: Sequence[Held], device: torch.device) -> int:
    """Returns how much less packed linear layers take than plain ones."""
    wide = sum(one.copies * math.prod(one.form.shape) for one in linears) * moe.dtype.itemsize
    return wide - sum(one.num_bytes(device) for one in linears)


def _published_sizes(
    moe: MoeCheckpoint, layers: Sequence[ExpertLayer], linears: Sequence[Held], device: torch.device
) -> PublishedSizes | None:
    if moe.placing is None:
        return None
    picked = {layer.layer: layer.experts_per_token for layer in layers}
    used = [(one, picked[layer]) for layer, some in moe.packed.items() for one in some.values()]
    used += [(one.form, one.copies) for one in linears]
    if not used:
        return None
    return PublishedSizes(
        widening=widening_of(moe.placing, moe.dtype, keeps_experts=True, device=device), products=_by_kind(used)
    )


def _by_kind(used: Sequence[tuple[StoredFormat, int]]) -> tuple[PackedProducts, ...]:
    """Returns the products with weights, given by form and how many times a token uses one like it."""
    found: defaultdict[Hashable, list[tuple[StoredFormat, int]]] = defaultdict(list)
    for form, count in used:
        found[_kind(form)].append((form, count))
    return tuple(
        PackedProducts(
            max((form for form, _ in some), key=lambda form: math.prod(form.shape)),
            sum(count * math.prod(form.shape) for form, count in some),
        )
        for some in found.values()
    )


def _kind(form: StoredFormat) -> Hashable:
    """Returns what a product's time depends on other than the weight's size."""
    if isinstance(form, StackedFormat):
        return type(form), *map(_kind, form.pieces)
    return type(form), getattr(form, "kind", None)


def _check_shapes(moe: MoeCheckpoint) -> None:
    """Compares the tensors outside experts with the model of the config; renamed ones are not checked."""
    parameters = dict(moe.outline.named_parameters())
    for name in plain_names(moe.placing, moe.others):
        expected = tuple(parameters[name].shape) if name in parameters else None
        info = moe.checkpoint.tensors[name]
        if expected is not None and info.shape != expected:
            raise CheckpointError(
                f"{name} in {info.file} has shape {list(info.shape)}, the config of {moe.checkpoint.name} asks for "
                f"{list(expected)}: config and weights are of different checkpoints, fetch them again"
            )


class _DryRun(NamedTuple):
    picked: dict[int, int]
    """Experts that each layer picks for a token."""
    cache_bytes: int
    session: SessionSizes


def _dry_run(model: PreTrainedModel, experts: dict[int, nn.Module], tokens: int, name: str) -> _DryRun:
    """Runs the model on the meta device."""
    picked: dict[int, int] = {}

    def stand_in(layer: int) -> Callable[..., Tensor]:
        def forward(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            picked[layer] = top_k_index.shape[-1]
            return torch.empty_like(hidden)

        return forward

    for layer, module in experts.items():
        module.forward = stand_in(layer)
    try:
        return _DryRun(picked, cache_bytes(model, tokens), session_sizes(model))
    except Exception as exc:
        # Any kind: any line of HF's model may meet an untrusted number.
        raise UnsupportedError(
            f"{name} ({type(model).__name__}) cannot be measured without its weights "
            f"({one_line(exc, with_kind=True)}): correct config.json if it was changed; otherwise try swarm run"
        ) from exc
    finally:
        for module in experts.values():
            del module.forward


def _activation_bytes(config: PreTrainedConfig, experts_per_token: int, dtype: torch.dtype) -> int:
    """Estimates a piece of a prefill: a handful of hidden states, and one layer's products of the experts."""
    text = config.get_text_config(decoder=True)
    tokens = 512  # assumed size of a piece
    width = int(text.hidden_size)
    rows = tokens * width * (8 + 4 * experts_per_token)
    return rows * dtype.itemsize + int(text.vocab_size) * 4 * 2
