"""What transformers' loader does with the names of a checkpoint's tensors, and with the tensors; and the way back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from swarm_plugins.errors import one_line


class Conversions:
    """What transformers' loader does with the names of a model's tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        rules: Sequence[Any] = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._state: dict[str, Any] = model.state_dict()
        self._prefix = model.base_model_prefix

    def target(self, name: str) -> tuple[str, str | None]:
        """Returns the parameter that a tensor would go to, and the pattern that converts it, or None."""
        rename: Callable[..., tuple[str, str | None]] = rename_source_key
        target, pattern = rename(name, self._renamings, self._converters, self._prefix, self._state)
        if target not in self._state and name in self._state:
            target, pattern = name, None
        return target, pattern

    def is_known(self, target: str) -> bool:
        return target in self._state

    def converter(self, patterns: Sequence[str]) -> Any:
        """Returns the rule that has these patterns, or None if nothing is converted."""
        return self._by_pattern.get(patterns[0])

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Makes parameters of the tensors of one target, all of which are given.

        Raises:
            ValueError: If transformers cannot make them.
        """
        by_pattern: dict[str | None, list[Tensor]] = {}
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = self.target(name)
            by_pattern.setdefault(pattern, []).append(tensors[name])
        if None in by_pattern:
            return {target: by_pattern[None][0]}
        return self._run(self.converter([str(pattern) for pattern in by_pattern]), target, by_pattern)

    def revert(self, parameters: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Returns the tensors of which `convert` makes parameters.

        Args:
            parameters: All that `convert` returned.
            names: What the checkpoint calls the tensors.

        Raises:
            ValueError: If transformers knows no way back.
        """
        target, pattern = self.target(names[0])
        if pattern is None:
            return {names[0]: parameters[target]}
        rule = _reverse(self.converter([pattern]))
        by_pattern: dict[str | None, list[Tensor]] = {}
        for name in sorted(parameters, key=dot_natural_key):
            renamed, found = apply_converters(name, [rule])
            by_pattern.setdefault(found, []).append(parameters[name])
        made = self._run(rule, renamed, by_pattern)
        renamings: Any = self._renamings
        # As the checkpoint may lack the prefix of the model, or have it in vain.
        wanted = {apply_renamings(name, renamings).removeprefix(f"{self._prefix}."): name for name in names}
        found_names = {wanted.get(name.removeprefix(f"{self._prefix}.")): one for name, one in made.items()}
        if set(found_names) != set(names):
            raise ValueError(f"transformers makes {', '.join(sorted(made)[:3])} of it")
        return {name: found_names[name] for name in names}

    def _run(self, rule: Any, target: str, by_pattern: Mapping[str | None, list[Tensor]]) -> dict[str, Tensor]:
        """Returns what a converter makes of tensors."""
        one = copy.deepcopy(rule)  # it keeps the tensors that it is given
        for pattern, some in by_pattern.items():
            one.collected_tensors[pattern].extend(some)
        try:
            made = one.convert(target, model=self._model, config=self._model.config)
        except Exception as exc:
            # Any kind, from operations on tensors that they do not expect.
            raise ValueError(one_line(exc)) from exc
        return {name: some[0] if isinstance(some, list) else some for name, some in made.items()}


def _reverse(rule: Any) -> Any:
    try:
        return rule.reverse_transform()
    except Exception as exc:
        # Any kind, as an operation without a way back sees fit.
        raise ValueError(one_line(exc)) from exc
