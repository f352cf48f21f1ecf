"""Coroutines that test what the client does when servers fail run in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import virtual_time


@pytest.fixture
def anyio_backend() -> Iterator[tuple[str, dict[str, Any]]]:
    with virtual_time.loops() as factory:
        yield "asyncio", {"loop_factory": factory}
