"""``/v1/responses``: the same conversations in OpenAI's newer shape, without a memory of earlier responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import Field, ValidationError
from starlette.responses import JSONResponse, Response

from swarm_plugins.web.access import tenant_of
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.engine.request import Done
from swarm_plugins.web.protocol.answers import Ended, Said, extension, read_answers
from swarm_plugins.web.protocol.bodies import read_body
from swarm_plugins.web.protocol.chat_request import ChatRequest, prepare
from swarm_plugins.web.protocol.errors import invalid
from swarm_plugins.web.protocol.fields import Fields
from swarm_plugins.web.protocol.prompts import Prompts
from swarm_plugins.web.protocol.response_items import Items, chat_messages, chat_tools
from swarm_plugins.web.protocol.streams import event_stream, while_connected

_PASSED_ON = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "parallel_tool_calls")
"""Fields that mean the same in a chat completion."""


class TextSettings(Fields):
    """What the text looks like."""

    format: dict[str, Any] | None = None


class ResponseRequest(Fields):
    """A request for a response."""

    known: ClassVar[frozenset[str]] = frozenset(ResponseCreateParamsBase.__annotations__)

    model: str
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    text: TextSettings | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    background: Literal[False] | None = None

    def as_chat(self) -> ChatRequest:
        """Returns the chat request that gives the same answer.

        Raises:
            ApiError: If a field cannot be honoured.
        """
        chat = {name: value for name in _PASSED_ON if (value := getattr(self, name)) is not None}
        chat["messages"] = chat_messages(self.input, self.instructions)
        if self.max_output_tokens is not None:
            chat["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            chat["tools"] = chat_tools(self.tools)
        if self.tool_choice is not None:
            choice = self.tool_choice
            is_named = isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice
            named = {"type": "function", "function": {"name": choice.get("name")}} if is_named else choice  # type: ignore[union-attr]
            chat["tool_choice"] = named
        wanted = dict(self.text.format or {}) if self.text is not None else {}
        if wanted.get("type") == "json_schema":
            schema = {name: value for name, value in wanted.items() if name != "type"}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif wanted:
            chat["response_format"] = wanted
        try:
            found = ChatRequest.model_validate(chat)
        except ValidationError as error:
            raise invalid(error.errors()) from error
        found.check()
        return found


def responses_router(engine: Engine, prompts: Prompts) -> APIRouter:
    """Returns the route."""
    router = APIRouter()

    @router.post("/v1/responses", response_model=None)
    async def create(request: Request) -> Response:
        body, tenant = await read_body(ResponseRequest, request, engine), tenant_of(request)
        prepared = await prepare(await engine.in_turn(tenant, body.as_chat), tenant, engine, prompts)
        events = while_connected(request, engine.generate(prepared.generation))
        said = read_answers(events, prepared.readers())
        answer = _Answer(body)
        if body.stream:
            return await event_stream(answer.events(said), done=False)
        async for _ in answer.events(said):
            pass
        return JSONResponse(answer.response)

    return router


class _Answer:
    """A response that grows."""

    def __init__(self, body: ResponseRequest) -> None:
        self._number = 0
        self._items = Items()
        self.response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "metadata": {},
            "model": body.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "max_output_tokens": body.max_output_tokens,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
        }

    async def events(self, said: AsyncIterator[Said | Ended | Done]) -> AsyncIterator[dict[str, Any]]:
        """Yields a streamed response's events; at the end the response is whole."""
        # What fails before gets its own status, as in a chat.
        one = await anext(said, None)
        yield self._event({"type": "response.created", "response": dict(self.response)})
        yield self._event({"type": "response.in_progress", "response": dict(self.response)})
        while one is not None:
            if isinstance(one, Said):
                for event in self._items.add(one.part):
                    yield self._event(event)
            elif isinstance(one, Ended):
                for event in self._items.close(is_complete=one.reason != "length"):
                    yield self._event(event)
                self._end(one)
            else:
                self.response |= {"usage": _usage(one), "swarm": extension(one)}
            one = await anext(said, None)
        yield self._event({"type": f"response.{self.response['status']}", "response": dict(self.response)})

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        return {**event, "sequence_number": self._number - 1}

    def _end(self, ended: Ended) -> None:
        self.response["output"] = self._items.whole
        self.response["status"] = "completed"
        if ended.reason == "length":
            self.response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}


def _usage(done: Done) -> dict[str, Any]:
    return {
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": {"cached_tokens": done.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": done.new_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": done.prompt_tokens + done.new_tokens,
    }
