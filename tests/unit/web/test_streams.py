"""Server-sent events: errors after the status is out, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from transformers import ByT5Tokenizer

from swarm_plugins.errors import ConfigError
from swarm_plugins.web.engine.request import Scored
from swarm_plugins.web.protocol.logprobs import chat_logprobs, text_logprobs
from swarm_plugins.web.protocol.streams import event_stream


async def failing(first: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield first
    raise ConfigError("it cannot be done")


def sent(first: dict[str, Any], *, done: bool) -> list[str]:
    async def collect() -> list[str]:
        response = await event_stream(failing(first), done=done)
        return [str(line) async for line in response.body_iterator]

    return asyncio.run(collect())


def data_of(event: str) -> Any:
    return json.loads(event.split("data: ")[1])


def test_an_error_is_the_last_part_of_a_chat() -> None:
    first, error, done = sent({"text": "a"}, done=True)
    assert data_of(first) == {"text": "a"}
    assert data_of(error)["error"]["message"] == "it cannot be done"
    assert done == "data: [DONE]\n\n"


def test_probabilities_of_a_faulty_model_are_json() -> None:
    tokenizer: Any = ByT5Tokenizer(extra_ids=0)
    scored = [Scored(100, float("nan"), ((101, float("-inf")),))]
    for found in (chat_logprobs(tokenizer, scored), text_logprobs(tokenizer, scored)):
        assert json.dumps(found, allow_nan=False).count("-9999.0") == 2


def test_an_error_is_an_event_of_a_response() -> None:
    first, error = sent({"type": "response.created"}, done=False)
    assert first.startswith("event: response.created\n")
    assert error.startswith("event: error\n")
    found = data_of(error)
    assert (found["type"], found["message"], found["sequence_number"]) == ("error", "it cannot be done", 1)


def test_an_error_before_the_first_part_has_its_own_status() -> None:
    async def parts() -> AsyncIterator[dict[str, Any]]:
        raise ConfigError("never begun")
        yield {}

    with pytest.raises(ConfigError, match="never begun"):
        asyncio.run(event_stream(parts()))
