"""Writes checkpoints in published formats, by the libraries that own these; embeddings and norms stay in float32."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.outline import meta_model
from swarm_plugins.errors import MissingExtraError
from swarm_plugins.merging.base import PlainBase
from swarm_plugins.merging.llama_cpp.architectures import architecture_of, frequency_factors, hyperparameters
from swarm_plugins.merging.llama_cpp.library import gguf_py
from swarm_plugins.merging.llama_cpp.tensors import plan_tensors
from swarm_plugins.merging.llama_cpp.writing import add_fields, open_writer

GGUF_TYPES = ("Q8_0", "Q4_K", "Q4_0", "MXFP4")
_FP8_BLOCK = (128, 128)
_INT4 = "pack-quantized"
_INT4_GROUP = 32
# What llama.cpp takes for rows that are not whole blocks of 256.
_INSTEAD = {"Q4_K": "Q5_0"}
_WIDE = ("token_embd.weight", "output.weight")


def write_fp8(source: Path, out: Path) -> Path:
    """Writes a checkpoint whose linear layers are e4m3 with a scale per block of 128 x 128, by transformers."""
    quantize: Any = Fp8Quantize(
        SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=_FP8_BLOCK, scale_fmt=None))
    )

    def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
        # transformers takes whole blocks only; those at the edges are cut, as DeepSeek's are.
        rows, columns = weight.shape
        padded = functional.pad(weight, (0, -columns % _FP8_BLOCK[1], 0, -rows % _FP8_BLOCK[0]))
        made: dict[str, Tensor] = quantize.convert({name: padded})
        made[name] = made[name][:rows, :columns].contiguous()
        return made

    return _write(source, out, {"quant_method": "fp8", "weight_block_size": list(_FP8_BLOCK)}, pack)


def write_int4(source: Path, out: Path) -> Path:
    """Writes a checkpoint whose linear layers are integers of 4 bits in groups of 32, by compressed-tensors.

    Raises:
        MissingExtraError: If it is not installed.
    """
    try:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    except ImportError as exc:
        raise MissingExtraError(f"{_INT4} needs the package compressed-tensors: {exc}") from exc
    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=_INT4_GROUP, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor: Any = BaseCompressor.get_value_from_registry(_INT4)

    def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
        scales = weight.unflatten(1, (-1, _INT4_GROUP)).abs().amax(dim=2) / 7
        parts = compressor.compress({"weight": weight, "weight_scale": scales.bfloat16()}, scheme)
        return {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}

    groups = {"group_0": {"targets": ["Linear"], "weights": json.loads(weights.model_dump_json())}}
    config = {"quant_method": "compressed-tensors", "format": _INT4, "config_groups": groups, "ignore": ["lm_head"]}
    return _write(source, out, config, pack)


def _write(
    source: Path, out: Path, config: Mapping[str, Any], pack: Callable[[str, Tensor], dict[str, Tensor]]
) -> Path:
    """Writes a checkpoint with packed linear layers; `pack` gets a weight's name, and the weight in float32."""
    checkpoint = Checkpoint.open(source)
    tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoint.read(list(checkpoint.tensors)).items():
        is_packed = tensor.ndim == 2 and ".layers." in name
        tensors.update(pack(name, tensor.float()) if is_packed else {name: tensor})
    out.mkdir()
    fields = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    for file in source.glob("*.json"):
        if file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy(file, out)
    save_file(tensors, out / "model.safetensors")
    return out


def write_gguf(source: Path, out: Path, kind: str) -> Path:
    """Writes a GGUF file whose linear layers are of a type, by gguf-py or ggml.

    Raises:
        MissingExtraError: If the type needs ggml and the package xllamacpp is not installed.
    """
    gguf, checkpoint = gguf_py(), Checkpoint.open(source)
    config, architecture = checkpoint.config, architecture_of(checkpoint.config)
    base = PlainBase(checkpoint, meta_model(config, torch.float32), torch.float32)
    pack = _packers(kind)
    # Before a file is there: what is not installed.
    planned = plan_tensors(base.tensors.items(), config, architecture, "F32")
    with open_writer(out, architecture.name) as writer:
        values = hyperparameters(config, architecture)
        add_fields(writer, {f"{architecture.name}.{key}": value for key, value in values.items()})
        if (factors := frequency_factors(config)) is not None:
            writer.add_tensor("rope_freqs.weight", factors.numpy())
        for one in planned:
            wide = one.made_of(lambda name: base.read([name])[name]).contiguous().numpy()
            if wide.ndim == 1 or one.name in _WIDE:
                writer.add_tensor(one.name, wide)
                continue
            own = kind
            if wide.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
                own = _INSTEAD[kind]
            writer.add_tensor(one.name, pack[own](wide), raw_dtype=gguf.GGMLQuantizationType[own])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return out


def _packers(kind: str) -> Mapping[str, Callable[[Any], Any]]:
    """Returns what packs weights ``[.., out, in]`` of float32 to a type, or to the one that stands in for it."""
    gguf = gguf_py()

    def by_gguf_py(name: str) -> Callable[[Any], Any]:
        return lambda wide: gguf.quants.quantize(wide, gguf.GGMLQuantizationType[name])

    if kind != "Q4_K":
        return {kind: by_gguf_py(kind)}
    return {kind: _Ggml(kind), _INSTEAD[kind]: by_gguf_py(_INSTEAD[kind])}


class _Ggml:
    """ggml's own quantization, which gguf-py does not have for types with K: as the wheel of xllamacpp exports it."""

    def __init__(self, kind: str) -> None:
        spec = importlib.util.find_spec("xllamacpp")
        if spec is None or spec.submodule_search_locations is None:
            raise MissingExtraError(f"{kind} is quantized by llama.cpp: install the package xllamacpp")
        [library] = Path(spec.submodule_search_locations[0]).glob("xllamacpp*.so")
        self._quantize = ctypes.CDLL(str(library)).ggml_quantize_chunk
        self._quantize.restype = ctypes.c_size_t
        self._kind = gguf_py().GGMLQuantizationType[kind]

    def __call__(self, wide: Any) -> Any:
        gguf = gguf_py()
        found = np.empty(gguf.quant_shape_to_byte_shape(wide.shape, self._kind), np.uint8)
        rows, columns = wide.size // wide.shape[-1], wide.shape[-1]
        written = self._quantize(
            ctypes.c_int(int(self._kind)),
            ctypes.c_void_p(wide.ctypes.data),
            ctypes.c_void_p(found.ctypes.data),
            *(ctypes.c_int64(number) for number in (0, rows, columns)),
            ctypes.c_void_p(None),
        )
        if written != found.nbytes:
            raise ValueError(f"ggml wrote {written} bytes, expected {found.nbytes}")
        return found


WRITERS: Mapping[str, Callable[[Path, Path], Path]] = {
    "fp8": write_fp8,
    _INT4: write_int4,
    **{kind: partial(write_gguf, kind=kind) for kind in GGUF_TYPES},
}
"""Write a checkpoint, the first argument, in a published format to a new folder or file, the second."""
