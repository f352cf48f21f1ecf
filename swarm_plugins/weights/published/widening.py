"""What packed weights take in other forms: repacked or widened once at load, or widened for the time of a product."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from swarm_plugins.sizes import format_bytes
from swarm_plugins.weights.published.placing import Placing, Stack
from swarm_plugins.weights.published.weights import PackedWeight
from swarm_plugins.weights.repacking import repacking_of
from swarm_plugins.weights.stored import PublishedFormat

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
    """About what a product with the largest packed weight takes while it is widened; 0: none is."""
    repacked: tuple[str, ...]
    """Weights that a CPU multiplies with in another form, made once at load."""
    repacked_stored_bytes: int
    """Of these, in the file."""
    repacked_bytes: int
    """Of these, in memory."""

    def __str__(self) -> str:
        told = f"packed weights stay {self.format}"
        if self.product_bytes:
            told += f"; each product widens its own, in about {format_bytes(self.product_bytes)}"
        if self.repacked:
            held, stored = format_bytes(self.repacked_bytes), format_bytes(self.repacked_stored_bytes)
            told += (
                f"; on a CPU {len(self.repacked)} of them, such as {self.repacked[0]}, are repacked once at load, so "
                f"that no product widens them: {held} instead of {stored}"
            )
        if not self.names:
            return told
        wide, stored = format_bytes(self.wide_bytes), format_bytes(self.stored_bytes)
        return (
            f"{told}; those of modules that take plain weights only ({len(self.names)}, such as {self.names[0]}) are "
            f"widened to {self.dtype} once at load: {wide} instead of {stored}"
        )


def widening_of(placing: Placing, dtype: torch.dtype, *, keeps_experts: bool = False) -> Widening:
    """Returns what the packed weights of a model take, computed in a type.

    Args:
        placing: The packed weights.
        dtype: The type that blocks compute in.
        keeps_experts: Whether experts stay as published on a CPU, too, because they are read as they are needed.
    """
    others = list(placing.others.values())
    kept: list[PublishedFormat] = []
    repacked: list[PackedWeight] = []
    repacked_bytes = 0
    linears: list[tuple[Stack, bool]] = [(((weight,),), False) for weight in placing.linears.values()]
    for stack, stays in (*linears, *((stack, keeps_experts) for stack in placing.experts.values())):
        stored = placing.format(stack)
        form = None if stays else repacking_of(stored, dtype)
        if form is None:
            kept.append(stored)
            continue
        repacked += [weight for group in stack for weight in group]
        count = stack[0][0].num_experts or len(stack[0])
        repacked_bytes += count * sum(part.num_bytes for part in form.format.parts)
    published = placing.published
    infos = published.checkpoint.tensors
    kinds = sorted({kind for name in placing.taken if (kind := infos[name].packing) is not None})
    return Widening(
        format=f"{published.name} ({', '.join(kinds)})" if kinds else published.name,
        dtype=str(dtype).removeprefix("torch."),
        names=tuple(weight.name for weight in others),
        stored_bytes=_stored_bytes(placing, others),
        wide_bytes=sum(math.prod(weight.wide_shape) for weight in others) * dtype.itemsize,
        product_bytes=max((math.prod(form.shape) for form in kept), default=0) * (_TEMPORARY_BYTES + dtype.itemsize),
        repacked=tuple(weight.name for weight in repacked),
        repacked_stored_bytes=_stored_bytes(placing, repacked),
        repacked_bytes=repacked_bytes,
    )


def _stored_bytes(placing: Placing, weights: Iterable[PackedWeight]) -> int:
    infos = placing.published.checkpoint.tensors
    return sum(infos[name].num_bytes for weight in weights for name in weight.needed.values())


def experts_only(placing: Placing) -> Placing:
    """Returns the part of experts."""
    return replace(placing, linears={}, others={})
