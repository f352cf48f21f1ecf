"""Locates experts that are published in few bits: codes, scales and what else their formats have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from swarm_plugins.checkpoint import TensorInfo
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.offload.store.locate import ExpertTensor, locate_experts
from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.published.placing import Placing, Stack
from swarm_plugins.weights.published.weights import PackedWeight
from swarm_plugins.weights.stored import StoredFormat


@dataclass(frozen=True)
class LocatedPublished:
    """The tensors of a checkpoint in few bits, sorted by where they go in a model."""

    experts: Mapping[int, tuple[ExpertTensor, ...]]
    """By index of the layer; the parts of packed weights are called ``NAME.PART``."""
    formats: Mapping[int, Mapping[str, StoredFormat]]
    """Of the weights, for layers that have packed ones; by index of the layer and name of the parameter."""
    others: list[str]
    """Names in the checkpoint of the tensors of all other modules."""


def locate_published(model: PreTrainedModel, experts: Mapping[int, str], placing: Placing) -> LocatedPublished:
    """Finds the experts of a model, given by the path of each layer's, among all tensors of a checkpoint.

    Raises:
        CheckpointError: If a tensor of an expert is missing or has a wrong shape.
        UnsupportedError: If only some weights of a layer's experts are packed, and the others lie transposed.
    """
    tensors = placing.published.checkpoint.tensors
    plain = {name: info for name, info in tensors.items() if name not in placing.taken}
    located = locate_experts(model, experts, plain, elsewhere=placing.experts)
    found: defaultdict[int, list[ExpertTensor]] = defaultdict(list)
    formats: defaultdict[int, dict[str, StoredFormat]] = defaultdict(dict)
    in_experts: set[str] = set()
    for layer, path in experts.items():
        for name, _ in model.get_submodule(path).named_parameters(recurse=False):
            stack = placing.experts.get(f"{path}.{name}")
            if stack is not None:
                formats[layer][name] = placing.format(stack)
                found[layer] += _parts(name, stack, tensors)
                in_experts.update(one for group in stack for weight in group for one in weight.tensors.values())
        for tensor in located.experts.get(layer, ()):
            if layer in formats and len(tensor.shape) == 2:
                is_transposed = tensor.is_transposed != bool(model.get_submodule(path).is_transposed)
                tensor = _beside_packed(tensor, layer, is_transposed=is_transposed)
                formats[layer][tensor.name.removesuffix(".codes")] = PlainFormat(
                    (tensor.shape[0], tensor.shape[1]), tensor.dtype
                )
            found[layer].append(tensor)
    others = [*located.others, *(name for name in tensors if name in placing.taken and name not in in_experts)]
    return LocatedPublished({layer: tuple(some) for layer, some in found.items()}, dict(formats), others)


def _beside_packed(tensor: ExpertTensor, layer: int, *, is_transposed: bool) -> ExpertTensor:
    if is_transposed:
        raise UnsupportedError(
            f"of the experts of layer {layer} {tensor.name} is not packed and lies as [in, out] beside packed weights: "
            "give the unquantized checkpoint"
        )
    return replace(tensor, name=f"{tensor.name}.codes")


def _parts(name: str, stack: Stack, tensors: Mapping[str, TensorInfo]) -> Iterator[ExpertTensor]:
    """Yields the tensors of one fused parameter, each a part of its weights."""
    for index, group in enumerate(stack):
        first = group[0]
        end = f"_{index}" if len(stack) > 1 else ""
        for part in first.needed:
            infos = tuple(tensors[weight.tensors[part]] for weight in group)
            yield _tensor(f"{name}.{part}{end}", infos, first)


def _tensor(name: str, infos: Sequence[TensorInfo], weight: PackedWeight) -> ExpertTensor:
    # Texts beside codes differ in length between experts: the longest needs a place.
    largest = max(infos, key=lambda info: info.num_bytes)
    count, shape = len(infos), largest.shape
    if weight.num_experts is not None:
        count, shape = weight.num_experts, largest.shape[1:]
    return ExpertTensor(name, count, largest.dtype, shape, is_transposed=False, groups=(tuple(infos),))
