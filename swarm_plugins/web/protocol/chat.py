"""``/v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response

from swarm_plugins.talk.sampling import default_sampling
from swarm_plugins.web.access import owner_of
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.engine.models import end_tokens
from swarm_plugins.web.engine.request import Done, Event, Finished, Generation, Piece, Scored
from swarm_plugins.web.protocol.counts import extension, usage
from swarm_plugins.web.protocol.fields import Fields, SamplingFields
from swarm_plugins.web.protocol.logprobs import chat_logprobs
from swarm_plugins.web.protocol.prompts import Prompts
from swarm_plugins.web.protocol.streams import event_stream, while_connected


class TextPart(Fields):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Fields):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the message as chat templates take it."""
        parts = self.content
        text = "".join(part.text for part in parts) if isinstance(parts, list) else parts
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text or ""}
        for name in ("name", "tool_calls", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message


class ChatRequest(SamplingFields):
    """A request for the next message of a conversation."""

    known: ClassVar[frozenset[str]] = frozenset(CompletionCreateParamsBase.__annotations__)

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _scores(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: set it to true")
        return self

    def check(self) -> None:
        """Raises ApiError if there is a field that cannot be honoured."""
        super().check()
        for message in self.messages:
            message.check()


def chat_router(engine: Engine, prompts: Prompts) -> APIRouter:
    """Returns the route."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def create(body: ChatRequest, request: Request) -> Response:
        generation = await _generation(body, request, engine, prompts)
        answer = _Answer(engine, body)
        events = while_connected(request, engine.generate(generation))
        if body.stream:
            return await event_stream(answer.chunks(events))
        return await answer.whole(events)

    return router


async def _generation(body: ChatRequest, request: Request, engine: Engine, prompts: Prompts) -> Generation:
    body.check()
    adapter = engine.models.split(body.model)
    tokens = await prompts.of_messages([message.for_template() for message in body.messages])
    wanted = body.max_completion_tokens or body.max_tokens
    return Generation(
        tokens=tuple(tokens),
        max_new_tokens=prompts.room(tokens, wanted, param="messages"),
        sampling=body.sampling(default_sampling(engine.models.base)),
        seed=body.seed,
        n=body.answers(engine.settings.max_answers),
        stop=body.stops(),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        logit_bias=body.bias(engine.models.vocabulary),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        adapter=adapter,
        owner=owner_of(request),
    )


class _Answer:
    """Turns events into OpenAI's objects."""

    def __init__(self, engine: Engine, body: ChatRequest) -> None:
        self._tokenizer = engine.tokenizer
        self._ends = end_tokens(engine.models.base)
        self._body = body
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
        }

    async def chunks(self, events: AsyncIterator[Event]) -> AsyncIterator[ChatCompletionChunk]:
        """Yields the parts of a streamed answer."""
        begun: set[int] = set()
        async for event in events:
            if isinstance(event, Piece):
                role = {} if event.index in begun else {"role": "assistant"}
                begun.add(event.index)
                choice: dict[str, Any] = {
                    "index": event.index,
                    "delta": {**role, "content": event.text},
                    "finish_reason": None,
                }
                if event.scored:
                    choice["logprobs"] = self._scores(event.scored)
                yield self._chunk([choice])
            elif isinstance(event, Finished):
                yield self._chunk([{"index": event.index, "delta": {}, "finish_reason": event.reason}])
            elif isinstance(event, Done) and self._body.include_usage:
                yield self._chunk([], usage=usage(event), swarm=extension(event))

    def _scores(self, scored: Sequence[Scored]) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, [one for one in scored if one.token not in self._ends])

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> ChatCompletionChunk:
        if self._body.include_usage:
            more.setdefault("usage", None)
        return ChatCompletionChunk.model_validate(
            {**self._head, "object": "chat.completion.chunk", "choices": choices, **more}
        )

    async def whole(self, events: AsyncIterator[Event]) -> JSONResponse:
        """Returns the whole answer at once."""
        texts = ["" for _ in range(self._body.n or 1)]
        scored: list[list[Any]] = [[] for _ in texts]
        reasons: list[str] = ["stop" for _ in texts]
        done = None
        async for event in events:
            if isinstance(event, Piece):
                texts[event.index] += event.text
                scored[event.index] += event.scored
            elif isinstance(event, Finished):
                reasons[event.index] = event.reason
            elif isinstance(event, Done):
                done = event
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "finish_reason": reasons[index],
                "logprobs": self._scores(scored[index]) if self._body.logprobs else None,
            }
            for index, text in enumerate(texts)
        ]
        more = {} if done is None else {"usage": usage(done), "swarm": extension(done)}
        answer = ChatCompletion.model_validate({**self._head, "object": "chat.completion", "choices": choices, **more})
        return JSONResponse(answer.model_dump(exclude_unset=True))
