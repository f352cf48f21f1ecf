"""Tool calls and reasoning: what a model is told of tools, and how its text is read back.

The reading is transformers' `ResponseParser`. It needs a description of the model's format: the tokenizer's own
``response_template``, or that of a format recognized in the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser

_VALUES = ("const", "default", "enum", "examples")
"""Keywords of a schema whose values are data."""
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose values map names to schemas."""
_THINKING = {"open": "<think>", "close": "</think>", "content": "text"}
_SPACE = r"\s{0,32}"
"""White space before a call, which belongs to it. Bounded, so that searching a long run of it takes linear time."""
_REASONING = ("reasoning_content", "thinking")
"""Names of the field that response templates use."""


class ToolFormat(NamedTuple):
    """How a model writes tool calls."""

    template: dict[str, Any]
    """A response template of transformers."""
    opening: str
    """Text before a call's JSON."""
    closing: str
    """Text after it."""
    is_list: bool
    """Whether one JSON array holds all calls."""


_FORMATS = {
    # Hermes, Qwen and their descendants.
    "<tool_call>": ToolFormat(
        {
            "defaults": {"role": "assistant"},
            "start_anchor": "\0",
            "fields": {
                "reasoning_content": _THINKING,
                "tool_calls": {
                    "open_pattern": _SPACE + "<tool_call>",
                    "close": "</tool_call>",
                    "repeats": True,
                    "content": "json",
                },
                "content": {"content": "text"},
            },
        },
        opening="<tool_call>\n",
        closing="</tool_call>",
        is_list=False,
    ),
    # Mistral and Mixtral.
    "[TOOL_CALLS]": ToolFormat(
        {
            "defaults": {"role": "assistant"},
            "start_anchor": "\0",
            "fields": {
                "tool_calls": {"open_pattern": _SPACE + r"\[TOOL_CALLS\]", "content": "json"},
                "content": {"content": "text"},
            },
        },
        opening="[TOOL_CALLS] ",
        closing="",
        is_list=True,
    ),
}


def tool_format(tokenizer: PreTrainedTokenizerBase) -> ToolFormat | None:
    """Returns the format whose mark is in the chat template, if any."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return next((known for mark, known in _FORMATS.items() if mark in template), None)


def call_schema(tools: Sequence[Mapping[str, Any]], found: ToolFormat, *, is_single: bool) -> dict[str, Any]:
    """Returns the JSON schema of a call of one of some tools, as the model writes it."""
    schemas: dict[str, Any] = {}
    calls = []
    for number, tool in enumerate(tools):
        place = f"#/$defs/tool_{number}"
        schemas[f"tool_{number}"] = _moved(tool["function"].get("parameters") or {"type": "object"}, place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    one: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if found.is_list:
        one = {"type": "array", "items": one, "minItems": 1, **({"maxItems": 1} if is_single else {})}
    return {**one, "$defs": schemas}


def _moved(schema: Any, place: str) -> Any:
    """Returns a schema that has been moved to ``place``, with its references to its own parts."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, dict):
            moved[name] = {key: _moved(one, place) for key, one in value.items()}
        elif name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[name] = place + value[1:]
        else:
            moved[name] = value if name in _VALUES else _moved(value, place)
    return moved


class ToolCall(NamedTuple):
    """A call that the model has written."""

    name: str
    arguments: str
    """JSON."""


class Part(NamedTuple):
    """A part of a message that has been read: text of a field, or a call."""

    field: str
    """``content``, ``reasoning_content`` or ``tool_calls``."""
    text: str = ""
    call: ToolCall | None = None


class MessageReader:
    """Reads one answer as it comes.

    Args:
        template: The model's response template. None: all text is content.
        begun: Text before the answer that may belong to it.
        tools: What the model was told of.
    """

    def __init__(
        self, template: dict[str, Any] | None, begun: str = "", tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._parser = (
            None if template is None else ResponseParser(template, prefix=begun, tools=[dict(tool) for tool in tools])
        )

        self._held = ""
        """Text that has not been read yet: the beginning of a call."""

    def add(self, text: str) -> list[Part]:
        """Returns what became known with some more text."""
        self._held += text
        if self._parser is None:
            return self._as_text()
        try:
            found = _parts(self._parser.feed(text))
        except ValueError:
            # Not what the format promises, such as a call whose JSON is broken: shown as it is.
            self._parser = None
            return self._as_text()
        for part in found:
            at = self._held.find(part.text)
            self._held = self._held[at + len(part.text) :] if part.call is None and at >= 0 else ""
        return found

    def end(self) -> list[Part]:
        if self._parser is None:
            return []
        try:
            return _parts(self._parser.finalize()[1])
        except ValueError:
            return self._as_text()

    def _as_text(self) -> list[Part]:
        text, self._held = self._held, ""
        return [Part("content", text)] if text else []


def _parts(events: Sequence[Mapping[str, Any]]) -> list[Part]:
    found = []
    for event in events:
        field = str(event.get("field"))
        if event["type"] == "region_close" and field == "tool_calls":
            found += [Part("tool_calls", call=call) for call in calls_of(event.get("value"))]
        elif event["type"] == "region_chunk" and not event.get("dirty") and event.get("text"):
            if field in _REASONING:
                found.append(Part("reasoning_content", event["text"]))
            elif field == "content":
                found.append(Part("content", event["text"]))
    return found


def calls_of(value: Any) -> list[ToolCall]:
    """Returns the calls in a parsed value: one, or a list, in either of the shapes that models write.

    Raises:
        ValueError: If it is not a call.
    """
    found = []
    for one in value if isinstance(value, list) else [value]:
        call = one.get("function", one) if isinstance(one, dict) else None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("not a tool call")
        arguments = call.get("arguments", call.get("parameters", {}))
        found.append(ToolCall(call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)))
    return found


class DemandedReader:
    """Reads an answer whose prompt has begun a call: all of it is the call's JSON."""

    def __init__(self) -> None:
        self._text = ""

    def add(self, text: str) -> list[Part]:
        """Returns nothing: a call is known when it is complete."""
        self._text += text
        return []

    def end(self) -> list[Part]:
        """Returns the calls; none if the answer was too short for one."""
        try:
            return [Part("tool_calls", call=call) for call in calls_of(json.loads(self._text))]
        except ValueError:
            return []
