"""A directory that `swarm quantize` made: experts in few bits, one buffer each, and the rest of the model."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from swarm_plugins.checkpoint import Checkpoint, TensorInfo
from swarm_plugins.errors import CheckpointError
from swarm_plugins.model_names import expanded
from swarm_plugins.offload.formats.experts import PlainFormat, QuantizedFormat, are_finite
from swarm_plugins.offload.interfaces import BufferLayout, ExpertFormat, ExpertKey, FileRange
from swarm_plugins.offload.store.checkpoint_store import FetchedFiles
from swarm_plugins.offload.store.manifest import (
    CONFIG_FILE,
    MANIFEST_FILE,
    Layer,
    Manifest,
    config_hash,
    expert_tensor,
    read_manifest,
)
from swarm_plugins.offload.store.writing import padded_bytes
from swarm_plugins.weights.choice import format_of, kernel_for
from swarm_plugins.weights.linears import PackedLinear, quantizable_linears, tensor_name
from swarm_plugins.weights.widths import QUANT_METHOD, Width

_CPU = torch.device("cpu")
_HALF = ("float16", "bfloat16")
_MAX_CHARS = 500


class QuantizedStore:
    """An [`ExpertStore`][swarm_plugins.offload.interfaces.ExpertStore] over all or some layers of a quantized store."""

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest, layers: Container[int] | None = None) -> None:
        self.manifest = manifest
        self.num_experts: Mapping[int, int] = {
            int(index): layer.num_experts
            for index, layer in manifest.layers.items()
            if layers is None or int(index) in layers
        }
        self._checkpoint = checkpoint
        self._linears = {name: format_of(shape, manifest.other_bits) for name, shape in manifest.linears.items()}
        self._layouts = {layer: self.format(layer, torch.float32, _CPU).stored for layer in self.num_experts}
        self._files = FetchedFiles(checkpoint.file_path)

    def of_layers(self, layers: Container[int]) -> QuantizedStore:
        """Returns the store with the experts of some layers only."""
        return QuantizedStore(self._checkpoint, self.manifest, layers)

    def fetch(self) -> None:
        """Brings the files of the experts here; until then only their headers are known.

        Raises:
            CheckpointError: If a file is missing or cannot be fetched.
        """
        names = (expert_tensor(layer, expert) for layer, count in self.num_experts.items() for expert in range(count))
        self._files.fetch(self._checkpoint.tensors[name].file for name in names)

    def stored_layout(self, layer: int) -> BufferLayout:
        return self._layouts[layer]

    def ranges(self, key: ExpertKey) -> Sequence[FileRange]:
        """Returns where an expert's buffer lies, in one piece of a fetched file."""
        info = self._checkpoint.tensors[expert_tensor(*key)]
        return (self._files.range(info, info.start, self._layouts[key.layer].num_bytes, 0),)

    def format(self, layer: int, dtype: torch.dtype, device: torch.device) -> ExpertFormat:
        """Returns the format of a layer's experts, to compute in a type on a device."""
        found = self.manifest.layers[str(layer)]
        if self.manifest.expert_bits == 16:
            return PlainFormat(found.layout(), dtype, is_transposed=found.is_transposed)
        return QuantizedFormat(found.layout(), self.manifest.expert_bits, device)

    def other_tensors(self) -> list[str]:
        """Returns the names of the tensors that belong neither to experts nor to quantized linear layers."""
        taken = {f"{name}.bias" for name in self.manifest.linears}
        for name, linear in self._linears.items():
            taken.update(f"{name}.{tensor_name(part.name)}" for part in linear.parts)
        for index, layer in self.manifest.layers.items():
            taken.update(expert_tensor(int(index), expert) for expert in range(layer.num_experts))
        return [name for name in self._checkpoint.tensors if name not in taken]

    def install_linears(
        self, model: PreTrainedModel, device: torch.device, places: Mapping[str, str] | None = None
    ) -> None:
        """Puts quantized linear layers into a model; ``places`` maps wanted ones to names there, None: all as named.

        Raises:
            CheckpointError: If scales are not finite.
        """
        for name, place in (places if places is not None else {name: name for name in self._linears}).items():
            stored = self._linears[name]
            names = {part.name: f"{name}.{tensor_name(part.name)}" for part in stored.parts}
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
            model.set_submodule(place, PackedLinear(stored, parts, bias, device, dtype=model.dtype))

    def saved_bytes(self, dtype: torch.dtype) -> int:
        """Returns how much less memory the linear layers take than in a floating type."""
        saved = 0
        for name, shape in self.manifest.linears.items():
            saved += math.prod(shape) * dtype.itemsize
            saved -= sum(part.num_bytes for part in kernel_for(self._linears[name], _CPU).computed)
        return saved

    def check(self) -> None:
        """Compares the manifest with the headers, before anything is allocated for it.

        Raises:
            CheckpointError: If a tensor is missing or has another shape.
        """
        for layer, count in self.num_experts.items():
            size = padded_bytes(self._layouts[layer].num_bytes)
            for expert in range(count):
                self._check_tensor(expert_tensor(layer, expert), torch.uint8, (size,))
        for name, linear in self._linears.items():
            for part in linear.parts:
                self._check_tensor(f"{name}.{tensor_name(part.name)}", part.dtype, part.shape)

    def check_fits(self, outline: PreTrainedModel, paths: Mapping[int, str]) -> None:
        """Compares every expert, quantized linear layer and other tensor with its place in the model of the config.

        Raises:
            CheckpointError: If a number of experts, a name, a shape or a type differs.
        """
        tensors, name = self._checkpoint.tensors, self._checkpoint.name
        modules = {layer: outline.get_submodule(path) for layer, path in paths.items()}
        found = {int(index): layer.num_experts for index, layer in self.manifest.layers.items()}
        expected = {layer: int(module.num_experts) for layer, module in modules.items()}  # type: ignore[arg-type]
        if found != expected:
            raise _mismatch(f"{name} holds the experts {str(found)[:_MAX_CHARS]} (layer: number)", str(expected))
        for index, module in modules.items():
            layer = self.manifest.layers[str(index)]
            _check_experts(layer, module, self.manifest.expert_bits, f"layer {index} of {name}")
        candidates = quantizable_linears(outline)
        for path, shape in self.manifest.linears.items():
            label = f"{path[:_MAX_CHARS]!r} of {name}"
            _check_linear(shape, candidates.get(path), tensors.get(f"{path}.bias"), label)
        wanted = {
            key: tuple(tensor.shape)
            for key, tensor in outline.state_dict().items()
            if not key.startswith(tuple(f"{path}." for path in paths.values()))
        }
        for other in self.other_tensors():
            if tensors[other].shape != wanted.get(other):
                raise _mismatch(
                    f"{other[:_MAX_CHARS]!r} of {name} has the shape {list(tensors[other].shape)}",
                    str(list(wanted[other])) if other in wanted else "no such tensor",
                )

    def _check_tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        info = self._checkpoint.tensors.get(name)
        if info is None or (info.dtype, info.shape) != (dtype, shape):
            found = "missing" if info is None else f"{list(info.shape)} of {info.dtype}"
            raise CheckpointError(
                f"{name} in {self._checkpoint.name} is {found}, its {MANIFEST_FILE} asks for {list(shape)} of {dtype}: "
                "run swarm quantize again"
            )


def _check_experts(layer: Layer, module: nn.Module, bits: Width, label: str) -> None:
    is_turned = layer.is_transposed != bool(module.is_transposed)
    expected = {}
    for name, parameter in module.named_parameters(recurse=False):
        shape = tuple(parameter.shape[1:])
        expected[name] = shape[::-1] if is_turned and len(shape) == 2 else shape
    found = {one.name: one.shape for one in layer.tensors}
    if found != expected or len(found) != len(layer.tensors):
        raise _mismatch(f"an expert of {label} consists of {str(found)[:_MAX_CHARS]}", str(expected))
    for one in layer.tensors:
        # Biases have the checkpoint's type, and 16 bits in older stores.
        if bits == 16 and len(one.shape) == 2 and one.dtype not in _HALF:
            raise _mismatch(f"{one.name} in {label} is of type {one.dtype}", " or ".join(_HALF))


def _check_linear(shape: tuple[int, int], linear: nn.Linear | None, bias: TensorInfo | None, label: str) -> None:
    if linear is None:
        raise _mismatch(f"{label} is quantized", "no such linear layer, or for one that is not quantized")
    expected = (linear.out_features, linear.in_features)
    if tuple(shape) != expected:
        raise _mismatch(f"{label} has the shape {list(shape)}", str(list(expected)))
    has_bias = linear.bias is not None
    if (bias is not None) != has_bias or (bias is not None and bias.shape != expected[:1]):
        size = "no bias" if bias is None else f"a bias of shape {list(bias.shape)}"
        raise _mismatch(f"{label} has {size}", f"{list(expected[:1])}" if has_bias else "none")


def _mismatch(found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{found}, its config asks for {expected[:_MAX_CHARS]}: config and store are of different models, "
        "run swarm quantize again"
    )


def is_quantized_store(name_or_dir: str | Path) -> bool:
    """Returns whether a directory is a quantized store."""
    return (expanded(name_or_dir) / MANIFEST_FILE).is_file()


def open_quantized(checkpoint: Checkpoint, *, base_revision: str | None = None) -> QuantizedStore | None:
    """Opens a quantized store, made from a revision of its base or None for any; None if the checkpoint is not a store.

    Raises:
        CheckpointError: If it is damaged, or was made from another revision.
    """
    stated = getattr(checkpoint.config, "quantization_config", None)
    if not isinstance(stated, Mapping) or stated.get("quant_method") != QUANT_METHOD:
        return None
    manifest = read_manifest(checkpoint.file_path(MANIFEST_FILE))
    config_path = checkpoint.file_path(CONFIG_FILE)
    # Stores made by earlier versions do not record it.
    if manifest.config_sha256 and manifest.config_sha256 != config_hash(config_path):
        raise CheckpointError(
            f"{config_path} is not the one that the store was made with: put that back, or run swarm quantize again"
        )
    base = manifest.base_version
    if base_revision is not None and base_revision != base.revision:
        raise CheckpointError(
            f"{checkpoint.name} was made from {base}, but revision {base_revision!r} is asked for: leave the revision "
            "out, or make a store of that revision with swarm quantize"
        )
    store = QuantizedStore(checkpoint, manifest)
    store.check()
    return store
