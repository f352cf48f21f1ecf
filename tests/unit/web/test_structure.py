"""JSON schemas and tool calls: forced through the grammar, and read from free text."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import openai
import pytest
import torch
from llguidance import LLMatcher
from pydantic import BaseModel

from swarm_plugins.web.engine.grammar import GrammarProcessor, _guiding, json_grammar
from swarm_plugins.web.protocol.tools import MessageReader, ToolCall, ToolFormat, call_schema, calls_of, tool_format

MESSAGES: list[Any] = [{"role": "user", "content": "Weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}, "warm": {"type": "boolean"}},
    "required": ["sky", "warm"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]


def test_an_answer_fits_its_schema(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=wanted, max_tokens=64, temperature=1.0, seed=1, n=3
    )
    for choice in answer.choices:
        found = json.loads(choice.message.content or "")
        assert set(found) == {"sky", "warm"}
        assert choice.finish_reason == "stop"


def test_an_answer_that_ended_by_a_stop_text_follows_no_grammar(tokenizer: Any) -> None:
    ended: set[int] = set()
    grammar = json_grammar({"type": "object"})
    processor = GrammarProcessor(grammar, tokenizer, prompt_tokens=1, rows=2, has_ended=ended.__contains__)
    rows, logits = torch.full((2, 1), 5), torch.zeros(2, len(tokenizer))
    for letter in '{"a':
        processor(rows, logits.clone())
        rows = torch.cat((rows, torch.full((2, 1), tokenizer.encode(letter)[0])), dim=1)
    ended.add(0)
    processor(rows, logits.clone())
    padding = torch.tensor([[tokenizer.pad_token_id], [tokenizer.encode("b")[0]]])
    allowed = processor(torch.cat((rows, padding), dim=1), logits.clone())[1]
    assert allowed[tokenizer.encode("c")[0]] == 0
    assert allowed[tokenizer.pad_token_id] == -torch.inf


@pytest.mark.parametrize(
    "schema", [{"type": "no such type"}, {"$ref": "#/nowhere"}, {"pattern": "(", "type": "string"}, {"type": 5}]
)
def test_a_schema_that_is_none_is_refused(client: openai.OpenAI, schema: dict[str, Any]) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="schema cannot be used"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=wanted, max_tokens=8)


def test_tools_of_a_model_without_them_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="this model has no tools"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, max_tokens=8)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_demanded_call_is_made(tool_client: openai.OpenAI, choice: Any) -> None:
    answer = tool_client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=80
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in ("weather", "stop")
    if choice != "required":
        assert set(json.loads(call.function.arguments)) == {"sky", "warm"}
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None


def fitting(tokenizer: Any, tools: list[Any], found: ToolFormat) -> Callable[[str, Any], bool]:
    """Returns what tells whether a call fits the tools' schemas."""
    grammar = json_grammar(call_schema(tools, found, is_single=True))

    def fits(name: str, arguments: Any) -> bool:
        call = {"name": name, "arguments": arguments}
        matcher = LLMatcher(_guiding(tokenizer), grammar)
        tokens = tokenizer(json.dumps([call] if found.is_list else call))["input_ids"]
        return bool(matcher.consume_tokens(tokens)) and matcher.is_accepting()

    return fits


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("template", ["<tool_call>", "[TOOL_CALLS]"])
def test_a_tool_may_refer_to_any_part_of_its_schema(tokenizer: Any, template: str, count: int) -> None:
    nested = {"type": "array", "items": {"$ref": "#"}}
    schema = {
        "type": "object",
        "properties": {"name": {"type": "integer"}, "default": {"$ref": "#/properties/name"}, "children": nested},
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": f"walk{one}", "parameters": schema}} for one in range(count)]
    found = tool_format(SimpleNamespace(chat_template=template))  # type: ignore[arg-type]
    assert found is not None
    fits = fitting(tokenizer, tools, found)
    for one in range(count):
        assert fits(f"walk{one}", {"name": 5, "default": 7, "children": [{"name": 6, "children": []}]})
        assert not fits(f"walk{one}", {"default": "walk"})
        assert not fits(f"walk{one}", {"children": [{"name": "walk0", "arguments": {}}]})


@pytest.mark.parametrize("template", ["<tool_call>", "[TOOL_CALLS]"])
def test_a_tool_may_define_what_it_refers_to(tokenizer: Any, template: str) -> None:
    class Inner(BaseModel):
        size: Literal["small", "large"]

    class Outer(BaseModel):
        inner: Inner
        others: list[Inner]

    other = {
        "type": "object",
        "properties": {"inner": {"$ref": "#/definitions/Inner"}},
        "definitions": {"Inner": {"enum": ["tiny"]}},
    }
    schemas = {"f": Outer.model_json_schema(), "g": other}
    tools = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in schemas.items()]
    found = tool_format(SimpleNamespace(chat_template=template))  # type: ignore[arg-type]
    assert found is not None
    fits = fitting(tokenizer, tools, found)
    assert fits("f", {"inner": {"size": "small"}, "others": [{"size": "large"}]})
    assert fits("g", {"inner": "tiny"})
    assert not fits("f", {"inner": "tiny", "others": []})
    assert not fits("g", {"inner": {"size": "small"}})


def test_a_streamed_call_is_complete(tool_client: openai.OpenAI) -> None:
    chosen: Any = {"type": "function", "function": {"name": "weather"}}
    chunks = list(
        tool_client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=chosen, max_tokens=80, stream=True
        )
    )
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert [call.function.name for call in calls if call.function] == ["weather"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_answer_of_a_tool_goes_back_into_the_conversation(tool_client: openai.OpenAI) -> None:
    call: Any = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = tool_client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=4)
    assert answer.choices[0].finish_reason in ("length", "stop")


HERMES = '<think>hm</think>Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
MISTRAL = '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]'


def read(mark: str, text: str, step: int) -> tuple[str, list[ToolCall]]:
    class Tokenizer:
        chat_template = mark

    found = tool_format(Tokenizer())  # type: ignore[arg-type]
    assert found is not None
    reader = MessageReader(found.template)
    parts = [part for at in range(0, len(text), step) for part in reader.add(text[at : at + step])] + reader.end()
    content = "".join(part.text for part in parts if part.field == "content")
    return content, [part.call for part in parts if part.call is not None]


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_calls_are_read_from_free_text(step: int) -> None:
    assert read("<tool_call>", HERMES, step) == ("Let me see.", [ToolCall("f", '{"x": 1}')])
    assert read("[TOOL_CALLS]", MISTRAL, step) == ("", [ToolCall("f", '{"x": 1}'), ToolCall("g", "{}")])
    assert read("<tool_call>", "no call", step) == ("no call", [])


@pytest.mark.parametrize("mark", ["<tool_call>", "[TOOL_CALLS]"])
def test_a_long_run_of_spaces_is_not_searched_again_from_each(mark: str) -> None:
    found = tool_format(SimpleNamespace(chat_template=mark))  # type: ignore[arg-type]
    assert found is not None
    [part] = MessageReader(found.template).add(" " * 5000)
    assert len(part.text) >= 4900


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("text", ['a<tool_call>{"nam</tool_call> b', '<tool_call>\n{"name": broken'])
def test_a_broken_call_is_shown_as_text(text: str, step: int) -> None:
    assert read("<tool_call>", text, step) == (text, [])


@pytest.mark.parametrize("value", [None, 5, "f", {"name": 5}, {"function": None}, [{}]])
def test_what_is_not_a_call_is_not_taken_for_one(value: Any) -> None:
    with pytest.raises(ValueError, match="not a tool call"):
        calls_of(value)
