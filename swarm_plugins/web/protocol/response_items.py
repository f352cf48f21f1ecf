"""Items of responses: a request's become messages of a chat, an answer's are made as it grows."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from swarm_plugins.web.protocol.errors import ApiError
from swarm_plugins.web.protocol.tools import Part, ToolCall

_TEXTS = ("input_text", "output_text", "text")


def chat_messages(given: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Returns the messages of a chat that a response continues.

    Raises:
        ApiError: If an item has another type.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in given:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _text(item.get("content"))})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            # Text and calls of one turn come as items of their own.
            if messages and messages[-1].get("role") == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            content = _text(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind != "reasoning":
            raise ApiError(
                f"items of the type {str(kind)[:100]!r} are not supported; known: message, function_call, "
                "function_call_output, reasoning",
                param="input",
                code="unsupported_value",
            )
    return messages


def _text(content: object) -> object:
    """Returns the text of an item's content; other types are left for the check of messages."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            raise ApiError("only parts with text are supported", param="input", code="unsupported_value")
    return "".join(part["text"] for part in content)


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the tools as chats have them.

    Raises:
        ApiError: If one is not a function.
    """
    for tool in tools:
        if tool.get("type") != "function":
            raise ApiError(
                f"tools of the type {str(tool.get('type'))[:100]!r} are not supported; known: function",
                param="tools",
                code="unsupported_value",
            )
    names = ("name", "description", "parameters", "strict")
    return [
        {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}
        for tool in tools
    ]


class Items:
    """The items of an answer; each method returns the events that tell of its changes."""

    def __init__(self) -> None:
        self.whole: list[dict[str, Any]] = []
        """Items that are complete."""
        self._text = ""
        self._id: str | None = None
        """Of the message that is being written."""

    def add(self, part: Part) -> list[dict[str, Any]]:
        if part.call is not None:
            return [*self.close(), *self._call(part.call)]
        if part.field != "content" or not part.text:
            return []
        events = [] if self._id is not None else self._open()
        self._text += part.text
        delta = {"type": "response.output_text.delta", "delta": part.text, "logprobs": [], **self._place()}
        return [*events, delta]

    def close(self, *, is_complete: bool = True) -> list[dict[str, Any]]:
        """Completes the message that is being written, if there is one."""
        if self._id is None:
            return []
        status = "completed" if is_complete else "incomplete"
        content = {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}
        place, index = self._place(), len(self.whole)
        item = {**self._message(status), "content": [content]}
        events = [
            {"type": "response.output_text.done", "text": self._text, "logprobs": [], **place},
            {"type": "response.content_part.done", "part": content, **place},
            {"type": "response.output_item.done", "item": item, "output_index": index},
        ]
        self.whole.append(item)
        self._id, self._text = None, ""
        return events

    def _open(self) -> list[dict[str, Any]]:
        self._id = f"msg_{uuid.uuid4().hex}"
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = self._message("in_progress")
        return [
            {"type": "response.output_item.added", "item": item, "output_index": len(self.whole)},
            {"type": "response.content_part.added", "part": part, **self._place()},
        ]

    def _message(self, status: str) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "status": status, "content": []}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.whole), "content_index": 0}

    def _call(self, call: ToolCall) -> list[dict[str, Any]]:
        index = len(self.whole)
        identity = uuid.uuid4().hex
        item = {
            "id": f"fc_{identity}",
            "call_id": f"call_{identity[:24]}",
            "type": "function_call",
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        place = {"item_id": item["id"], "output_index": index}
        self.whole.append(item)
        begun = {**item, "arguments": "", "status": "in_progress"}
        return [
            {"type": "response.output_item.added", "item": begun, "output_index": index},
            {"type": "response.function_call_arguments.delta", "delta": call.arguments, **place},
            {
                "type": "response.function_call_arguments.done",
                "name": call.name,
                "arguments": call.arguments,
                **place,
            },
            {"type": "response.output_item.done", "item": item, "output_index": index},
        ]
