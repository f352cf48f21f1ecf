"""Scales that are no numbers, found as they are read: one of them makes every answer of the model worthless."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from swarm_plugins.errors import CheckpointError
from swarm_plugins.offload.interfaces import BufferLayout, ExpertKey

__all__ = ["are_finite", "check_scales"]

# Without its sign, a number is infinite or none from here on.
_LIMITS = {torch.bfloat16: (torch.int16, np.uint16, 0xFF00), torch.float32: (torch.int32, np.uint32, 0xFF000000)}


def are_finite(scales: Tensor) -> bool:
    """Says whether all numbers are finite.

    Args:
        scales: Any shape, bfloat16 or float32, on the CPU.
    """
    integers, unsigned, limit = _LIMITS[scales.dtype]
    # numpy, as torch would start threads of its own on every reader thread.
    bits = scales.view(integers).numpy().view(unsigned)
    return bits.size == 0 or int((bits << 1).max()) < limit


def check_scales(layout: BufferLayout, stored: Tensor, key: ExpertKey) -> None:
    """Checks the scales of an expert that has just been read; one that is not quantized has none.

    Args:
        layout: How it lies in its buffer.
        stored: ``[num_bytes]`` of uint8.
        key: Which expert, for the message.

    Raises:
        CheckpointError: If one is not finite.
    """
    for spec in layout.tensors:
        if spec.name.endswith(".scales"):
            scales = stored[spec.offset : spec.offset + spec.num_bytes].view(spec.dtype)
            if not are_finite(scales):
                raise CheckpointError(
                    f"{spec.name} of expert {key.expert} in layer {key.layer} holds numbers that are not finite: the "
                    "store is damaged, fetch it again or run swarm quantize again"
                )
