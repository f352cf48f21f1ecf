"""Writes experts to safetensors files, one at a time: no more than one is in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["PAGE_BYTES", "padded_bytes", "write_buffers"]

PAGE_BYTES = 4096
"""Every buffer starts at a multiple of this in its file: it can be read without the system's cache, and nothing else
with it."""


def padded_bytes(num_bytes: int) -> int:
    """Returns the size that a buffer has in a file."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def write_buffers(path: Path, num_bytes: int, buffers: Iterable[tuple[str, Tensor]], names: Iterable[str]) -> None:
    """Writes buffers of one size as tensors of bytes, and waits until they are on the disk.

    Args:
        path: File to make.
        num_bytes: Size of each.
        buffers: Name and content ``[num_bytes]`` of uint8 of each, made when it is its turn.
        names: The same names, known beforehand.

    Raises:
        OSError: If it cannot be written.
    """
    size = padded_bytes(num_bytes)
    entries = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [index * size, (index + 1) * size]}
        for index, name in enumerate(names)
    }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header = header.ljust(padded_bytes(len(header) + 8) - 8)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, buffer in buffers:
            if name not in entries or buffer.shape != (num_bytes,) or buffer.dtype != torch.uint8:
                raise ValueError(f"buffer {name!r} is not one of {num_bytes} bytes that was announced")
            file.write(buffer.numpy().data)
            file.write(bytes(size - num_bytes))
        file.flush()
        os.fsync(file.fileno())
