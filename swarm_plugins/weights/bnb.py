"""bitsandbytes, imported where it is first needed, and called in the order of the streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from swarm_plugins.noise import without_kernel_remark

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""The types that its kernels take."""


@lru_cache(maxsize=1)
def bitsandbytes() -> Any:
    """Returns the package."""
    # Late: the import takes seconds, and most who serve or offload never need it.
    with without_kernel_remark():
        import bitsandbytes
    return bitsandbytes


@contextlib.contextmanager
def default_stream(device: torch.device) -> Iterator[None]:
    """Orders the body between earlier and later work of the current stream.

    bitsandbytes 0.50 starts its quantizing kernels on the default stream, whichever is current.
    """
    if device.type != "cuda":
        yield
        return
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    default.wait_stream(current)
    yield
    current.wait_stream(default)
