"""An event loop whose waits take no time: tests of deadlines are quick, and no busy machine disturbs them."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar
from unittest import mock

import pytest

T = TypeVar("T")


class _Clock(selectors.DefaultSelector):
    """Moves on by what the loop would have waited; computing takes almost none of its time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = time.monotonic()

    def read(self) -> float:
        # Never the same twice: what comes later is later.
        self.now += 1e-6
        return self.now

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout if timeout is None else 0)
        if not found and timeout:
            self.now += timeout
        return found


@contextlib.contextmanager
def loops() -> Iterator[Callable[[], asyncio.AbstractEventLoop]]:
    """Moves on the time of this process as its event loop, which the context makes, would wait."""
    clock = _Clock()
    with mock.patch.object(time, "monotonic", clock.read), mock.patch.object(time, "perf_counter", clock.read):
        yield lambda: asyncio.SelectorEventLoop(clock)


@pytest.fixture
def anyio_backend() -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs tests that are coroutines in virtual time; for the ``conftest.py`` of a folder."""
    with loops() as factory:
        yield "asyncio", {"loop_factory": factory}


def run(main: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
    """Runs a coroutine, without threads beside it, for so many seconds of its own time at most."""
    with loops() as factory, asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(asyncio.wait_for(main, timeout_s))
