"""Writes GGUF files by gguf-py, one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from swarm_plugins.errors import CheckpointError
from swarm_plugins.merging.llama_cpp.library import gguf_py

_ADD = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}


class Entry(NamedTuple):
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """Name of ggml's type."""
    make: Callable[[], Tensor]
    """Returns it in float32."""

    @property
    def num_bytes(self) -> int:
        gguf = gguf_py()
        block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.kind]]
        size: int = math.prod(self.shape) // block * num_bytes
        return size


@contextlib.contextmanager
def open_writer(path: Path, architecture: str) -> Iterator[Any]:
    """Yields gguf-py's writer of a file."""
    writer = gguf_py().GGUFWriter(path, architecture)
    try:
        yield writer
    finally:
        writer.close()


def add_fields(writer: Any, fields: Mapping[str, Any]) -> None:
    """Adds metadata: numbers of 32 bits, texts and truths."""
    for key, value in fields.items():
        getattr(writer, _ADD[type(value)])(key, value)


def write_entries(writer: Any, entries: Sequence[Entry]) -> None:
    """Writes the header, then the tensors.

    Raises:
        CheckpointError: If a number is not finite in the type of its tensor.
        OSError: If the file cannot be written.
    """
    gguf = gguf_py()
    for entry in entries:
        kind = gguf.GGMLQuantizationType[entry.kind]
        # Quantized rows are given as bytes, whose shape gguf-py turns into that of the weights.
        shape = entry.shape
        is_bytes = entry.kind not in ("F32", "F16")
        if is_bytes:
            shape = gguf.quant_shape_to_byte_shape(shape, kind)
        element = np.dtype(np.uint8 if is_bytes else {"F32": np.float32, "F16": np.float16}[entry.kind])
        writer.add_tensor_info(entry.name, shape, element, entry.num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # Not by gguf-py: numpy's way into a file does not tell why it failed.
    [file] = writer.fout
    writer.write_padding(file, file.tell())
    for entry in entries:
        data = np.ascontiguousarray(_quantized(entry))
        file.write(data.data)
        writer.write_padding(file, data.nbytes)
    file.flush()


def _quantized(entry: Entry) -> Any:
    gguf = gguf_py()
    wide = entry.make().contiguous().numpy()
    if entry.kind == "F16" and np.abs(wide).max(initial=0) > np.finfo(np.float16).max:
        raise CheckpointError(f"{entry.name} has numbers beyond the range of F16: write it as BF16")
    return gguf.quants.quantize(wide, gguf.GGMLQuantizationType[entry.kind])
