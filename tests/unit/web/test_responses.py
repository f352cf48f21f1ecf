"""OpenAI's own client against responses."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from swarm_plugins.web.engine.engine import Engine, QueueFullError
from swarm_plugins.web.protocol.response_items import chat_messages

SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}},
    "required": ["sky"],
    "additionalProperties": False,
}


def test_a_response_is_the_chat_completion_of_the_same_messages(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="Hello", instructions="Be brief.", max_output_tokens=12)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12)
    assert response.output_text == chat.choices[0].message.content
    assert response.status in ("completed", "incomplete")
    assert response.usage is not None
    assert response.usage.output_tokens <= 12
    Response.model_validate(response.model_dump())


def test_streamed_events_are_openais_and_add_up(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="tiny", input="Hello", max_output_tokens=12, stream=True))
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in events:
        adapter.validate_python(event.model_dump())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.response.output_text
    whole = client.responses.create(model="tiny", input="Hello", max_output_tokens=12)
    assert text == whole.output_text


def test_a_response_fits_its_schema(client: openai.OpenAI) -> None:
    wanted: Any = {"format": {"type": "json_schema", "name": "sky", "schema": SCHEMA}}
    response = client.responses.create(model="tiny", input="Hello", text=wanted, max_output_tokens=40)
    assert json.loads(response.output_text)["sky"] in ("blue", "grey")


def test_a_demanded_call_and_its_output(tool_client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}]
    first = tool_client.responses.create(
        model="tiny", input="Sky?", tools=tools, tool_choice={"type": "function", "name": "look"}, max_output_tokens=60
    )
    (call,) = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["sky"] in ("blue", "grey")
    given: Any = [
        {"role": "user", "content": "Sky?"},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "it is"},
    ]
    second = tool_client.responses.create(model="tiny", input=given, tools=tools, max_output_tokens=4)
    assert second.status in ("completed", "incomplete")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("reasoning", {"effort": "high"}),
        ("truncation", "auto"),
        ("tools", [{"type": "web_search"}]),
        ("input", [{"type": "image", "url": "x"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("include", ["message.output_text.logprobs"]),
        ("temperature", 9),
        ("background", True),
    ],
)
def test_what_cannot_be_honoured_is_refused(client: openai.OpenAI, field: str, value: Any) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "input": "Hello", "max_output_tokens": 2} | {field: value}
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**arguments)


def test_text_and_calls_of_one_turn_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    given = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "I look."},
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "here"},
    ]
    user, assistant, tool = chat_messages(given, None)
    assert (user["role"], tool["role"]) == ("user", "tool")
    assert assistant["content"] == "I look."
    assert [one["id"] for one in assistant["tool_calls"]] == ["1", "2"]


def test_a_stream_that_cannot_begin_has_its_own_status(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Engine, request: Any) -> Any:
        raise QueueFullError("the queue is full")

    monkeypatch.setattr(Engine, "generate", full)
    with pytest.raises(openai.InternalServerError) as refused:
        client.with_options(max_retries=0).responses.create(model="tiny", input="Hello", stream=True)
    assert refused.value.status_code == 503
