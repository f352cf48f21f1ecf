"""Quantizes a checkpoint into a store, one expert at a time."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.files import Piece, check_inside, read_pieces
from swarm_plugins.checkpoint.index import OWN_INDEX_FILE
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError, one_line
from swarm_plugins.model_names import expanded
from swarm_plugins.offload.formats.experts import QuantizedFormat, turn, turned
from swarm_plugins.offload.interfaces import BufferLayout, ExpertKey
from swarm_plugins.offload.model.moe_checkpoint import MoeCheckpoint
from swarm_plugins.offload.store.manifest import (
    CONFIG_FILE,
    MANIFEST_FILE,
    Layer,
    Manifest,
    TensorShape,
    expert_tensor,
)
from swarm_plugins.offload.store.writing import check_space, padded_bytes, work_directory, write_buffers, write_json
from swarm_plugins.weights.choice import format_of, half_type
from swarm_plugins.weights.linears import quantizable_linears, tensor_name
from swarm_plugins.weights.widths import QUANT_METHOD, Width, check_width

_CPU = torch.device("cpu")
_OTHERS_FILE = "others.safetensors"
# Tokenizer, chat template, generation defaults: small files without weights.
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_COPIED_BYTES = 100 << 20


class QuantizedSize(NamedTuple):
    """What a store holds."""

    expert_bytes: int
    """Of the files of experts."""
    other_bytes: int
    """Of the file of all other weights."""
    expert_weights: int
    """Number of the experts' weights."""

    @property
    def bits_per_expert_weight(self) -> float:
        """Scales and padding included."""
        return 8 * self.expert_bytes / self.expert_weights


def quantize_checkpoint(
    name_or_dir: str | Path,
    out: str | Path,
    *,
    expert_bits: Width,
    other_bits: Width = 16,
    revision: str | None = None,
    progress: bool = True,
) -> QuantizedSize:
    """Writes a directory that [`load_offloaded`][swarm_plugins.load_offloaded] loads.

    The same model gives the same bytes. Meanwhile the rest of the model and one expert are in memory. Where 16 bits are
    asked for, wider weights become bfloat16; norms, routers, biases, and layers whose weight the module around them
    reads, as Mamba's ``dt_proj``, stay as they are.

    Args:
        name_or_dir: A directory, or the id of a repository on the Hub.
        out: Directory to make.
        expert_bits: Width of experts: 16, 8, 4, 3, 2, ``nf4``, or ``4dq``, ``3dq``, ``2dq`` with scales quantized as
            well.
        other_bits: Width of all other linear layers but the output head, one of the same.
        revision: Branch, tag or commit on the Hub.
        progress: Show a bar.

    Raises:
        ConfigError: If a width is not allowed, the directory exists, or another process is making it.
        CheckpointError: If the model is damaged, holds numbers that are not finite, or there is too little space.
        UnsupportedError: If the model has no experts that can be offloaded, or is already quantized.
        OSError: If it cannot be written.
    """
    check_width("expert_bits", expert_bits)
    check_width("other_bits", other_bits)
    target = expanded(out).absolute()
    with work_directory(target) as work:
        moe = MoeCheckpoint.open(name_or_dir, revision=revision)
        if moe.quantized is not None:
            raise ConfigError(
                f"{name_or_dir} is quantized already: give {moe.quantized.manifest.base}, which it was made from"
            )
        if moe.placing is not None:
            raise UnsupportedError(
                f"{name_or_dir} is published as {moe.placing.published.name}, and packed weights are not quantized "
                "again: give the unquantized checkpoint, or offload this one as it is"
            )
        small_files = _small_files(moe.checkpoint)
        formats = {layer: _LayerFormat(moe, layer, expert_bits) for layer in moe.paths}
        expert_bytes = sum(one.file_bytes for one in formats.values())
        check_space(target, expert_bytes + sum(moe.checkpoint.tensors[name].num_bytes for name in moe.others))
        moe.store.fetch()
        others, linears = other_tensors(moe.load_rest(_CPU), other_bits)
        _save(others, work / _OTHERS_FILE)
        weight_map = dict.fromkeys(others, _OTHERS_FILE)
        del others
        weight_map |= _write_experts(moe, formats, work, progress)
        layers = {layer: one.layer for layer, one in formats.items()}
        manifest = Manifest.make(moe.checkpoint.version, expert_bits, other_bits, layers, linears)
        write_json(work / OWN_INDEX_FILE, {"weight_map": weight_map})
        for name, path in small_files.items():
            if not (work / name).exists():
                shutil.copyfile(path, work / name)
        _write_config(moe, work, manifest)
        # Last: a directory without the manifest is not a store.
        (work / MANIFEST_FILE).write_bytes(manifest.with_config(work / CONFIG_FILE).encode())
        other_bytes = (work / _OTHERS_FILE).stat().st_size
    return QuantizedSize(expert_bytes, other_bytes, sum(one.num_weights for one in formats.values()))


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as exc:
        raise CheckpointError(f"{path} cannot be written ({one_line(exc)}): free some space and try again") from exc


class _LayerFormat:
    """Quantizes the experts of a layer."""

    def __init__(self, moe: MoeCheckpoint, layer: int, bits: Width) -> None:
        self._source = moe.store.stored_layout(layer)
        self._is_turned = moe.is_transposed[layer] and bits != 16
        plain = turned(self._source) if self._is_turned else self._source
        if bits == 16:
            plain = _with_half_weights(plain)
        self._format = None if bits == 16 else QuantizedFormat(plain, bits, _CPU)
        self._stored = plain if self._format is None else self._format.stored
        self._index = layer
        self._store = moe.store
        self.num_experts = moe.store.num_experts[layer]
        self.num_weights = self.num_experts * sum(math.prod(one.shape) for one in plain.tensors)
        self.layer = Layer(
            num_experts=self.num_experts,
            tensors=tuple(
                TensorShape(one.name, str(one.dtype).removeprefix("torch."), one.shape) for one in plain.tensors
            ),
            is_transposed=moe.is_transposed[layer] and bits == 16,
        )

    @property
    def num_bytes(self) -> int:
        return self._stored.num_bytes

    @property
    def file_bytes(self) -> int:
        return self.num_experts * padded_bytes(self.num_bytes)

    def buffers(self, bar: tqdm) -> Iterator[tuple[str, Tensor]]:  # type: ignore[type-arg]
        """Yields name and buffer of each expert, overwriting the buffer before."""
        source = torch.zeros(self._source.num_bytes, dtype=torch.uint8, device="cpu")
        target = torch.zeros(self.num_bytes, dtype=torch.uint8, device="cpu")
        for expert in range(self.num_experts):
            key = ExpertKey(self._index, expert)
            for one in self._store.ranges(key):
                place = source[one.offset : one.offset + one.num_bytes].numpy().data
                read_pieces(one.path, [Piece(one.start, place)], lambda _: None)
            tensors = self._source.views(source)
            for name, tensor in tensors.items():
                _check_finite(f"{name} of expert {expert} in layer {self._index}", tensor)
            if self._is_turned:
                tensors = turn(tensors)
            if self._format is not None:
                tensors = self._format.quantize(tensors, is_fitted=True)
            for name, view in self._stored.views(target).items():
                view.copy_(tensors[name])
            yield expert_tensor(*key), target
            bar.update(1)


def _with_half_weights(layout: BufferLayout) -> BufferLayout:
    """Returns a layout with weights in 16 bits; biases, of one dimension, as they are."""
    specs = [
        (one.name, half_type(one.dtype) if len(one.shape) == 2 else one.dtype, one.shape) for one in layout.tensors
    ]
    return BufferLayout.of(specs)


def _write_experts(moe: MoeCheckpoint, formats: dict[int, _LayerFormat], work: Path, progress: bool) -> dict[str, str]:
    weight_map: dict[str, str] = {}
    total = sum(one.num_experts for one in formats.values())
    is_hidden = None if progress else True  # None: shown in a terminal only
    with tqdm(total=total, unit="expert", desc=f"Quantizing {moe.checkpoint.name}", disable=is_hidden) as bar:
        for layer, one in formats.items():
            file = f"experts-{layer:05d}.safetensors"
            names = [expert_tensor(layer, expert) for expert in range(one.num_experts)]
            write_buffers(work / file, one.num_bytes, one.buffers(bar), names)
            weight_map.update(dict.fromkeys(names, file))
    return weight_map


def other_tensors(model: PreTrainedModel, bits: Width) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
    """Returns tensors outside experts as a store has them, and the shapes of quantized linear layers by name.

    Raises:
        CheckpointError: If one holds numbers that are not finite; names it.
    """
    candidates = quantizable_linears(model)
    halved = {f"{name}.weight" for name in candidates}
    halved.update(f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding))
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        # Tied weights are stored once, as transformers does.
        if tensor.data_ptr() in seen and tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        tensors[name] = tensor.to(half_type(tensor.dtype)) if name in halved else tensor.contiguous()
        _check_finite(name, tensors[name])
    linears: dict[str, tuple[int, int]] = {}
    if bits != 16:
        for name, linear in candidates.items():
            linears[name] = (linear.out_features, linear.in_features)
            parts = format_of(linears[name], bits).quantize(linear.weight, is_fitted=True)
            del tensors[f"{name}.weight"]
            tensors.update({f"{name}.{tensor_name(part)}": tensor for part, tensor in parts.items()})
    return tensors, linears


def _write_config(moe: MoeCheckpoint, work: Path, manifest: Manifest) -> None:
    config = json.loads(moe.checkpoint.file_path(CONFIG_FILE).read_text())
    if getattr(moe.config, "dtype", None) is None:
        # Codes do not show it.
        config["dtype"] = str(moe.dtype).removeprefix("torch.")
    config["quantization_config"] = {
        "quant_method": QUANT_METHOD,
        "expert_bits": manifest.expert_bits,
        "other_bits": manifest.other_bits,
        "base": manifest.base,
    }
    write_json(work / CONFIG_FILE, config)


def _small_files(checkpoint: Checkpoint) -> dict[str, Path]:
    """Returns the files to copy, by name.

    Raises:
        CheckpointError: If a file links out of the checkpoint's directory, which could copy any file of this machine.
    """
    found = {}
    for name in checkpoint.file_names():
        is_kept = name.endswith(_COPIED_SUFFIXES) and "/" not in name
        if is_kept and name not in (CONFIG_FILE, MANIFEST_FILE) and not name.endswith(".index.json"):
            path = checkpoint.file_path(name)
            if checkpoint.directory is not None:
                check_inside(path, checkpoint.directory.resolve())
            if path.stat().st_size <= _COPIED_BYTES:
                found[name] = path
    return found


def _check_finite(name: str, tensor: Tensor) -> None:
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(f"{name} holds numbers that are not finite: the checkpoint is damaged, fetch it again")
