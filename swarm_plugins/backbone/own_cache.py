"""Models that take no cache of transformers, but one of their own kind, such as RWKV, xLSTM and MiniMax.

RecurrentGemma's states are on its modules, and it does not return the cache.

Over a swarm they take a `Cache` by the usual name, ``past_key_values``, like all others: servers keep the states, and
the decoder here runs without a cache. So ``generate()`` can do more with them than with the local model, whose states
can be neither reordered nor cropped.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from swarm_plugins.errors import UnsupportedError

_NAMES = ("past_key_values", "cache_params", "state")
_COMMON = _NAMES[0]


def own_cache_name(config: PreTrainedConfig, decoder: nn.Module) -> str | None:
    """Returns by which name a decoder takes a cache of its own kind. None: it takes one of transformers, or none."""
    language: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if language is None or language._supports_default_dynamic_cache():
        return None
    known = inspect.signature(type(decoder).forward).parameters
    return next((name for name in _NAMES if name in known), None)


def take_common_cache(model: PreTrainedModel, config: PreTrainedConfig, name: str | None) -> None:
    """Makes a model take and return caches of transformers as ``past_key_values``.

    Args:
        model: The whole model.
        config: Of its decoder.
        name: See `own_cache_name`.
    """
    if getattr(config, "layer_types", None) is None:
        # Caches that are made of it then know that there are states.
        config.layer_types = ["hybrid"] * int(config.num_hidden_layers)
    model.__class__ = _taking(type(model), name or _COMMON)  # type: ignore[arg-type]  # classes are hashable


class CacheSwap:
    """Lets a decoder run without the cache that it is called with.

    Args:
        name: By which it takes one.
        named: What it is called with, by name.
        decoder: The decoder.
    """

    def __init__(self, name: str, named: dict[str, Any], decoder: Any) -> None:
        self._name = name
        given = named.get(name)
        if given is None:
            given = named.get(_COMMON)
        wanted = named.get("use_cache")
        if wanted is None:
            wanted = decoder.config.use_cache and not decoder.training
        if given is None and wanted:
            given = DynamicCache(config=decoder.config)
        if given is not None and not isinstance(given, Cache):
            raise UnsupportedError(
                f"{name} is a {type(given).__name__}: servers keep the states of this model, pass a cache of "
                f"transformers, such as DynamicCache(config=model.config), as {_COMMON}"
            )
        self.cache: Cache | None = given
        """The cache."""
        self.without = {key: one for key, one in named.items() if key not in _NAMES} | {"use_cache": False}
        """What the decoder runs on."""
        self.called_with = {**self.without, _COMMON: given}
        """What it was called with."""

    def put_into(self, output: Any) -> Any:
        """Returns the decoder's output with the cache in it."""
        if self.cache is not None and hasattr(output, "keys"):
            output[self._name] = self.cache
        return output


@functools.cache
def _taking(original: type[PreTrainedModel], name: str) -> type[PreTrainedModel]:
    """Returns a subclass, of the same name, that takes and returns a cache as ``past_key_values``, too."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, past_key_values: Cache | None = None, **kwargs: Any) -> Any:
        if past_key_values is not None:
            kwargs[name] = past_key_values
        output = original.forward(self, *args, **kwargs)
        cache = output.get(name, kwargs.get(name)) if hasattr(output, "keys") else None
        if cache is not None:
            output[_COMMON] = cache
        return output

    signature = inspect.signature(original.forward)
    parameters = {**signature.parameters}
    common = inspect.Parameter(_COMMON, inspect.Parameter.KEYWORD_ONLY, default=None)
    rest = [parameters.pop(key) for key, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD]
    parameters = {key: one for key, one in parameters.items() if key != _COMMON}
    forward.__signature__ = signature.replace(parameters=[*parameters.values(), common, *rest])  # type: ignore[attr-defined]

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _rebuilt, (original, name), self.__dict__

    members = {
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__reduce_ex__": reduce,
        "_supports_default_dynamic_cache": classmethod(lambda cls: True),
        "forward": forward,
    }
    return type(original.__name__, (original,), members)


def _rebuilt(original: type[PreTrainedModel], name: str) -> PreTrainedModel:
    cls: type[PreTrainedModel] = _taking(original, name)  # type: ignore[arg-type]  # classes are hashable
    return cls.__new__(cls)
