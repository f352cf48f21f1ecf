"""``/v1/chat/completions``."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from swarm_plugins.web.access import tenant_of
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.engine.models import end_tokens
from swarm_plugins.web.engine.request import Scored
from swarm_plugins.web.protocol.answers import Answer, Ended, Said, Whole, read_answers
from swarm_plugins.web.protocol.bodies import read_body
from swarm_plugins.web.protocol.chat_request import ChatRequest, prepare
from swarm_plugins.web.protocol.logprobs import chat_logprobs
from swarm_plugins.web.protocol.prompts import Prompts
from swarm_plugins.web.protocol.streams import while_connected
from swarm_plugins.web.protocol.tools import ToolCall


def chat_router(engine: Engine, prompts: Prompts) -> APIRouter:
    """Returns the route."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def create(request: Request) -> Response:
        body = await read_body(ChatRequest, request, engine)
        prepared = await prepare(body, tenant_of(request), engine, prompts)
        events = while_connected(request, engine.generate(prepared.generation))
        said = read_answers(events, prepared.readers())
        return await _ChatAnswer(engine, body).response(said, stream=bool(body.stream))

    return router


class _ChatAnswer(Answer):
    prefix = "chatcmpl"
    kinds = ("chat.completion.chunk", "chat.completion")

    def __init__(self, engine: Engine, body: ChatRequest) -> None:
        super().__init__(body.model, body.n or 1, with_usage=body.include_usage)
        self._tokenizer = engine.tokenizer
        self._ends = end_tokens(engine.models.base)
        self._with_scores = bool(body.logprobs)
        self._begun: set[int] = set()
        self._calls: Counter[int] = Counter()

    def said(self, one: Said) -> dict[str, Any]:
        delta: dict[str, Any] = {} if one.index in self._begun else {"role": "assistant"}
        self._begun.add(one.index)
        if one.part.call is None:
            delta[one.part.field] = one.part.text
        else:
            delta["tool_calls"] = [{"index": self._calls[one.index], **_call(one.part.call)}]
            self._calls[one.index] += 1
        return {"delta": delta, **({"logprobs": self._scores(one.scored)} if one.scored else {})}

    def ended(self, one: Ended) -> dict[str, Any]:
        return {"delta": {}}

    def choice(self, whole: Whole) -> dict[str, Any]:
        content = whole.texts["content"]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if whole.texts["reasoning_content"]:
            message["reasoning_content"] = whole.texts["reasoning_content"]
        if whole.calls:
            message |= {"content": content or None, "tool_calls": [_call(call) for call in whole.calls]}
        return {"message": message, "logprobs": self._scores(whole.scored) if self._with_scores else None}

    def _scores(self, scored: Sequence[Scored]) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, [one for one in scored if one.token not in self._ends])


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
