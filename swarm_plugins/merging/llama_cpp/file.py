"""Writes a merged model as one GGUF file, tensor by tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.merging.base import Planned
from swarm_plugins.merging.llama_cpp.architectures import architecture_of, frequency_factors, hyperparameters
from swarm_plugins.merging.llama_cpp.library import gguf_py
from swarm_plugins.merging.llama_cpp.tensors import plan_tensors
from swarm_plugins.merging.llama_cpp.tokenizer import add_tokenizer
from swarm_plugins.merging.llama_cpp.writing import Entry, add_fields, open_writer, write_entries
from swarm_plugins.merging.merged import MergedModel
from swarm_plugins.merging.places import new_place

GgufType = Literal["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"]
"""Types of ggml that gguf-py quantizes to."""
_HEADER_BYTES = 32 << 20
"""About what names, metadata and the tokenizer take."""
_HEAD = "lm_head.weight"


def write_gguf(model: MergedModel, out: Path, kind: GgufType) -> None:
    """Writes a merged model as a GGUF file.

    Args:
        model: The model.
        out: The file, which must not exist.
        kind: Type of its weights.

    Raises:
        MissingExtraError: If gguf-py is not installed.
        UnsupportedError: If llama.cpp's models or tokenizers have no place for it.
        ConfigError: If ``out`` exists.
        CapacityError: If the disk has no room for it.
        CheckpointError: If the base cannot be read, or a number is beyond the type's range.
        OSError: If it cannot be written; nothing is left behind.
    """
    config = model.checkpoint.config
    architecture = architecture_of(config)
    if model.is_untied and not architecture.has_own_head:
        raise UnsupportedError(
            f"the adapter changes one of the shared embeddings, and llama.cpp's architecture {architecture.name!r} has "
            "one matrix for both: merge into a folder instead"
        )
    is_shared = config.tie_word_embeddings and not model.is_untied
    tensors = {name: one for name, one in model.tensors.items() if not (is_shared and name == _HEAD)}
    name = f"{model.checkpoint.version.name} with {Path(model.adapter.label).name}"
    write_tensors(model.checkpoint, tensors, model.read, out, kind, name=name)


def write_tensors(
    checkpoint: Checkpoint,
    tensors: Mapping[str, Planned],
    read: Callable[[str], Tensor],
    out: Path,
    kind: GgufType,
    *,
    name: str,
) -> None:
    """Writes tensors of a checkpoint, changed or not, as a GGUF file.

    Args:
        checkpoint: Where config and tokenizer come from.
        tensors: The tensors, by their names in the checkpoint.
        read: Returns one of them.
        out: The file, which must not exist.
        kind: Type of its weights.
        name: What the file calls the model.

    Raises:
        MissingExtraError: If gguf-py is not installed.
        UnsupportedError: If llama.cpp's models or tokenizers have no place for it.
        ConfigError: If ``out`` exists.
        CapacityError: If the disk has no room for it.
        CheckpointError: If a tensor cannot be read, or a number is beyond the type's range.
        OSError: If it cannot be written; nothing is left behind.
    """
    gguf, config = gguf_py(), checkpoint.config
    architecture = architecture_of(config)
    entries = [
        Entry(one.name, one.shape, one.kind, functools.partial(one.made_of, read))
        for one in plan_tensors(tensors.items(), config, architecture, kind)
    ]
    if (factors := frequency_factors(config)) is not None:
        entries.insert(0, Entry("rope_freqs.weight", tuple(factors.shape), "F32", lambda: factors))
    num_bytes = sum(entry.num_bytes for entry in entries) + _HEADER_BYTES
    with new_place(out, num_bytes) as path, open_writer(path, architecture.name) as writer:
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(name)
        values = hyperparameters(config, architecture)
        add_fields(writer, {f"{architecture.name}.{key}": value for key, value in values.items()})
        writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_tokenizer(writer, checkpoint, config.vocab_size)
        write_entries(writer, entries)
