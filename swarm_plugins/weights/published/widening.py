"""What packed weights take when they are not packed: once at load, or for the time of a product."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from swarm_plugins.sizes import format_bytes
from swarm_plugins.weights.published.placing import Placing

# Formats widen in float32, and most need a second tensor for the scales.
_TEMPORARY_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Widening:
    """Memory in addition to the bytes of the file."""

    format: str
    """What servers announce of the packed weights; of GGUF, the types as well."""
    dtype: str
    names: tuple[str, ...]
    """Weights of modules that take plain ones only, widened once at load."""
    stored_bytes: int
    """Of these, in the file."""
    wide_bytes: int
    """Of these, in memory."""
    product_bytes: int
    """About what a product with the largest packed weight takes while it is widened."""

    def __str__(self) -> str:
        moment = format_bytes(self.product_bytes)
        told = f"packed weights stay {self.format}; each product widens its own, in about {moment}"
        if not self.names:
            return told
        wide, stored = format_bytes(self.wide_bytes), format_bytes(self.stored_bytes)
        return (
            f"{told}; those of modules that take plain weights only ({len(self.names)}, such as {self.names[0]}) are "
            f"widened to {self.dtype} once at load: {wide} instead of {stored}"
        )


def widening_of(placing: Placing, dtype: torch.dtype) -> Widening:
    """Returns what the packed weights of a model take, computed in a type, beside the bytes of the file."""
    others = list(placing.others.values())
    packed = [weight.format.shape for weight in placing.linears.values()]
    packed += [placing.format(stack).shape for stack in placing.experts.values()]
    published = placing.published
    infos = published.checkpoint.tensors
    kinds = sorted({kind for name in placing.taken if (kind := infos[name].packing) is not None})
    return Widening(
        format=f"{published.name} ({', '.join(kinds)})" if kinds else published.name,
        dtype=str(dtype).removeprefix("torch."),
        names=tuple(weight.name for weight in others),
        stored_bytes=sum(infos[name].num_bytes for weight in others for name in weight.needed.values()),
        wide_bytes=sum(math.prod(weight.wide_shape) for weight in others) * dtype.itemsize,
        product_bytes=max(map(math.prod, packed), default=0) * (_TEMPORARY_BYTES + dtype.itemsize),
    )


def experts_only(placing: Placing) -> Placing:
    """Returns the part of experts."""
    return replace(placing, linears={}, others={})
