"""PEFT's wrapper of a parameter, in a process whose threads share a model."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from peft.tuners.lora.layer import ParamWrapper

_LOCK = threading.RLock()


@functools.cache
def one_wrapped_forward_at_a_time() -> None:
    """Makes forwards of wrapped parameters (``target_parameters``), of whatever model, wait for each other.

    PEFT hangs the product of the factors into the module for the time of a forward, and keeps it in a cache of torch
    that all threads share: of two threads, one would add it twice, or fail.
    """
    activate = ParamWrapper._activate_lora

    @contextlib.contextmanager
    def alone(self: ParamWrapper, active_adapters: list[str]) -> Iterator[Any]:
        with _LOCK, activate(self, active_adapters):
            yield

    ParamWrapper._activate_lora = alone  # type: ignore[method-assign]
