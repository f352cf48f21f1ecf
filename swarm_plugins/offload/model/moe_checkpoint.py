"""A checkpoint of a mixture-of-experts model: where its experts are, and HF's own class with all the rest."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from swarm_plugins.checkpoint import Checkpoint, model_from_tensors
from swarm_plugins.checkpoint.loading import (
    class_for_task,
    config_for,
    empty_modules,
    leave_out,
    take_generation_config,
)
from swarm_plugins.checkpoint.outline import build_outline
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.offload.interfaces import FLOATS
from swarm_plugins.offload.model.outline import (
    check_picks,
    experts_modules,
    stored_dtype,
    without_quantization,
)
from swarm_plugins.offload.store.checkpoint_store import CheckpointStore
from swarm_plugins.offload.store.locate import locate_experts
from swarm_plugins.offload.store.published import locate_published
from swarm_plugins.offload.store.quantized_store import QuantizedStore, is_quantized_store, open_quantized
from swarm_plugins.versions import ModelVersion
from swarm_plugins.weights.published.placing import Placing, place, plain_names
from swarm_plugins.weights.published.weights import Published
from swarm_plugins.weights.published.widening import widening_of
from swarm_plugins.weights.stored import StoredFormat
from swarm_plugins.weights.widths import Width

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MoeCheckpoint:
    """What the headers of a checkpoint tell: no weight has been read, no file of a store fetched.

    Made by `open` or `inspect`.
    """

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
    """Has the experts."""
    is_transposed: Mapping[int, bool]
    """Whether weights of experts lie as ``[in, out]``, by index of the layer."""
    others: list[str]
    """Names, in the checkpoint, of all other tensors but linear layers of a quantized store."""
    placing: Placing | None
    """Where weights belong that were published in few bits. None: there are none."""
    packed: Mapping[int, Mapping[str, StoredFormat]]
    """Formats of experts that were published in few bits, by index of the layer and name of the parameter."""

    @classmethod
    def open(
        cls,
        name_or_dir: str | Path,
        *,
        revision: str | None = None,
        dtype: torch.dtype | str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
    ) -> Self:
        """Opens a checkpoint and finds its experts.

        Args:
            name_or_dir: A directory, or the id of a repository on the Hub.
            revision: Branch, tag or commit on the Hub; for a quantized store, the revision of the model it was made
                from.
            dtype: Floating type to compute in, or its name; None or ``auto``: the checkpoint's.
            token: Access token of the Hub.
            cache_dir: Cache of the Hub's files.

        Raises:
            ConfigError: If there is no such model, or ``dtype`` is not a supported floating type.
            CheckpointError: If a file or tensor is missing, truncated or of a wrong shape; names it.
            UnsupportedError: If the model has no experts, or experts that cannot be offloaded.
        """
        is_store = is_quantized_store(name_or_dir)
        checkpoint = Checkpoint.open(
            name_or_dir, revision=None if is_store else revision, token=token, cache_dir=cache_dir
        )
        store = open_quantized(checkpoint, base_revision=revision if is_store else None)
        return cls.inspect(checkpoint, store, dtype=dtype)

    @classmethod
    def inspect(
        cls,
        checkpoint: Checkpoint,
        quantized: QuantizedStore | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        layers: range | None = None,
    ) -> Self:
        """Finds the experts of an open checkpoint.

        ``quantized`` is the store of its experts, if it is one. ``layers`` are those whose experts are wanted, None
        for all; these need not have any, if others have.

        Raises:
            ConfigError: If ``dtype`` is not a supported floating type.
            CheckpointError: If a file or tensor is missing, truncated or of a wrong shape, or the config is wrong;
                names it.
            UnsupportedError: If the model has no experts, or experts that cannot be offloaded.
        """
        name, config = checkpoint.name, without_quantization(checkpoint.config)
        published = Published.of(checkpoint) if quantized is None else None
        compute_dtype = _compute_dtype(checkpoint, dtype, is_packed=published is not None)
        tasks = MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        model_class = class_for_task(config, "language model", *tasks)
        config = config_for(model_class, config)
        outline = build_outline(model_class, config, compute_dtype, name)
        paths = _experts_paths(outline, name)
        check_picks(outline, paths, name)
        if quantized is not None:
            quantized.check_fits(outline, paths)
        if layers is not None:
            paths = {layer: path for layer, path in paths.items() if layer in layers}
        store: CheckpointStore | QuantizedStore
        packed: Mapping[int, Mapping[str, StoredFormat]] = {}
        placing = None
        if quantized is not None:
            store, others = quantized.of_layers(paths), quantized.other_tensors()
            is_transposed = {layer: quantized.manifest.layers[str(layer)].is_transposed for layer in paths}
        elif published is not None:
            placing = place(published, outline, {name: name for name in checkpoint.tensors})
            found = locate_published(outline, paths, placing)
            store, others, packed = CheckpointStore(found.experts, checkpoint.file_path), found.others, found.formats
            is_transposed = _lie_transposed(store, outline, paths, packed)
        else:
            located = locate_experts(outline, paths, checkpoint.tensors)
            store, others = CheckpointStore(located.experts, checkpoint.file_path), located.others
            is_transposed = _lie_transposed(store, outline, paths, packed)
        return cls(
            checkpoint=checkpoint,
            config=config,
            dtype=compute_dtype,
            model_class=model_class,
            outline=outline,
            paths=paths,
            store=store,
            is_transposed=is_transposed,
            others=others,
            placing=placing,
            packed=packed,
        )

    @property
    def quantized(self) -> QuantizedStore | None:
        """The store, if `swarm quantize` made it."""
        return self.store if isinstance(self.store, QuantizedStore) else None

    @property
    def base_version(self) -> ModelVersion:
        """The model's version; of a store, that of the model it was made from."""
        return self.checkpoint.version if self.quantized is None else self.quantized.manifest.base_version

    @property
    def other_bits(self) -> Width | None:
        """Width of the other weights if they are quantized, else None."""
        bits = None if self.quantized is None else self.quantized.manifest.other_bits
        return None if bits == 16 else bits

    def check_has_experts(self, layers: range) -> None:
        """Checks that some of these layers have experts.

        Raises:
            UnsupportedError: If none has.
        """
        if not any(layer in layers for layer in self.paths):
            raise UnsupportedError(
                f"blocks {layers.start}:{layers.stop} of {self.checkpoint.name} have no experts: serve them without "
                "--experts"
            )

    def load_rest(self, device: torch.device) -> PreTrainedModel:
        """Returns HF's own class with everything but the weights of experts, in evaluation mode.

        Raises:
            CheckpointError: If a tensor is missing, truncated or of a wrong shape.
        """

        def trim(model: PreTrainedModel) -> None:
            empty_modules(map(model.get_submodule, self.paths.values()))
            leave_out(model, () if self.quantized is None else self.quantized.manifest.linears)
            if placing is not None:
                placing.leave_out(model)

        placing = None if self.placing is None else replace(self.placing, experts={})
        tensors = self.checkpoint.read(plain_names(placing, self.others), what="all but the experts")
        biases: dict[str, Tensor] = {}
        if placing is not None:
            log.info("%s: %s", self.checkpoint.name, widening_of(placing, self.dtype, device=device))
            biases = placing.take_biases(tensors)
            tensors.update(placing.widened_others(self.dtype))
        model = model_from_tensors(self.model_class, self.config, tensors, self.dtype, self.checkpoint.name, trim=trim)
        take_generation_config(model, self.checkpoint)
        model.to(device)  # type: ignore[arg-type]  # the wrapper around it has lost its signature
        if self.quantized is not None:
            self.quantized.install_linears(model, device)
        if placing is not None:
            placing.install(model, biases, self.dtype, device)
        return model


def _compute_dtype(checkpoint: Checkpoint, wanted: torch.dtype | str | None, *, is_packed: bool) -> torch.dtype:
    known = ", ".join(FLOATS)
    if wanted not in (None, "auto", *FLOATS, *FLOATS.values()):
        raise ConfigError(f"dtype is {wanted!r}; expected one of auto, {known}, or the torch.dtype itself")
    if wanted not in (None, "auto"):
        return FLOATS[str(wanted).removeprefix("torch.")]
    found: torch.dtype = getattr(checkpoint.config, "dtype", None) or stored_dtype(checkpoint, is_packed=is_packed)
    if found not in FLOATS.values():
        raise UnsupportedError(
            f"the config of {checkpoint.name} says dtype {found!r}; give the one to compute in, one of {known}"
        )
    return found


def _lie_transposed(
    store: CheckpointStore, outline: PreTrainedModel, paths: Mapping[int, str], packed: Collection[int]
) -> dict[int, bool]:
    """Returns whether weights of experts lie as ``[in, out]``; formats of packed ones say so themselves."""
    return {
        layer: layer not in packed and store.is_transposed(layer) != bool(outline.get_submodule(path).is_transposed)
        for layer, path in paths.items()
    }


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
        f"{name} ({type(outline).__name__}) has no experts: only mixture-of-experts models can be offloaded, "
        "load or serve a dense one without offloading"
    )
