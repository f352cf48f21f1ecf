"""Where the packed weights of a checkpoint belong in a model, and how they get there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, dot_natural_key

from swarm_plugins.checkpoint.conversions import Conversions
from swarm_plugins.checkpoint.loading import leave_out
from swarm_plugins.errors import CheckpointError, UnsupportedError
from swarm_plugins.moe import is_fused_experts
from swarm_plugins.weights.choice import kernel_for
from swarm_plugins.weights.experts import PackedExperts, run_packed
from swarm_plugins.weights.formats.int8 import Int8Format
from swarm_plugins.weights.formats.stacked import StackedFormat
from swarm_plugins.weights.linears import PackedLinear, stays_wide
from swarm_plugins.weights.published.weights import PackedWeight, Published, codes_of
from swarm_plugins.weights.repacking import repacking_of
from swarm_plugins.weights.stored import PublishedFormat, StoredFormat

_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)

Stack = tuple[tuple[PackedWeight, ...], ...]
"""The weights of a fused parameter, from top to bottom; of each, one per expert, or a single one that has all."""


@dataclass
class Placing:
    """What a model gets from packed weights."""

    published: Published
    rules: Conversions
    taken: set[str] = field(default_factory=set)
    """Names of all their tensors."""
    linears: dict[str, PackedWeight] = field(default_factory=dict)
    """By path of the layer in the model."""
    experts: dict[str, Stack] = field(default_factory=dict)
    """By path of the parameter."""
    others: dict[str, PackedWeight] = field(default_factory=dict)
    """Weights that are needed plain, by path of the parameter."""

    def leave_out(self, model: nn.Module) -> None:
        """Takes out of a model what `install` puts there, before weights have memory."""
        leave_out(model, self.linears)
        for path in self.experts:
            owner, _, name = path.rpartition(".")
            module = model.get_submodule(owner)
            del module._parameters[name]
            # Or transformers would initialise what it thinks is missing.
            module._is_hf_initialized = True  # type: ignore[assignment]

    def install(
        self,
        model: nn.Module,
        biases: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        kernel: str | None = None,
    ) -> None:
        """Reads packed weights and puts them into a model; on a CPU in another form, if it has a product for that.

        Args:
            model: The model, after `leave_out`.
            biases: Of linear layers that have one, by path of the layer.
            dtype: Floating type to compute in.
            device: Where to compute.
            kernel: How products with weights in 8 bits with a scale per row are formed. None: the first of their
                `candidates`.

        Raises:
            CheckpointError: If scales are zero, NaN or infinite, or indices out of range.
        """
        for path, weight in self.linears.items():
            [read] = self.published.read([weight])
            form, [parts] = _repacked(weight.format, [read], dtype, device)
            bias = biases.get(path)
            own = None if bias is None else nn.Parameter(bias.to(device, dtype), requires_grad=False)
            chosen = kernel_for(form, device, kernel if isinstance(form, Int8Format) else None)
            model.set_submodule(path, PackedLinear(form, parts, own, device, chosen, dtype))
        for path, stack in self.experts.items():
            owner, _, name = path.rpartition(".")
            module = model.get_submodule(owner)
            if stack[0][0].is_vector:
                wide = self.published.widened(stack[0][0], dtype).to(device)
                module.register_parameter(name, nn.Parameter(wide, requires_grad=False))
                continue
            form, experts = _repacked(self.format(stack), self._read_experts(stack), dtype, device)
            packed = PackedExperts(form, experts, is_transposed=bool(module.is_transposed))
            setattr(module, name, packed.to(device))
            run_packed(module)

    def take_biases(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Takes the biases of packed linear layers out of plain tensors; returns them by path of the layer."""
        owners = {name: self.rules.target(name)[0].removesuffix(".bias") for name in tensors if name.endswith(".bias")}
        return {path: tensors.pop(name) for name, path in owners.items() if path in self.linears}

    def weights(self) -> list[PackedWeight]:
        """Returns all packed weights."""
        stacks = [weight for stack in self.experts.values() for group in stack for weight in group]
        return [*self.linears.values(), *stacks, *self.others.values()]

    def widened(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns all packed weights as plain tensors, by the names that they would have in the checkpoint.

        Raises:
            CheckpointError: If scales are zero, NaN or infinite, or indices out of range.
        """
        return self._widened(self.weights(), dtype)

    def widened_others(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the weights that are needed plain."""
        return self._widened(self.others.values(), dtype)

    def _widened(self, weights: Iterable[PackedWeight], dtype: torch.dtype) -> dict[str, Tensor]:
        return {weight.name: self.published.widened(weight, dtype) for weight in weights}

    def format(self, stack: Stack) -> PublishedFormat:
        """Returns the format of each expert of a fused parameter."""
        formats = tuple(group[0].format for group in stack)
        return formats[0] if len(formats) == 1 else StackedFormat(formats)

    def _read_experts(self, stack: Stack) -> list[dict[str, Tensor]]:
        columns = [self.published.read(group) for group in stack]
        if len(columns) == 1:
            return columns[0]
        form = StackedFormat(tuple(group[0].format for group in stack))
        return [form.join(list(pieces)) for pieces in zip(*columns, strict=True)]


def _repacked(
    stored: PublishedFormat, weights: list[dict[str, Tensor]], dtype: torch.dtype, device: torch.device
) -> tuple[StoredFormat, list[dict[str, Tensor]]]:
    """Returns the form in which weights of one format are multiplied with on a device, and the parts of each."""
    found = repacking_of(stored, dtype) if device.type == "cpu" else None
    if found is None:
        return stored, weights
    return found.format, [found.remake(parts) for parts in weights]


def place(published: Published, outline: PreTrainedModel, spelled: Mapping[str, str]) -> Placing:
    """Finds the packed weights among some tensors, and where transformers puts them in a model.

    Args:
        published: Of the checkpoint.
        outline: The model, without storage.
        spelled: Names as in the checkpoint of a whole causal language model, by name in this one.

    Raises:
        CheckpointError: If a tensor is missing, or of another type or shape than the config says.
        UnsupportedError: If a weight has to be rearranged in a way that packed ones cannot be.
    """
    rules = Conversions(outline)
    placing = Placing(published, rules)
    groups = published.groups(spelled)
    parts: dict[str, defaultdict[str | None, list[str]]] = {}
    for plain in sorted(groups, key=dot_natural_key):
        placing.taken.update(groups[plain].values())
        target, pattern = rules.target(_as_spelled(plain, groups[plain], spelled))
        if rules.is_known(target):
            parts.setdefault(target, defaultdict(list))[pattern].append(plain)
    _check_plain(published, [name for name in spelled if name not in placing.taken])
    for target, by_pattern in parts.items():
        _place_one(placing, outline, rules, target, by_pattern, groups)
    return placing


def _check_plain(published: Published, names: Iterable[str]) -> None:
    for name in names:
        dtype = published.checkpoint.tensors[name].dtype
        if dtype in _CODES:
            raise CheckpointError(
                f"{name} in {published.checkpoint.name} is stored as {dtype} without scales, which {published.name} "
                "needs: fetch the checkpoint again"
            )


def _as_spelled(plain: str, group: Mapping[str, str], spelled: Mapping[str, str]) -> str:
    """Returns the name of a plain weight with the prefix that one of its tensors is given."""
    name = codes_of(group) or plain
    if spelled[name] == name:
        return plain
    shared = len(_common_end(name, spelled[name]))
    return spelled[name][: len(spelled[name]) - shared] + plain[len(name) - shared :]


def _common_end(first: str, second: str) -> str:
    length = 0
    while length < min(len(first), len(second)) and first[-1 - length] == second[-1 - length]:
        length += 1
    return first[len(first) - length :]


def _place_one(
    placing: Placing,
    outline: PreTrainedModel,
    rules: Conversions,
    target: str,
    by_pattern: Mapping[str | None, list[str]],
    groups: Mapping[str, Mapping[str, str]],
) -> None:
    owner, _, _ = target.rpartition(".")
    module, shape = outline.get_submodule(owner), tuple(outline.get_parameter(target).shape)
    weight = placing.published.weight
    if is_fused_experts(module) and len(shape) in (2, 3):
        placing.experts[target] = _stack(placing.published, rules, module, target, by_pattern, groups)
        return
    plains = by_pattern.get(None, [])
    if len(shape) != 2 or len(by_pattern) != 1 or len(plains) != 1:
        raise UnsupportedError(
            f"{target} is made of {', '.join(str(names[0]) for names in by_pattern.values())}, which are packed and "
            "cannot be rearranged: give the unquantized checkpoint"
        )
    found = weight(plains[0], groups[plains[0]], (shape[0], shape[1]))
    is_packed = type(module) is nn.Linear and found.format.is_kept and not stays_wide(owner)
    kind = placing.linears if is_packed else placing.others
    kind[owner if is_packed else target] = found


def _stack(
    published: Published,
    rules: Conversions,
    module: nn.Module,
    target: str,
    by_pattern: Mapping[str | None, list[str]],
    groups: Mapping[str, Mapping[str, str]],
) -> Stack:
    num_experts, *sides = module.get_parameter(target.rpartition(".")[2]).shape
    is_vector = len(sides) == 1
    rows, columns = (sides[0], 1) if is_vector else reversed(sides) if module.is_transposed else sides
    if set(by_pattern) == {None}:
        plain, *others = by_pattern[None]
        if others:
            raise CheckpointError(
                f"{plain} and {others[0]} in {published.checkpoint.name} are both {target}: fetch it again"
            )
        if module.is_transposed and codes_of(groups[plain]) == plain:
            raise UnsupportedError(
                f"{target} lies as [in, out] and is packed as {published.name}, which is known as [out, in]: give the "
                "unquantized checkpoint"
            )
        weight = published.weight(plain, groups[plain], (rows, columns), num_experts)
        is_transposed = bool(module.is_transposed) and not is_vector
        return ((replace(weight, is_transposed=is_transposed, is_vector=is_vector),),)
    patterns = [pattern for pattern in by_pattern if pattern is not None]
    converter = rules.converter(patterns)
    operations = list(converter.operations) if converter is not None else []
    if module.is_transposed or not operations or not all(_keeps_rows(one) for one in operations):
        raise UnsupportedError(
            f"{target} is made by {', '.join(type(one).__name__ for one in operations) or 'no rule'} of packed "
            "weights, which cannot be rearranged: give the unquantized checkpoint"
        )
    wanted = list(converter.source_patterns)
    for pattern in wanted:
        count = len(by_pattern.get(pattern, []))
        if count != num_experts:
            raise CheckpointError(
                f"{published.checkpoint.name} has {count} of {num_experts} packed weights like {pattern!r} for "
                f"{target}: fetch it again"
            )
    shape = (rows // len(wanted), columns)
    stack = tuple(tuple(published.weight(plain, groups[plain], shape) for plain in by_pattern[one]) for one in wanted)
    for group in stack:
        other = next((one for one in group if one.format != group[0].format), None)
        if other is not None:
            raise UnsupportedError(
                f"{other.name} and {group[0].name} in {published.checkpoint.name} are packed in different ways, the "
                "experts of a layer have to be packed alike: give the unquantized checkpoint"
            )
    return stack


def _keeps_rows(operation: object) -> bool:
    if isinstance(operation, MergeModulelist):
        return operation.dim == 0
    return isinstance(operation, Concatenate) and operation.dim == 1


def plain_names(placing: Placing | None, names: Iterable[str]) -> list[str]:
    """Returns the names of tensors that are not of packed weights."""
    return [name for name in names if placing is None or name not in placing.taken]
