"""The models of an API: copies that share the weights of one base. One has no adapter, each other one has its own.

PEFT activates an adapter in the model itself, for all threads. So each adapter gets a copy of the model's structure:
what a copy adds in memory is its adapter. All that have the base's output layer share one.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peft import PeftModel

from swarm_plugins.backbone.twin import twin
from swarm_plugins.errors import CapacityError, ConfigError
from swarm_plugins.web.engine.heads import SharedHead, share_head
from swarm_plugins.weights.plain_linears import has_plain_weight

_ON_THE_HUB = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}(@[\w.-]{1,100})?", re.ASCII)
"""What a request may name that was not given at the start: never a directory of this machine."""


class UnknownModelError(ConfigError):
    """A request names a model or an adapter that is not here."""


class Models:
    """Base model and adapters.

    Args:
        base: A causal language model; it is not changed.
        name: The base model's name in requests.
        load: Puts the adapter of a name into a copy of the base; returns the model that has it.
        load_unknown: Whether requests may name adapters that were not added.
        max_adapters: Most adapters in memory.
    """

    def __init__(
        self,
        base: Any,
        name: str,
        load: Callable[[Any, str], Any],
        *,
        load_unknown: bool = False,
        max_adapters: int = 16,
    ) -> None:
        self.base = base
        self.name = name
        self._max_adapters = max_adapters
        self._load_unknown = load_unknown
        self._load = load
        head = base.get_output_embeddings()
        self._head = SharedHead(head) if has_plain_weight(head) else None
        self._plain = share_head(twin(base), self._head)
        self._adapters: dict[str, Any] = {}
        """Those given at the start."""
        self._loaded: OrderedDict[str, Any] = OrderedDict()
        """Those that requests have named, the least recently used one first."""
        self._held: dict[str, Any] = {}
        """Those that no request may name."""
        self._lock = threading.Lock()
        """Guards ``_loaded``; held for moments only."""
        self._loading = threading.Lock()

    @property
    def vocabulary(self) -> int:
        return int(self.base.config.get_text_config(decoder=True).vocab_size)

    @property
    def adapters(self) -> list[str]:
        return [*self._adapters, *self._loaded.copy()]

    def split(self, model: str) -> str | None:
        """Returns the adapter that ``BASE`` or ``BASE:ADAPTER`` names.

        Raises:
            UnknownModelError: If it names another base, or an adapter that is neither here nor may be loaded.
        """
        if model == self.name:
            return None
        adapter = model.removeprefix(f"{self.name}:")
        if adapter == model or not adapter:
            raise UnknownModelError(
                f"the model {model[:200]!r} does not exist here; this server has {', '.join(self.names())}"
            )
        if adapter in self._adapters or adapter in self._loaded:
            return adapter
        if not self._load_unknown:
            raise UnknownModelError(
                f"the adapter {adapter[:200]!r} is not loaded, and this server loads none on request; "
                f"it has {', '.join(self.names())}"
            )
        if not _ON_THE_HUB.fullmatch(adapter) or Path(adapter.partition("@")[0]).exists():
            raise UnknownModelError(
                f"the adapter {adapter[:200]!r} does not exist: expected USER/NAME or USER/NAME@TAG"
            )
        return adapter

    def names(self) -> list[str]:
        return [self.name, *(f"{self.name}:{adapter}" for adapter in self.adapters)]

    def has(self, adapter: str | None) -> bool:
        """Returns whether a model is in memory: with this adapter, or without any."""
        return adapter is None or adapter in self._adapters or adapter in self._loaded or adapter in self._held

    def get(self, adapter: str | None) -> Any:
        """Returns the model with an adapter; loading it may evict the adapter that was used least recently.

        Raises:
            ConfigError: If the adapter was made for another version of the base.
            UnknownModelError: If it was held, and is not any more.
            CheckpointError: If it is not an adapter, does not fit the model, or would change it for others.
            HubError: If the Hub does not have it.
            CapacityError: If there are as many adapters as may be.
        """
        if adapter is None:
            return self._plain
        if adapter in self._adapters:
            return self._adapters[adapter]
        held = self._held.get(adapter)
        if held is not None:
            return held
        found = self._used(adapter)
        if found is not None:
            return found
        if not _ON_THE_HUB.fullmatch(adapter):
            raise UnknownModelError(f"{adapter} is not here any more: it made room for newer ones; create it again")
        with self._loading:
            found = self._used(adapter)  # another request may have loaded it meanwhile
            return self._new(adapter) if found is None else found

    def add(self, adapter: str) -> None:
        """Loads an adapter that stays; raises like `get`."""
        if len(self._adapters) >= self._max_adapters:
            raise CapacityError(f"more than {self._max_adapters} adapters are given, the most that this server takes")
        self._adapters[adapter] = self._with_adapter(adapter)

    def hold(self, name: str, model: Any) -> None:
        """Takes a model that has an adapter already, under a name that requests do not know; until `release`."""
        self._held[name] = _in_turn(share_head(model, self._head))

    def release(self, name: str) -> None:
        """Drops a model that was held. Idempotent."""
        self._held.pop(name, None)

    def _used(self, adapter: str) -> Any | None:
        """Returns the model with an adapter that is loaded, and marks it as the last one used; None if it is not."""
        with self._lock:
            if adapter in self._loaded:
                self._loaded.move_to_end(adapter)
            return self._loaded.get(adapter)

    def _new(self, adapter: str) -> Any:
        room = self._max_adapters - len(self._adapters)
        if room < 1:
            raise CapacityError(
                f"{len(self._adapters)} adapters are in memory, as many as this server takes: use one of them"
            )
        model = self._with_adapter(adapter)
        with self._lock:
            while len(self._loaded) >= room:
                self._loaded.popitem(last=False)
            self._loaded[adapter] = model
        return model

    def _with_adapter(self, adapter: str) -> Any:
        return _in_turn(share_head(self._load(twin(self.base), adapter).eval(), self._head))


def _in_turn(model: Any) -> Any:
    """Lets one thread at a time use an activated LoRA: PEFT sets where it begins for all threads."""
    if is_activated_late(model):
        hooked, lock = model._enable_peft_forward_hooks, threading.RLock()

        @contextlib.contextmanager
        def in_turn(*arguments: Any, **more: Any) -> Iterator[None]:
            with lock, hooked(*arguments, **more):
                yield

        model._enable_peft_forward_hooks = in_turn
    return model


def is_prompt_learning(model: Any) -> bool:
    """Returns whether an adapter puts virtual tokens before the prompt."""
    return isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning


def is_activated_late(model: Any) -> bool:
    """Returns whether an adapter begins at its invocation tokens (aLoRA), which PEFT seeks in each call anew."""
    return bool(getattr(getattr(model, "active_peft_config", None), "alora_invocation_tokens", None))


def end_tokens(model: Any) -> frozenset[int]:
    """Returns the tokens that end a text."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = model.config.get_text_config(decoder=True).eos_token_id
    return frozenset([ends] if isinstance(ends, int) else ends or ())
