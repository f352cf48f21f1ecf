"""Which ranks hold which experts: sizes of expert-parallel groups, one per layer (DeepSpeed-MoE, section 4.1.3).

Pure arithmetic: nothing here talks to another rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from swarm_plugins.errors import ConfigError

EpSize = int | str | Sequence[int] | Mapping[int, int]
"""Ranks that hold distinct experts: one number, one per decoder layer, by layer index, or "auto"."""


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one decoder layer."""

    name: str
    """Dotted name of the experts module."""
    index: int
    """Index of the decoder layer."""
    num_experts: int
    """Experts of the whole layer."""


@dataclass(frozen=True)
class LayerLayout:
    """How one layer's experts lie on the ranks.

    The world is divided into ``num_replicas`` groups, each of which holds all experts of the layer.
    """

    layer: ExpertLayer
    ep_size: int
    """Ranks of a group that hold distinct experts."""
    expert_slices: int
    """Ranks that an expert's intermediate dimension is divided over."""
    world_size: int

    @property
    def num_replicas(self) -> int:
        """Number of copies of each expert."""
        return self.world_size // (self.ep_size * self.expert_slices)

    @property
    def is_distributed(self) -> bool:
        """Whether any rank holds less than the whole layer."""
        return self.ep_size * self.expert_slices > 1


@dataclass(frozen=True)
class Placement:
    """What :func:`plan_layers` decides with."""

    world_size: int
    tp_size: int = 1
    """Ranks that share one batch and divide the dense layers."""
    expert_slices: int = 1

    def valid_sizes(self, num_experts: int) -> list[int]:
        """Returns the sizes of expert-parallel groups that a layer can have, smallest first."""
        if self.world_size % self.expert_slices:
            return []
        ranks = self.world_size // self.expert_slices
        # Whole experts on ranks that share a batch: the groups are unions of tensor-parallel groups.
        step = self.tp_size if self.expert_slices == 1 else 1
        sizes = [size for size in range(step, ranks + 1, step) if ranks % size == 0 and num_experts % size == 0]
        return sizes if 1 in sizes else [1, *sizes]


def plan_layers(
    layers: Sequence[ExpertLayer], num_layers: int, ep_size: EpSize, placement: Placement
) -> list[LayerLayout]:
    """Returns the layout of each layer that has experts.

    Args:
        layers: The layers with experts.
        num_layers: Decoder layers of the model, with or without experts.
        ep_size: An int for all layers; a sequence with one entry per decoder layer (0, 1 or None where a layer is
            dense); a mapping from the index of each layer with experts; or "auto", the largest valid size per layer.
        placement: World size, tensor-parallel size, slices.

    Raises:
        ConfigError: If a size does not divide the layer's experts or the ranks, or if entries are missing or left over.
    """
    _check_slices(placement)
    sizes = _sizes_by_layer(layers, num_layers, ep_size, placement)
    wrong = []
    for layer in layers:
        valid = placement.valid_sizes(layer.num_experts)
        if sizes[layer.index] not in valid:
            wrong.append(
                f"layer {layer.index} has {layer.num_experts} experts, ep_size {sizes[layer.index]}, valid are {valid}"
            )
    if wrong:
        slices = f" in slices of {placement.expert_slices}" if placement.expert_slices > 1 else ""
        tp = f", {placement.tp_size} to a batch" if placement.tp_size > 1 else ""
        raise ConfigError(
            f"ep_size does not divide the experts of a layer or the {placement.world_size} ranks{slices}{tp}: "
            f"{'; '.join(wrong)}. Choose a valid size for each layer, or ep_size='auto'"
        )
    return [LayerLayout(layer, sizes[layer.index], placement.expert_slices, placement.world_size) for layer in layers]


def undivided_text(layouts: Sequence[LayerLayout]) -> str:
    """Returns a sentence about the layers that every rank holds whole; empty if there are none, or no other rank."""
    whole = [layout for layout in layouts if not layout.is_distributed and layout.layer.num_experts > 1]
    if not whole or whole[0].world_size == 1:
        return ""
    found = ", ".join(f"{one.layer.index} ({one.layer.num_experts} experts)" for one in whole)
    return (
        f"each of {whole[0].world_size} ranks holds all experts of the layers {found}: to divide them, choose a number "
        "of ranks that has a common divisor with the number of experts, and that ranks which share a batch divide"
    )


def describe(layouts: Sequence[LayerLayout], **more: object) -> str:
    """Returns a text that is the same on two ranks if and only if they mean the same layout."""
    return json.dumps([[asdict(layout) for layout in layouts], more], sort_keys=True, default=str)


def layer_index(name: str) -> int:
    """Returns the index of the decoder layer that a module's dotted name belongs to."""
    found = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.", name)
    if found is None:
        raise ConfigError(f"experts at {name!r} belong to no numbered decoder layer: expected ...layers.N....experts")
    return int(found.group(1))


def _check_slices(placement: Placement) -> None:
    slices, tp_size, world_size = placement.expert_slices, placement.tp_size, placement.world_size
    if slices < 1 or world_size % slices:
        valid = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ConfigError(f"expert_slices {slices} does not divide {world_size} ranks: valid are {valid}")
    if tp_size > 1 and slices not in (1, tp_size):
        raise ConfigError(
            f"expert_slices {slices} with {tp_size} tensor-parallel ranks: "
            f"an expert is sliced over the ranks that share a batch, valid are 1 and {tp_size}"
        )


def _sizes_by_layer(
    layers: Sequence[ExpertLayer], num_layers: int, ep_size: EpSize, placement: Placement
) -> dict[int, int]:
    indices = [layer.index for layer in layers]
    if isinstance(ep_size, str):
        if ep_size != "auto":
            raise ConfigError(f"invalid ep_size {ep_size!r}: expected an int, one per layer, or 'auto'")
        return {layer.index: placement.valid_sizes(layer.num_experts)[-1] for layer in layers}
    if isinstance(ep_size, int):
        return dict.fromkeys(indices, ep_size)
    if isinstance(ep_size, Mapping):
        if set(ep_size) != set(indices):
            raise ConfigError(
                f"ep_size names layers {sorted(ep_size)}, but the layers with experts are {sorted(indices)}: "
                "give each of them a size"
            )
        return dict(ep_size)
    if len(ep_size) != num_layers:
        raise ConfigError(f"ep_size has {len(ep_size)} entries for {num_layers} decoder layers: give one per layer")
    dense = [index for index in range(num_layers) if index not in indices and ep_size[index] not in (0, 1, None)]
    if dense:
        raise ConfigError(f"ep_size is above 1 for layers {dense}, which have no experts: use 1 there")
    return {index: ep_size[index] for index in indices}
