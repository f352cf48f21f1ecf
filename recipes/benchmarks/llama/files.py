"""Writes a model as llama.cpp reads it, so that both can run the same weights."""

from __future__ import annotations

from pathlib import Path

import torch

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.outline import meta_model
from swarm_plugins.merging.base import PlainBase
from swarm_plugins.merging.llama_cpp.file import GgufType, write_tensors


def write_model(directory: Path, out: Path, kind: GgufType) -> Path:
    """Writes a model as a GGUF file with weights of a type, as llama.cpp's own quantizer would; returns the file.

    Embeddings have at least 8 bits, norms and routers 32.

    Raises:
        MissingExtraError: If gguf-py is not installed.
        UnsupportedError: If llama.cpp's models or tokenizers have no place for the model.
        CapacityError: If the disk has no room for it.
    """
    checkpoint = Checkpoint.open(directory)
    base = PlainBase(checkpoint, meta_model(checkpoint.config, torch.float32), torch.float32)
    write_tensors(
        checkpoint, base.tensors, lambda name: base.read([name])[name], out, kind, name=checkpoint.version.name
    )
    return out
