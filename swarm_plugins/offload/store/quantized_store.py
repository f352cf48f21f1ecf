"""A directory that `swarm quantize` made: experts in few bits, one buffer each, beside the rest of the model."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError
from swarm_plugins.offload.disk.direct_file import file_identity
from swarm_plugins.offload.formats.experts import PlainFormat, QuantizedFormat, are_finite, matrix_format
from swarm_plugins.offload.formats.linears import PARTS, QuantizedLinear, replace_module
from swarm_plugins.offload.interfaces import BufferLayout, ExpertFormat, ExpertKey, FileIdentity, FileRange
from swarm_plugins.offload.store.manifest import (
    CONFIG_FILE,
    MANIFEST_FILE,
    QUANT_METHOD,
    Manifest,
    config_hash,
    expert_tensor,
    read_manifest,
)
from swarm_plugins.offload.store.writing import padded_bytes

__all__ = ["QuantizedStore", "is_quantized_store", "open_quantized"]


class QuantizedStore:
    """An [`ExpertStore`][swarm_plugins.offload.interfaces.ExpertStore] over the files of a quantized store.

    Args:
        checkpoint: The store's files.
        manifest: What it says of itself.
        layers: Those whose experts are wanted; None: all.
    """

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest, layers: Container[int] | None = None) -> None:
        self.manifest = manifest
        self.num_experts: Mapping[int, int] = {
            int(index): layer.num_experts
            for index, layer in manifest.layers.items()
            if layers is None or int(index) in layers
        }
        self._checkpoint = checkpoint
        self._layouts = {layer: self._stored(layer) for layer in self.num_experts}
        self._files: dict[str, tuple[Path, FileIdentity]] = {}

    def of_layers(self, layers: Container[int]) -> QuantizedStore:
        """Returns the same with the experts of some layers only."""
        return QuantizedStore(self._checkpoint, self.manifest, layers)

    def fetch(self) -> None:
        """Brings the files of the experts here; until then the headers are all that is known of them.

        What is there then is what is read later, or nothing.

        Raises:
            CheckpointError: If a file is missing or cannot be fetched.
        """
        names = (expert_tensor(layer, expert) for layer, count in self.num_experts.items() for expert in range(count))
        for file in sorted({self._checkpoint.tensors[name].file for name in names}):
            path = self._checkpoint.file_path(file)
            self._files[file] = (path, file_identity(path))

    def stored_layout(self, layer: int) -> BufferLayout:
        """Returns how an expert of a layer lies in its buffer after reading."""
        return self._layouts[layer]

    def ranges(self, key: ExpertKey) -> Sequence[FileRange]:
        """Returns where an expert's buffer lies, in one piece of a file that was fetched."""
        info = self._checkpoint.tensors[expert_tensor(*key)]
        path, identity = self._files[info.file]
        return (FileRange(path, info.start, self._layouts[key.layer].num_bytes, 0, info.name, identity),)

    def format(self, layer: int, dtype: torch.dtype, device: torch.device) -> ExpertFormat:
        """Returns how to multiply with the experts of a layer.

        Args:
            layer: Index of the layer.
            dtype: Type to compute in.
            device: Where.
        """
        found = self.manifest.layers[str(layer)]
        if self.manifest.expert_bits == 16:
            return PlainFormat(found.layout(), dtype, is_transposed=found.is_transposed)
        return QuantizedFormat(found.layout(), self.manifest.expert_bits, device)

    def other_tensors(self) -> list[str]:
        """Returns the names of the tensors that are neither experts nor of quantized linear layers."""
        taken = {f"{name}.{part}" for name in self.manifest.linears for part in (*PARTS.values(), "bias")}
        for index, layer in self.manifest.layers.items():
            taken.update(expert_tensor(int(index), expert) for expert in range(layer.num_experts))
        return [name for name in self._checkpoint.tensors if name not in taken]

    def install_linears(
        self, model: PreTrainedModel, device: torch.device, places: Mapping[str, str] | None = None
    ) -> None:
        """Puts the quantized linear layers where they belong.

        Args:
            model: With any modules in their places.
            device: Where they compute.
            places: Names of those that are wanted, and where they go in the model; None: all, by their names.

        Raises:
            CheckpointError: If scales are not finite.
        """
        linears = self.manifest.linears
        for name, place in (places if places is not None else {name: name for name in linears}).items():
            names = {part: f"{name}.{full}" for part, full in PARTS.items()}
            bias_name = f"{name}.bias"
            has_bias = bias_name in self._checkpoint.tensors
            tensors = self._checkpoint.read([*names.values(), *([bias_name] if has_bias else [])], progress=False)
            bias = nn.Parameter(tensors[bias_name].to(device), requires_grad=False) if has_bias else None
            parts = {part: tensors[full] for part, full in names.items()}
            if not are_finite(parts["scales"]):
                raise CheckpointError(
                    f"{names['scales']} in {self._checkpoint.name} holds numbers that are not finite: the store is "
                    "damaged, fetch it again or run swarm quantize again"
                )
            linear = QuantizedLinear(linears[name], self.manifest.other_bits, parts, bias, device)
            replace_module(model, place, linear)

    def saved_bytes(self, dtype: torch.dtype) -> int:
        """Returns how much less memory the linear layers take than in a floating type."""
        saved = 0
        for shape in self.manifest.linears.values():
            parts = matrix_format(shape, self.manifest.other_bits, torch.device("cpu")).computed
            saved += math.prod(shape) * dtype.itemsize
            saved -= sum(math.prod(part.shape) * part.dtype.itemsize for part in parts)
        return saved

    def check(self) -> None:
        """Compares what the store says of itself with the headers, before anything is allocated for it.

        Raises:
            CheckpointError: If a tensor is missing or has another shape.
        """
        for layer, count in self.num_experts.items():
            size = padded_bytes(self._layouts[layer].num_bytes)
            for expert in range(count):
                self._check_tensor(expert_tensor(layer, expert), torch.uint8, (size,))
        cpu = torch.device("cpu")
        for name, shape in self.manifest.linears.items():
            for part in matrix_format(shape, self.manifest.other_bits, cpu).stored:
                self._check_tensor(f"{name}.{PARTS[part.name]}", part.dtype, part.shape)

    def _stored(self, layer: int) -> BufferLayout:
        plain = self.manifest.layers[str(layer)].layout()
        bits = self.manifest.expert_bits
        return plain if bits == 16 else QuantizedFormat(plain, bits, torch.device("cpu")).stored

    def _check_tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        info = self._checkpoint.tensors.get(name)
        if info is None or (info.dtype, info.shape) != (dtype, shape):
            found = "missing" if info is None else f"{list(info.shape)} of {info.dtype}"
            raise CheckpointError(
                f"{name} in {self._checkpoint.name} is {found}, its {MANIFEST_FILE} asks for {list(shape)} of {dtype}: "
                "run swarm quantize again"
            )


def is_quantized_store(name_or_dir: str | Path) -> bool:
    """Says whether a directory is a quantized store."""
    return (Path(name_or_dir).expanduser() / MANIFEST_FILE).is_file()


def open_quantized(checkpoint: Checkpoint, *, base_revision: str | None = None) -> QuantizedStore | None:
    """Opens a quantized store; None if the checkpoint is none.

    Args:
        checkpoint: Its files.
        base_revision: Of the model that it must have been made from; None: any.

    Raises:
        CheckpointError: If it is damaged, or was made from another revision.
    """
    method = _quantization(checkpoint.config).get("quant_method")
    if method != QUANT_METHOD:
        return None
    manifest = read_manifest(checkpoint.file_path(MANIFEST_FILE))
    _check_config(checkpoint, manifest)
    base = manifest.base_version
    if base_revision is not None and base_revision != base.revision:
        raise CheckpointError(
            f"{checkpoint.name} was made from {base}, but revision {base_revision!r} is asked for: leave the revision "
            "out, or make a store of that revision with swarm quantize"
        )
    store = QuantizedStore(checkpoint, manifest)
    store.check()
    return store


def _check_config(checkpoint: Checkpoint, manifest: Manifest) -> None:
    path = checkpoint.file_path(CONFIG_FILE)
    # Stores that earlier versions made do not say it.
    if manifest.config_sha256 and manifest.config_sha256 != config_hash(path):
        raise CheckpointError(
            f"{path} is not the one that the store was made with: put that back, or run swarm quantize again"
        )


def _quantization(config: PreTrainedConfig) -> Mapping[str, object]:
    found = getattr(config, "quantization_config", None)
    return found if isinstance(found, Mapping) else {}
