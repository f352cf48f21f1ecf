"""Writes a LoRA as GGUF, to be loaded beside its base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from peft.tuners.lora.layer import Linear, ParamWrapper
from torch import Tensor, nn

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.outline import meta_model
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.hub import AdapterFolder
from swarm_plugins.merging.adapter import ADAPTER_NAME, MergingAdapter
from swarm_plugins.merging.llama_cpp.architectures import architecture_of, heads_of, in_pairs
from swarm_plugins.merging.llama_cpp.library import gguf_py
from swarm_plugins.merging.llama_cpp.tensors import name_map
from swarm_plugins.merging.llama_cpp.writing import Entry, add_fields, open_writer, write_entries
from swarm_plugins.merging.merged import dtype_of
from swarm_plugins.merging.places import new_place

_HEADER_BYTES = 1 << 20
_GATE_AND_UP = "gate_up_proj"
"""What transformers calls two weights of fused experts in one, the first half of the rows and the second."""


class _Product(NamedTuple):
    """What is added to a weight: ``scaling`` times B times A."""

    name: str
    """Of the module, as a checkpoint has it."""
    a: Tensor
    """``[rank, in]``, or ``[experts, rank, in]``."""
    b: Tensor
    """``[out, rank]``, or ``[experts, out, rank]``."""
    scaling: float


def write_lora(checkpoint: Checkpoint, adapter: AdapterFolder, out: Path) -> None:
    """Writes a LoRA as a GGUF file; of the base only the config is read.

    Args:
        checkpoint: The base.
        adapter: The adapter.
        out: The file, which must not exist.

    Raises:
        MissingExtraError: If gguf-py is not installed.
        UnsupportedError: If the adapter is more than products of low rank, or llama.cpp does not know the base's type.
        CheckpointError: If the adapter does not fit the base.
        ConfigError: If ``out`` exists.
        OSError: If it cannot be written; nothing is left behind.
    """
    gguf, config = gguf_py(), checkpoint.config
    architecture = architecture_of(config)
    merging = MergingAdapter(adapter, meta_model(config, dtype_of(checkpoint)))
    named = name_map(architecture, config.num_hidden_layers)
    # llama.cpp reads a zero as a missing alpha.
    alpha = float(getattr(merging.config, "lora_alpha", 1.0)) or 1.0
    entries: list[Entry] = []
    for name, a, b, scaling in _products(merging):
        target = named(f"{name}.weight")
        if target is None or (target == "output.weight" and config.tie_word_embeddings):
            raise _refusal(merging.label, name)
        # llama.cpp multiplies by alpha over the rank.
        b = b * (scaling * a.shape[-2] / alpha)
        heads = heads_of(target, config)
        if architecture.rotates_pairs and heads is not None:
            b = in_pairs(b, heads)
        entries += [_entry(f"{target}.lora_a", a), _entry(f"{target}.lora_b", b)]
    num_bytes = sum(entry.num_bytes for entry in entries) + _HEADER_BYTES
    with new_place(out, num_bytes) as path, open_writer(path, architecture.name) as writer:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_name(Path(adapter.label).name)
        add_fields(writer, {gguf.Keys.Adapter.TYPE: "lora", gguf.Keys.Adapter.LORA_ALPHA: alpha})
        write_entries(writer, entries)


def _entry(name: str, tensor: Tensor) -> Entry:
    wide = tensor.detach().float()
    return Entry(name, tuple(wide.shape), "F32", lambda: wide)


def _products(merging: MergingAdapter) -> Iterator[_Product]:
    for path, layer in merging.modules.items():
        if isinstance(layer, ParamWrapper):
            yield from _of_experts(path, layer, merging.label)
        else:
            yield _of_linear(path, layer, merging.label)


def _of_linear(path: str, layer: nn.Module, label: str) -> _Product:
    if not isinstance(layer, Linear) or layer.lora_variant or layer.lora_bias.get(ADAPTER_NAME):
        raise _refusal(label, path)
    lora: Any = layer
    return _Product(
        path, lora.lora_A[ADAPTER_NAME].weight, lora.lora_B[ADAPTER_NAME].weight, lora.scaling[ADAPTER_NAME]
    )


def _of_experts(path: str, layer: nn.Module, label: str) -> Iterator[_Product]:
    while isinstance(layer, ParamWrapper):
        lora: Any = layer
        if lora.num_experts == 1 or not lora._did_swap_in_out_features:
            raise _refusal(label, f"{path}.{lora.parameter_name}")
        # In PEFT's order: of A the experts are outermost, of B the ranks.
        a = lora.lora_A[ADAPTER_NAME].weight.unflatten(0, (lora.num_experts, -1))
        b = lora.lora_B[ADAPTER_NAME].weight.unflatten(1, (-1, lora.num_experts)).permute(2, 0, 1)
        names = ("gate_proj", "up_proj") if lora.parameter_name == _GATE_AND_UP else (lora.parameter_name,)
        for name, part in zip(names, b.chunk(len(names), dim=1), strict=True):
            yield _Product(f"{path}.{name}", a, part, lora.scaling[ADAPTER_NAME])
        layer = lora.base_layer


def _refusal(label: str, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{label} changes {name} in a way that llama.cpp's adapters cannot: they are plain LoRA on linear layers and "
        "experts of the blocks; merge with --gguf instead"
    )
