"""``/v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.responses import JSONResponse, Response

from swarm_plugins.web.access import tenant_of
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.engine.models import end_tokens
from swarm_plugins.web.engine.request import Done, Scored
from swarm_plugins.web.protocol.chat_request import ChatRequest, prepare
from swarm_plugins.web.protocol.counts import extension, usage
from swarm_plugins.web.protocol.logprobs import chat_logprobs
from swarm_plugins.web.protocol.messages import Ended, Said, read_messages
from swarm_plugins.web.protocol.prompts import Prompts
from swarm_plugins.web.protocol.streams import event_stream, while_connected
from swarm_plugins.web.protocol.tools import ToolCall


def chat_router(engine: Engine, prompts: Prompts) -> APIRouter:
    """Returns the route."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def create(body: ChatRequest, request: Request) -> Response:
        prepared = await prepare(body, tenant_of(request), engine, prompts)
        events = while_connected(request, engine.generate(prepared.generation))
        said = read_messages(events, body, prepared)
        answer = _Answer(engine, body)
        if body.stream:
            return await event_stream(answer.chunks(said))
        return await answer.whole(said)

    return router


class _Message:
    """One whole message."""

    def __init__(self) -> None:
        self.texts = {"content": "", "reasoning_content": ""}
        self.calls: list[dict[str, Any]] = []
        self.scored: list[Scored] = []
        self.reason = "stop"

    def add(self, said: Said) -> None:
        self.scored += said.scored
        if said.part.call is not None:
            self.calls.append(_call(said.part.call))
        else:
            self.texts[said.part.field] += said.part.text

    def as_dict(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.texts["content"], "refusal": None}
        if self.texts["reasoning_content"]:
            message["reasoning_content"] = self.texts["reasoning_content"]
        if self.calls:
            message |= {"content": self.texts["content"] or None, "tool_calls": self.calls}
        return message


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class _Answer:
    """Turns what is said into OpenAI's objects."""

    def __init__(self, engine: Engine, body: ChatRequest) -> None:
        self._tokenizer = engine.tokenizer
        self._ends = end_tokens(engine.models.base)
        self._body = body
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
        }

    async def chunks(self, said: AsyncIterator[Said | Ended | Done]) -> AsyncIterator[ChatCompletionChunk]:
        """Yields the parts of a streamed answer."""
        begun: set[int] = set()
        calls: Counter[int] = Counter()
        async for one in said:
            if isinstance(one, Said):
                delta: dict[str, Any] = {} if one.index in begun else {"role": "assistant"}
                begun.add(one.index)
                if one.part.call is None:
                    delta[one.part.field] = one.part.text
                else:
                    delta["tool_calls"] = [{"index": calls[one.index], **_call(one.part.call)}]
                    calls[one.index] += 1
                choice: dict[str, Any] = {"index": one.index, "delta": delta, "finish_reason": None}
                if one.scored:
                    choice["logprobs"] = self._scores(one.scored)
                yield self._chunk([choice])
            elif isinstance(one, Ended):
                yield self._chunk([{"index": one.index, "delta": {}, "finish_reason": one.reason}])
            elif self._body.include_usage:
                yield self._chunk([], usage=usage(one), swarm=extension(one))

    def _scores(self, scored: Sequence[Scored]) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, [one for one in scored if one.token not in self._ends])

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> ChatCompletionChunk:
        if self._body.include_usage:
            more.setdefault("usage", None)
        return ChatCompletionChunk.model_validate(
            {**self._head, "object": "chat.completion.chunk", "choices": choices, **more}
        )

    async def whole(self, said: AsyncIterator[Said | Ended | Done]) -> JSONResponse:
        """Returns the whole answer at once."""
        messages = [_Message() for _ in range(self._body.n or 1)]
        more: dict[str, Any] = {}
        async for one in said:
            if isinstance(one, Said):
                messages[one.index].add(one)
            elif isinstance(one, Ended):
                messages[one.index].reason = one.reason
            else:
                more = {"usage": usage(one), "swarm": extension(one)}
        choices = [
            {
                "index": index,
                "message": message.as_dict(),
                "finish_reason": message.reason,
                "logprobs": self._scores(message.scored) if self._body.logprobs else None,
            }
            for index, message in enumerate(messages)
        ]
        answer = ChatCompletion.model_validate({**self._head, "object": "chat.completion", "choices": choices, **more})
        return JSONResponse(answer.model_dump(exclude_unset=True))
