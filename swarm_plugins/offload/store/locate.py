"""Locates each expert in a checkpoint by transformers' own rules for renaming and converting tensors.

Checkpoints have one tensor per expert and matrix, or one tensor for all experts of a layer, under names that differ
from family to family. transformers knows how they become the fused parameters of its modules; here its rules are
applied to names only, so that an expert is found as byte ranges of the original files.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    dot_natural_key,
)

from swarm_plugins.checkpoint import TensorInfo, find_layers, layer_list_name
from swarm_plugins.checkpoint.conversions import Conversions
from swarm_plugins.errors import CheckpointError, UnsupportedError
from swarm_plugins.offload.interfaces import FLOATS


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One fused parameter, as a checkpoint has it."""

    name: str
    """Name of the parameter, such as ``gate_up_proj``."""
    num_experts: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of one expert, as stored."""
    is_transposed: bool
    """Whether it is stored the other way round than in the module."""
    groups: tuple[tuple[TensorInfo, ...], ...]
    """Stacked one above the other; each is one tensor per expert, or a single one that holds all experts."""

    def pieces(self, expert: int) -> Iterator[tuple[TensorInfo, int, int]]:
        """Yields tensor, first byte in its file and number of bytes of an expert's pieces, in their order."""
        for group in self.groups:
            if len(group) == self.num_experts and self.num_experts != 1:
                info = group[expert]
                yield info, info.start, info.num_bytes
            else:
                size = group[0].num_bytes // self.num_experts
                yield group[0], group[0].start + expert * size, size


class Located(NamedTuple):
    """The tensors of a checkpoint, sorted by where they go in a model."""

    experts: dict[int, tuple[ExpertTensor, ...]]
    """By index of the layer."""
    others: list[str]
    """Names in the checkpoint of the tensors of all other modules."""


def locate_experts(
    model: PreTrainedModel,
    experts: Mapping[int, str],
    tensors: Mapping[str, TensorInfo],
    elsewhere: Collection[str] = (),
) -> Located:
    """Finds the experts of a model, given by the path of each layer's, among all tensors of a checkpoint.

    ``elsewhere`` are paths of parameters that other tensors make.

    Raises:
        CheckpointError: If a tensor of an expert is missing or has a wrong shape, or belongs to a layer beyond the
            model's own; names it.
        UnsupportedError: If experts are stored as codes, or otherwise than as byte ranges.
    """
    rules = Conversions(model)
    layers = {
        f"{path}.{name}": layer
        for layer, path in experts.items()
        for name, _ in model.get_submodule(path).named_parameters(recurse=False)
        if f"{path}.{name}" not in elsewhere
    }
    parts: dict[str, defaultdict[str, list[TensorInfo]]] = {target: defaultdict(list) for target in layers}
    others, unused = [], []
    renamed: dict[str, str] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rules.target(name)
        renamed[name] = target
        if target in parts:
            parts[target][pattern or ""].append(tensors[name])
        elif rules.is_known(target):
            others.append(name)
        else:
            unused.append(name)
    _check_further_layers(model, renamed)
    _check_unused(unused, [info for groups in parts.values() for group in groups.values() for info in group])
    found: defaultdict[int, list[ExpertTensor]] = defaultdict(list)
    for target, layer in layers.items():
        found[layer].append(_expert_tensor(model, target, parts[target], rules))
    return Located({layer: tuple(tensors) for layer, tensors in found.items()}, others)


def _check_unused(names: Sequence[str], used: Sequence[TensorInfo]) -> None:
    """Refuses scales next to weights of experts: without them the weights are not the model's numbers."""
    modules = {info.name.rpartition(".")[0] for info in used}
    for name in names:
        module, _, attribute = name.rpartition(".")
        if module in modules and "scale" in attribute:
            raise UnsupportedError(
                f"the checkpoint has {name!r} next to the weights of experts, so they are stored as codes: give the "
                "unquantized checkpoint"
            )


def _expert_tensor(
    model: PreTrainedModel, target: str, parts: Mapping[str, list[TensorInfo]], rules: Conversions
) -> ExpertTensor:
    expected = tuple(model.get_parameter(target).shape)
    if 0 in expected:
        raise CheckpointError(f"by its config {target} has the shape {list(expected)}, which holds nothing: correct it")
    if not parts:
        raise CheckpointError(f"the checkpoint has no tensor for the experts {target}: fetch it again")
    converter = rules.converter(list(parts))
    if converter is None:
        patterns, operations = list(parts), []
    else:
        patterns, operations = list(converter.source_patterns), list(converter.operations)
    for pattern in patterns:
        if pattern not in parts:
            raise CheckpointError(f"the checkpoint lacks the tensors {pattern!r} of {target}: fetch it again")
    groups = tuple(tuple(parts[pattern]) for pattern in patterns)
    _check_dtypes(target, groups)
    is_merged, is_transposed = _conversion(target, operations, groups, expected)
    for group in groups:
        _check_group(target, group, expected[0], is_merged)
    first = groups[0][0]
    shapes = [group[0].shape if is_merged else group[0].shape[1:] for group in groups]
    wanted = expected[1:][::-1] if is_transposed else expected[1:]
    for group, one in zip(groups, shapes, strict=True):
        if not one or one[1:] != wanted[1:]:
            raise _misfit(group[0], one, wanted)
    shape = (sum(one[0] for one in shapes), *wanted[1:])
    if shape != wanted or any(info.dtype != first.dtype for group in groups for info in group):
        raise _misfit(first, shape, wanted)
    return ExpertTensor(target.rpartition(".")[2], expected[0], first.dtype, shape, is_transposed, groups)


def _misfit(info: TensorInfo, shape: tuple[int, ...], wanted: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(
        f"{info.name} in {info.file} makes experts of shape {list(shape)} of {info.dtype}, its config asks for "
        f"{list(wanted)} of one type: config and weights do not belong together"
    )


def _conversion(
    target: str, operations: Sequence[Any], groups: tuple[tuple[TensorInfo, ...], ...], expected: tuple[int, ...]
) -> tuple[bool, bool]:
    """Returns whether each expert has tensors of its own, and whether these lie the other way round."""
    is_merged = is_transposed = False
    for operation in operations:
        if isinstance(operation, MergeModulelist) and operation.dim == 0:
            is_merged = True
        elif isinstance(operation, Concatenate) and operation.dim == 1 and not is_transposed:
            continue
        elif isinstance(operation, Transpose) and {operation.dim0 % 3, operation.dim1 % 3} == {1, 2}:
            is_transposed = not (operation.check_dims and groups[0][0].shape == expected)
        else:
            raise UnsupportedError(
                f"{target} is made of {groups[0][0].name} by {type(operation).__name__}, which keeps no byte ranges: "
                "load the model with transformers once and save_pretrained(..., save_original_format=False)"
            )
    return is_merged, is_transposed


def _check_dtypes(target: str, groups: tuple[tuple[TensorInfo, ...], ...]) -> None:
    for info in (info for group in groups for info in group):
        if info.dtype not in FLOATS.values():
            raise UnsupportedError(
                f"{info.name} of {target} is stored as {info.dtype}; expected one of "
                f"{', '.join(FLOATS)}: give a checkpoint whose experts are not quantized"
            )


def _check_group(target: str, group: tuple[TensorInfo, ...], num_experts: int, is_merged: bool) -> None:
    if not is_merged:
        if len(group) != 1 or not group[0].shape or group[0].shape[0] != num_experts:
            raise CheckpointError(
                f"{group[0].name} in {group[0].file} has shape {list(group[0].shape)}; {target} needs one tensor with "
                f"{num_experts} experts: config and weights do not belong together"
            )
        return
    if len(group) != num_experts:
        found = (re.search(r"\.([0-9]{1,9})\.[^.]+\.?[^.]*$", info.name) for info in group)
        indices = {int(match[1]) for match in found if match}
        # One by one: the config may name any number.
        lacking = next((expert for expert in range(num_experts) if expert not in indices), len(group))
        raise CheckpointError(
            f"the checkpoint has {len(group)} of {num_experts} tensors like {group[0].name} for {target}; the first "
            f"that is missing is expert {lacking}'s: fetch it again"
        )
    for info in group:
        if info.shape != group[0].shape or math.prod(info.shape) == 0:
            raise CheckpointError(
                f"{info.name} in {info.file} has shape {list(info.shape)}, {group[0].name} has "
                f"{list(group[0].shape)}: all experts of a layer have the same shape, fetch the checkpoint again"
            )


def _check_further_layers(model: PreTrainedModel, names: Mapping[str, str]) -> None:
    """Refuses weights of more layers than the model has: without them it would answer, but nonsense.

    Layers for predicting further tokens, which DeepSeek-V3, GLM-4.5 and others append (multi-token prediction,
    DeepSeek-V3 report, section 2.2) and transformers leaves out, may be there.
    """
    num_layers = len(find_layers(model))
    layers = _by_layer(names, layer_list_name(model))
    own = {suffix for index in range(num_layers) for suffix in layers.get(index, {})}
    predicting = range(num_layers, num_layers + _num_predicting(model))
    further = {}
    for index in sorted(index for index in layers if index >= num_layers):
        # Decoder layers lack what joins the hidden state with the next token's embedding.
        if index in predicting and not layers[index].keys() <= own:
            continue
        found = [name for name in layers[index].values() if not _is_left_out(model, name, names[name])]
        if found:
            further[index] = found[0]
    if further:
        raise CheckpointError(
            f"config.json says num_hidden_layers {num_layers}, but the checkpoint has weights of "
            f"{num_layers + len(further)} layers, such as {next(iter(further.values()))}: correct config.json, or "
            "fetch the checkpoint again"
        )


def _by_layer(names: Mapping[str, str], path: str) -> dict[int, dict[str, str]]:
    """Returns the tensors of all layers, by index of the layer and the rest of the name."""
    *_, last = path.rpartition(".")
    # Saved from a base model, names lack the beginning of the path.
    pattern = re.compile(rf"(?:{re.escape(path)}|{re.escape(last)})\.([0-9]{{1,6}})\.(.+)")
    layers: defaultdict[int, dict[str, str]] = defaultdict(dict)
    for name, renamed in names.items():
        match = pattern.fullmatch(renamed)
        if match:
            layers[int(match[1])][match[2]] = name
    return layers


def _num_predicting(model: PreTrainedModel) -> int:
    config = model.config.get_text_config(decoder=True)
    found = getattr(config, "num_mtp_layers", None) or getattr(config, "num_nextn_predict_layers", None)
    return found if isinstance(found, int) else 0


def _is_left_out(model: PreTrainedModel, *names: str) -> bool:
    """Returns whether transformers silently leaves a tensor of this family out."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, name) for pattern in patterns for name in names)
