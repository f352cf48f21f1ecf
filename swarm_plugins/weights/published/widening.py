"""What packed weights take in other forms: repacked or widened once at load, or widened for the time of a product."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from swarm_plugins.checkpoint.gguf.header import PLAIN_TYPES
from swarm_plugins.sizes import format_bytes
from swarm_plugins.weights.choice import kernel_for
from swarm_plugins.weights.kernels.widening import WideningKernel
from swarm_plugins.weights.published.placing import Placing, Stack
from swarm_plugins.weights.published.weights import PackedWeight
from swarm_plugins.weights.repacking import repacking_of
from swarm_plugins.weights.stored import StoredFormat

# Formats widen in float32, and most need a second tensor for the scales.
_TEMPORARY_BYTES = 8
_CPU = torch.device("cpu")


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
    """About what widening the largest packed weight takes, for the time of a product."""
    widens_each: bool
    """Whether each product with some weight widens it; others do for many rows, and for gradients."""
    repacked: tuple[str, ...]
    """Weights that a CPU multiplies with in another form, made once at load."""
    repacked_stored_bytes: int
    """Of these, in the file."""
    repacked_bytes: int
    """Of these, in memory."""

    def __str__(self) -> str:
        told = f"packed weights stay {self.format}"
        if self.product_bytes:
            which = "each product" if self.widens_each else "a product of many rows, or for gradients,"
            told += f"; {which} widens its own, in about {format_bytes(self.product_bytes)}"
        if self.repacked:
            held, stored = format_bytes(self.repacked_bytes), format_bytes(self.repacked_stored_bytes)
            told += (
                f"; on a CPU {len(self.repacked)} of them, such as {self.repacked[0]}, are repacked once at load, for "
                f"faster products: {held} instead of {stored}"
            )
        if not self.names:
            return told
        wide, stored = format_bytes(self.wide_bytes), format_bytes(self.stored_bytes)
        return (
            f"{told}; those of modules that take plain weights only ({len(self.names)}, such as {self.names[0]}) are "
            f"widened to {self.dtype} once at load: {wide} instead of {stored}"
        )


class Held(NamedTuple):
    """Packed weights of one form in memory: one, or one of each expert."""

    weights: tuple[PackedWeight, ...]
    """Of the file."""
    form: StoredFormat
    """What products are formed with."""
    copies: int
    """How many weights of that form: the experts', or one."""
    is_repacked: bool

    def num_bytes(self, device: torch.device) -> int:
        """Returns what they take on a device."""
        return self.copies * sum(part.num_bytes for part in kernel_for(self.form, device).computed)


def held_weights(
    placing: Placing, dtype: torch.dtype, *, keeps_experts: bool = False, device: torch.device = _CPU
) -> list[Held]:
    """Returns the packed weights of linear layers and experts as they are held in memory.

    Args:
        placing: The packed weights.
        dtype: The type that blocks compute in.
        keeps_experts: Whether experts stay as published on a CPU, too, because they are read as they are needed.
        device: Where products are formed.
    """
    found = []
    linears: list[tuple[Stack, bool]] = [(((weight,),), False) for weight in placing.linears.values()]
    for stack, stays in (*linears, *((stack, keeps_experts) for stack in placing.experts.values())):
        stored = placing.format(stack)
        other = None if stays or device.type != "cpu" else repacking_of(stored, dtype)
        weights = tuple(weight for group in stack for weight in group)
        count = stack[0][0].num_experts or len(stack[0])
        found.append(Held(weights, stored if other is None else other.format, count, other is not None))
    return found


def widening_of(
    placing: Placing, dtype: torch.dtype, *, keeps_experts: bool = False, device: torch.device = _CPU
) -> Widening:
    """Returns what the packed weights of a model take; arguments are as for `held_weights`."""
    held = held_weights(placing, dtype, keeps_experts=keeps_experts, device=device)
    others = list(placing.others.values())
    repacked = [weight for one in held if one.is_repacked for weight in one.weights]
    published = placing.published
    infos = published.checkpoint.tensors
    kinds = sorted({kind for name in placing.taken if (kind := infos[name].packing) and kind not in PLAIN_TYPES})
    return Widening(
        format=f"{published.name} ({', '.join(kinds)})" if kinds else published.name,
        dtype=str(dtype).removeprefix("torch."),
        names=tuple(weight.name for weight in others),
        stored_bytes=_stored_bytes(placing, others),
        wide_bytes=sum(math.prod(weight.wide_shape) for weight in others) * dtype.itemsize,
        product_bytes=max((math.prod(one.form.shape) for one in held), default=0) * (_TEMPORARY_BYTES + dtype.itemsize),
        widens_each=any(isinstance(kernel_for(one.form, device), WideningKernel) for one in held),
        repacked=tuple(weight.name for weight in repacked),
        repacked_stored_bytes=_stored_bytes(placing, repacked),
        repacked_bytes=sum(one.num_bytes(device) for one in held if one.is_repacked),
    )


def _stored_bytes(placing: Placing, weights: Iterable[PackedWeight]) -> int:
    infos = placing.published.checkpoint.tensors
    return sum(infos[name].num_bytes for weight in weights for name in weight.needed.values())


def experts_only(placing: Placing) -> Placing:
    """Returns the part of experts."""
    return replace(placing, linears={}, others={})
