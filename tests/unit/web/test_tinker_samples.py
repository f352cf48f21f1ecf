"""What a request for samples may ask of the engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from swarm_plugins.errors import ConfigError
from swarm_plugins.web.engine.request import Generation
from swarm_plugins.web.tinker.bodies import Sample
from swarm_plugins.web.tinker.samples import generation_of


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
