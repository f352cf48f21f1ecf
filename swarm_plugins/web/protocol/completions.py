"""``/v1/completions``: texts continued, and scored (``echo`` with ``logprobs``), as evaluation harnesses ask."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from openai.types import Completion
from openai.types.completion_create_params import CompletionCreateParamsBase
from pydantic import Field, field_validator, model_validator
from starlette.responses import JSONResponse, Response

from swarm_plugins.web.access import tenant_of
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.engine.request import Done, Event, Finished, Generation, Piece, PromptScored, Scored
from swarm_plugins.web.protocol.counts import extension, usage
from swarm_plugins.web.protocol.errors import ApiError
from swarm_plugins.web.protocol.fields import SamplingFields
from swarm_plugins.web.protocol.logprobs import text_logprobs
from swarm_plugins.web.protocol.prompts import Prompts
from swarm_plugins.web.protocol.streams import event_stream, while_connected

_DEFAULT_TOKENS = 16
"""OpenAI's default length of a text completion."""

Token = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[Token], Field(max_length=1 << 20, fail_fast=True)]


class CompletionRequest(SamplingFields):
    """A request to continue texts."""

    known: ClassVar[frozenset[str]] = frozenset(CompletionCreateParamsBase.__annotations__)

    # Without fail_fast, each wrong token would be an error of its own, in each of the types.
    prompt: (
        str
        | Annotated[list[str], Field(max_length=1024, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(max_length=1024, fail_fast=True)]
    )
    # 0 with echo: only the prompt is scored.
    max_tokens: Annotated[int, Field(ge=0, le=1 << 30)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=20)] | None = None

    @field_validator("prompt")
    @classmethod
    def _prompts(cls, prompt: Any) -> Any:
        if not prompt:
            raise ValueError("give at least one prompt, of at least one token")
        return prompt

    @model_validator(mode="after")
    def _fit(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of other than n is not supported: leave it out")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 gives nothing: set echo, or ask for at least 1")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Returns each prompt, as text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


def completions_router(engine: Engine, prompts: Prompts) -> APIRouter:
    """Returns the route."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def create(body: CompletionRequest, request: Request) -> Response:
        generations = await _generations(body, request, engine, prompts)
        answer = _Answer(engine, body, generations)
        events = while_connected(request, _together([engine.generate(one) for one in generations]))
        if body.stream:
            return await event_stream(answer.chunks(events))
        return await answer.whole(events)

    return router


async def _generations(body: CompletionRequest, request: Request, engine: Engine, prompts: Prompts) -> list[Generation]:
    body.check()
    wanted = body.prompts()
    answers = body.answers(len(wanted))
    found = []
    for prompt in wanted:
        tokens = await prompts.of_text(prompt) if isinstance(prompt, str) else prompt
        if tokens and max(tokens) >= engine.models.vocabulary:
            raise ApiError(
                f"the prompt has the token {max(tokens)}; the model has {engine.models.vocabulary}, counted from 0",
                param="prompt",
                code="invalid_value",
            )
        found.append(
            body.generation(
                engine,
                tokens,
                max_new_tokens=prompts.room(tokens, body.max_tokens, param="prompt", default=_DEFAULT_TOKENS),
                n=answers,
                logprobs=body.logprobs,
                score_prompt=bool(body.echo) and body.logprobs is not None,
                tenant=tenant_of(request),
            )
        )
    return found


async def _together(generations: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[tuple[int, Event], None]:
    """Yields the events of all generations, each with its generation's number, as they come."""
    async with contextlib.AsyncExitStack() as stack:
        waiting: dict[asyncio.Future[Event], int] = {}
        try:
            for number, generation in enumerate(generations):
                await stack.enter_async_context(contextlib.aclosing(generation))
                waiting[asyncio.ensure_future(anext(generation))] = number
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    number = waiting.pop(future)
                    with contextlib.suppress(StopAsyncIteration):
                        event = future.result()
                        waiting[asyncio.ensure_future(anext(generations[number]))] = number
                        yield number, event
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


class _Answer:
    """Turns events into OpenAI's objects; choices are numbered prompt by prompt."""

    def __init__(self, engine: Engine, body: CompletionRequest, generations: Sequence[Generation]) -> None:
        self._tokenizer = engine.tokenizer
        self._body = body
        self._generations = generations
        self._per_prompt = generations[0].n
        self._head: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }

    def _echoed(self, number: int) -> str:
        if not self._body.echo:
            return ""
        prompt = self._body.prompts()[number]
        if isinstance(prompt, str):
            return prompt
        return str(self._tokenizer.decode(list(self._generations[number].tokens), skip_special_tokens=False))

    async def chunks(self, events: AsyncIterator[tuple[int, Event]]) -> AsyncIterator[Completion]:
        """Yields the parts of a streamed answer."""
        begun: set[int] = set()
        ends = []
        async for number, event in events:
            if isinstance(event, Done):
                ends.append(event)
                continue
            first = number * self._per_prompt
            all_of_it = range(first, first + self._per_prompt)
            for index in all_of_it if isinstance(event, PromptScored) else (first + event.index,):
                text = "" if index in begun else self._echoed(number)
                begun.add(index)
                if isinstance(event, Piece):
                    text += event.text
                yield self._part([{"index": index, "text": text, **self._rest(event)}])
        if self._body.include_usage:
            yield self._part([], **_counts(ends))

    def _rest(self, event: Piece | Finished | PromptScored) -> dict[str, Any]:
        if isinstance(event, Finished):
            return {"finish_reason": event.reason, "logprobs": None}
        logprobs = text_logprobs(self._tokenizer, event.scored) if event.scored else None
        return {"finish_reason": None, "logprobs": logprobs}

    def _part(self, choices: list[dict[str, Any]], **more: Any) -> Completion:
        # A part says that its choice goes on, which OpenAI's type for whole answers does not foresee.
        return Completion.model_construct(**self._head, choices=choices, **more)

    async def whole(self, events: AsyncIterator[tuple[int, Event]]) -> JSONResponse:
        """Returns the whole answer at once."""
        count = self._per_prompt * len(self._generations)
        texts = [self._echoed(index // self._per_prompt) for index in range(count)]
        scored: list[list[Scored]] = [[] for _ in texts]
        reasons: list[str] = ["length" for _ in texts]
        ends: list[Done] = []
        async for number, event in events:
            first = number * self._per_prompt
            if isinstance(event, PromptScored):
                for index in range(first, first + self._per_prompt):
                    scored[index] += event.scored
            elif isinstance(event, Piece):
                texts[first + event.index] += event.text
                scored[first + event.index] += event.scored
            elif isinstance(event, Finished):
                reasons[first + event.index] = event.reason
            else:
                ends.append(event)
        choices = [
            {
                "index": index,
                "text": text,
                "finish_reason": reasons[index],
                "logprobs": None if self._body.logprobs is None else text_logprobs(self._tokenizer, scored[index]),
            }
            for index, text in enumerate(texts)
        ]
        return JSONResponse({**self._head, "choices": choices, **_counts(ends)})


def _counts(ends: Sequence[Done]) -> dict[str, Any]:
    """Returns the counts of all generations together."""
    if not ends:
        return {}
    whole = Done(
        prompt_tokens=sum(end.prompt_tokens for end in ends),
        cached_tokens=sum(end.cached_tokens for end in ends),
        new_tokens=sum(end.new_tokens for end in ends),
        seconds=max(end.seconds for end in ends),
        servers=tuple(dict.fromkeys(peer for end in ends for peer in end.servers)),
    )
    return {"usage": usage(whole), "swarm": extension(whole)}
