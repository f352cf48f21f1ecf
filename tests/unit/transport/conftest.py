from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvloop


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[None]]], None]:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.SelectorEventLoop

    def run_body(body: Callable[[], Awaitable[None]]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(body(), 60))

    return run_body
