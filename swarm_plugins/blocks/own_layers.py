"""What a family's own class of cache layers keeps besides keys and values, such as compressed tokens.

Attention reads it from ``past_key_values.layers[index]``. Keys and values stay in the session's cache, as for any other
family. Such layers never change a tensor in place, so copying their attributes copies their state.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

OWN = "own"
"""Kind of such states."""


class OwnState:
    """The state of one cache layer, with what a session's cache asks of any state."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in _tensors(vars(self.layer)))

    def clone(self) -> OwnState:
        """Returns one that changes apart from this one."""
        layer = copy.copy(self.layer)
        vars(layer).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
        return OwnState(layer)

    def compact(self) -> None:
        """Lets go of what its tensors are only views of, such as the tokens of a whole prompt."""
        _compact(vars(self.layer))

    def index_select(self, dim: int, index: Tensor) -> OwnState:
        """Returns the state of other rows."""
        twin = self.clone()
        with torch.inference_mode():
            twin.layer.reorder_cache(index)
        return twin


def _compact(attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if isinstance(value, dict):
            _compact(value)
        elif isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            attributes[name] = value.clone()


def _tensors(attributes: dict[str, Any]) -> Iterator[Tensor]:
    for value in attributes.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value)


class OwnLayers:
    """Makes the empty cache layers of a model."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config

    def empty(self, block: int) -> OwnState:
        """Returns the state of a layer before the first token."""
        return OwnState(self._layers[block]).clone()

    def window(self, block: int) -> int:
        """Returns how many tokens each token sees, if transformers' cache keeps no more of a layer; else 0."""
        layer = self._layers[block] if block < len(self._layers) else None
        return int(layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else 0

    @property
    def are_of_the_family(self) -> bool:
        """Whether the model's family has made the class of some layer itself."""
        return any(type(layer).__module__ != DynamicCache.__module__ for layer in self._layers)

    @functools.cached_property
    def _layers(self) -> Sequence[Any]:
        return DynamicCache(config=self._config).layers


class LayersView:
    """The ``layers`` of a past: finds each by its index, and shows none to whoever counts them."""

    def __init__(self, state_of: Callable[[int], OwnState]) -> None:
        self._state_of = state_of

    def __getitem__(self, index: int) -> Any:
        return self._state_of(index).layer

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())
