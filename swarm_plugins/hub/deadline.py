"""A bound for calls that have none: huggingface_hub waits for answers without end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from swarm_plugins.errors import HubError

__all__ = ["within"]

T = TypeVar("T")


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """Returns what ``call`` returns, or raises what it raises.

    A call that takes longer is left behind in its thread, which does not keep the process from ending.

    Args:
        seconds: Longest time.
        what: What is being done, such as ``push to me/my-adapter``.
        call: Does it.

    Raises:
        HubError: If it takes longer.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as exc:  # noqa: BLE001  # handed to the waiting thread
            errors.append(exc)

    thread = threading.Thread(target=run, name="swarm-hub-call", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise HubError(f"{what}: no answer from the Hub within {seconds:.0f} s; try again later", is_passing=True)
    return results[0]
