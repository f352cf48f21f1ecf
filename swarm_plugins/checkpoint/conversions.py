"""What transformers' loader does with the names of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


class Conversions:
    """What transformers' loader does with the names of a model's tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
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
