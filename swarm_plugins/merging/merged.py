"""A base with an adapter merged: its tensors, by the checkpoint's names, made one group at a time as they are read.

A group is the tensors that transformers turns into parameters together, such as those of a layer's experts. It is
turned into parameters, merged, and turned back; only groups that the adapter changes are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.conversions import Conversions
from swarm_plugins.checkpoint.outline import meta_model
from swarm_plugins.errors import CheckpointError, UnsupportedError
from swarm_plugins.hub import AdapterFolder
from swarm_plugins.merging.adapter import MergingAdapter
from swarm_plugins.merging.base import PlainBase, Planned, converted


@dataclass(frozen=True)
class _Group:
    sources: tuple[str, ...]
    """Names in the checkpoint."""
    targets: tuple[str, ...]
    """Names of the parameters made of them."""
    fault: str = ""
    """Why they cannot be turned back; empty if they can."""


class MergedModel:
    """The tensors of a base with an adapter merged.

    Args:
        checkpoint: The base.
        adapter: The adapter.
        dtype: Floating type of the tensors. None: as the base has them.

    Raises:
        CheckpointError: If the adapter does not fit the base.
        UnsupportedError: If the adapter cannot be merged, or the base cannot be read in parts.
    """

    tensors: Mapping[str, Planned]
    """What can be read, in the base's order, except that the tensors of a group stand together."""
    is_untied: bool
    """Whether input and output embeddings, which the base shares, differ now."""

    def __init__(self, checkpoint: Checkpoint, adapter: AdapterFolder, dtype: torch.dtype | None = None) -> None:
        outline = meta_model(checkpoint.config, dtype or dtype_of(checkpoint))
        self.checkpoint = checkpoint
        self.adapter = adapter
        self._rules = Conversions(outline)
        self._base = PlainBase(checkpoint, outline, dtype)
        self._shapes = {name: tuple(one.shape) for name, one in outline.state_dict().items()}
        self._tied = _tied_weights(outline)
        self._embeddings = _embedding_names(outline)
        self._groups = self._find_groups()
        self._group_of_target = {target: one for one in self._groups for target in one.targets}
        self._group_of_source = {source: one for one in self._groups for source in one.sources}
        self._merging = MergingAdapter(adapter, outline)
        self._changed_by = {
            f"{path}.{name}": path for path in self._merging.modules for name in self._merging.parameters(path)
        }
        self._check_groups()
        self.is_untied, extra = self._untied()
        self.tensors = self._by_group(_with_extra(self._base.tensors, extra))
        self._read: tuple[_Group, dict[str, Tensor]] | None = None

    def read(self, name: str) -> Tensor:
        """Returns a tensor, merged; reading all tensors of a group one after the other computes it once.

        Raises:
            CheckpointError: If the base cannot be read, or the result is not finite.
            UnsupportedError: If the adapter cannot be merged into it.
        """
        planned = self.tensors[name]
        group = self._group_of_source.get(name)
        if group is None and name not in self._base.tensors:
            return converted(name, self._parameter(name, is_merged=name in self._changed_by), planned.dtype)
        if group is None or not self._changed_by.keys() & set(group.targets):
            return self._base.read([name])[name]
        if self._read is None or self._read[0] is not group:
            self._read = None  # before memory for the next one is taken
            self._read = group, self._merged(group)
        return converted(name, self._read[1][name], planned.dtype)

    def _merged(self, group: _Group) -> dict[str, Tensor]:
        parameters = self._converted(group)
        for path in sorted({self._changed_by[name] for name in group.targets if name in self._changed_by}):
            merged = self._merge(path, parameters)
            parameters.update({name: merged[name] for name in group.targets if name in merged})
        return self._rules.revert(parameters, group.sources)

    def _merge(self, path: str, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the merged parameters of a module, by their names in the model."""
        names = {name: f"{path}.{name}" for name in self._merging.parameters(path)}
        weights = {own: known[name] if name in known else self._parameter(name) for own, name in names.items()}
        return {f"{path}.{own}": one for own, one in self._merging.merge(path, weights).items()}

    def _parameter(self, name: str, *, is_merged: bool = False) -> Tensor:
        if is_merged:
            return self._merge(self._changed_by[name], {})[name]
        group = self._group_of_target.get(name) or self._group_of_target[self._tied[name]]
        return self._converted(group)[name if name in group.targets else self._tied[name]]

    def _converted(self, group: _Group) -> dict[str, Tensor]:
        return self._rules.convert(self._base.read(group.sources))

    def _find_groups(self) -> list[_Group]:
        by_target: defaultdict[str, list[str]] = defaultdict(list)
        converted = set()
        for name in self._base.tensors:
            target, pattern = self._rules.target(name)
            by_target[target].append(name)
            if pattern is not None:
                converted.add(target)
        # What transformers does not load is copied.
        known = {target: tuple(sources) for target, sources in by_target.items() if self._rules.is_known(target)}
        return [
            self._try_conversion(target, sources) if target in converted else _Group(sources, (target,))
            for target, sources in known.items()
        ]

    def _by_group(self, tensors: Mapping[str, Planned]) -> dict[str, Planned]:
        """Moves each group's tensors next to its first one: in a file, the tensors of several groups may alternate."""
        places = {name: place for place, name in enumerate(tensors)}
        firsts = {source: one.sources[0] for one in self._groups for source in one.sources}
        return dict(sorted(tensors.items(), key=lambda one: places[firsts.get(one[0], one[0])]))

    def _try_conversion(self, target: str, sources: tuple[str, ...]) -> _Group:
        """Returns a group after turning it into parameters and back, without values."""
        shapes = {name: self._base.tensors[name].shape for name in sources}
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        targets: tuple[str, ...] = (target,)
        try:
            made = self._rules.convert(tensors)
            targets = tuple(made)
            back = self._rules.revert(made, sources)
            fault = "" if {name: one.shape for name, one in back.items()} == shapes else "the shapes differ"
        except ValueError as exc:
            fault = str(exc)
        return _Group(sources, targets, fault)

    def _check_groups(self) -> None:
        for name in self._changed_by:
            group = self._group_of_target.get(name) or self._group_of_target.get(self._tied.get(name, ""))
            if group is None:
                raise CheckpointError(f"{self.checkpoint.name} has no weights for {name}: fetch it again")
            if group.fault:
                raise UnsupportedError(
                    f"{name} is made of {group.sources[0]} and others of {self.checkpoint.name}, and cannot be turned "
                    f"back ({group.fault}): the adapter cannot be merged"
                )
            found = self._base.tensors[group.sources[0]].shape
            if len(group.sources) == 1 and len(group.targets) == 1 and found != self._shapes[name]:
                raise CheckpointError(
                    f"{group.sources[0]} of {self.checkpoint.name} has the shape {list(found)}, its config asks for "
                    f"{list(self._shapes[name])}: fetch it again"
                )

    def _untied(self) -> tuple[bool, dict[str, Planned]]:
        """Returns whether tied weights differ once merged, and those to write that the base has no tensor for."""
        changed = {
            name: first for name, first in self._tied.items() if name in self._changed_by or first in self._changed_by
        }
        apart = [name for name in changed if name not in self._embeddings]
        if apart:
            raise UnsupportedError(
                f"{changed[apart[0]]} and {apart[0]} are one weight in {self.checkpoint.name}, which "
                f"{self.adapter.label} changes apart: it cannot be merged"
            )
        both = all(name in self._changed_by and first in self._changed_by for name, first in changed.items())
        if not changed or (both and getattr(self._merging.config, "ensure_weight_tying", False)):
            return False, {}
        extra = {}
        for name, first in changed.items():
            if name not in self._group_of_target:
                extra[name] = self._base.tensors[self._group_of_target[first].sources[0]]
        return True, extra


def dtype_of(checkpoint: Checkpoint) -> torch.dtype:
    """Returns the floating type that the config of a checkpoint names, or float32."""
    found = getattr(checkpoint.config.get_text_config(decoder=True), "dtype", None) or checkpoint.config.dtype
    return found if isinstance(found, torch.dtype) else torch.float32


def _tied_weights(outline: PreTrainedModel) -> dict[str, str]:
    """Returns the first of parameters of different modules that are one tensor, by the names of the others."""
    firsts: dict[int, str] = {}
    tied = {}
    for path, module in outline.named_modules():
        for own, one in module._parameters.items():
            name = f"{path}.{own}" if path else own
            if one is not None and (first := firsts.setdefault(id(one), name)) != name:
                tied[name] = first
    return tied


def _embedding_names(outline: PreTrainedModel) -> set[str]:
    """Returns the names of the parameters that ``tie_word_embeddings`` is about."""
    modules = (outline.get_input_embeddings(), outline.get_output_embeddings())
    return {
        f"{path}.{own}"
        for path, module in outline.named_modules()
        for own in module._parameters
        if any(module is one for one in modules)
    }


def _with_extra(tensors: Mapping[str, Planned], extra: Mapping[str, Planned]) -> dict[str, Planned]:
    """Adds tensors to the files that they are to be written to."""
    found = {}
    for name, one in tensors.items():
        found[name] = one
        found.update({other: planned for other, planned in extra.items() if planned is one})
    return found
