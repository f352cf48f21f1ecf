"""What a request for samples may ask of the engine, and how many of a key ask it at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from swarm_plugins.errors import ConfigError
from swarm_plugins.web.engine.request import Finished, Generation
from swarm_plugins.web.tinker.bodies import Sample
from swarm_plugins.web.tinker.samples import Draws, generation_of


def generation(stop: Any) -> Generation:
    body = {"prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_params": {"stop": stop}}
    return generation_of(msgspec.convert(body, Sample), adapter=None, tenant="anna", context=64, vocabulary=128)


def test_stops_are_texts_and_tokens() -> None:
    found = generation([*(f"{number}" * 10 for number in range(16)), *range(64)])
    assert (len(found.stop), len(found.stop_tokens), found.never_ends) == (16, 64, False)
    assert generation("x" * 200).stop == ("x" * 200,)
    assert generation([]).never_ends


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (["a"] * 17, "stop has 17 texts, the longest of 1 characters: at most 16 of 1 to 200 are possible"),
        ("x" * 201, "stop has 1 texts, the longest of 201 characters"),
        (["a", ""], "stop has 2 texts, the longest of 1 characters: at most 16 of 1 to 200"),
        (list(range(65)), "stop has 65 tokens: at most 64 are possible"),
    ],
)
def test_stops_are_bounded(stop: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generation(stop)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_key_has_so_many_requests_at_the_engine_at_once() -> None:
    running, most, free = Counter[str](), Counter[str](), asyncio.Event()

    async def generate(request: Generation) -> AsyncIterator[Finished]:
        running[request.tenant] += 1
        most[request.tenant] = max(most[request.tenant], running[request.tenant])
        await free.wait()
        running[request.tenant] -= 1
        yield Finished(0, "stop", ())

    engine: Any = SimpleNamespace(generate=generate, settings=SimpleNamespace(most_of_a_key=2))
    draws = Draws(engine)
    asked = [replace(generation(None), tenant=tenant) for tenant in ("anna",) * 10 + ("ben",)]
    tasks = [asyncio.create_task(draws.draw(one)) for one in asked]
    await asyncio.sleep(0)
    assert running == {"anna": 2, "ben": 1}
    free.set()
    assert len(await asyncio.gather(*tasks)) == 11
    assert most["anna"] == 2
