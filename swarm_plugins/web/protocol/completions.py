"""``/v1/completions``: texts continued, and scored (``echo`` with ``logprobs``), as evaluation harnesses ask."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from openai.types.completion_create_params import CompletionCreateParamsBase
from pydantic import Field, field_validator, model_validator
from starlette.responses import Response

from swarm_plugins.web.access import tenant_of
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.engine.request import Done, Event, Generation, Piece, PromptScored
from swarm_plugins.web.protocol.answers import Answer, Ended, Said, Whole, read_answers
from swarm_plugins.web.protocol.bodies import read_body
from swarm_plugins.web.protocol.errors import ApiError
from swarm_plugins.web.protocol.fields import SamplingFields
from swarm_plugins.web.protocol.logprobs import text_logprobs
from swarm_plugins.web.protocol.prompts import Prompts
from swarm_plugins.web.protocol.streams import while_connected
from swarm_plugins.web.protocol.tools import MessageReader

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
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


def completions_router(engine: Engine, prompts: Prompts) -> APIRouter:
    """Returns the route."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def create(request: Request) -> Response:
        body = await read_body(CompletionRequest, request, engine)
        generations = await _generations(body, request, engine, prompts)
        count = sum(one.n for one in generations)
        events = while_connected(request, _as_one(engine, body, generations))
        said = read_answers(events, [MessageReader(None) for _ in range(count)])
        return await _TextAnswer(engine, body, count).response(said, stream=bool(body.stream))

    return router


async def _generations(body: CompletionRequest, request: Request, engine: Engine, prompts: Prompts) -> list[Generation]:
    tenant, wanted = tenant_of(request), body.prompts()
    answers = body.answers(len(wanted))
    found = []
    for prompt in wanted:
        tokens = await prompts.of_text(prompt, tenant=tenant) if isinstance(prompt, str) else prompt
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
                continues_text=True,
                tenant=tenant,
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


async def _as_one(
    engine: Engine, body: CompletionRequest, generations: Sequence[Generation]
) -> AsyncGenerator[Event, None]:
    """Yields the events of all generations as one, with echoes; answers are numbered prompt by prompt."""
    per_prompt = generations[0].n
    echoes: dict[int, str] = {}
    if body.echo:
        texts = [
            prompt if isinstance(prompt, str) else str(engine.tokenizer.decode(prompt, skip_special_tokens=False))
            for prompt in body.prompts()
        ]
        echoes = {index: texts[index // per_prompt] for index in range(per_prompt * len(texts))}
    ends: list[Done] = []
    async with contextlib.aclosing(_together([engine.generate(one) for one in generations])) as events:
        async for number, event in events:
            first = number * per_prompt
            if isinstance(event, Done):
                ends.append(event)
            elif isinstance(event, PromptScored):
                for index in range(first, first + per_prompt):
                    yield Piece(index, echoes.pop(index, ""), event.scored)
            else:
                index = first + event.index
                if index in echoes:
                    yield Piece(index, echoes.pop(index))
                yield dataclasses.replace(event, index=index)
    yield Done(
        prompt_tokens=sum(end.prompt_tokens for end in ends),
        cached_tokens=sum(end.cached_tokens for end in ends),
        new_tokens=sum(end.new_tokens for end in ends),
        seconds=max((end.seconds for end in ends), default=0.0),
        servers=tuple(dict.fromkeys(peer for end in ends for peer in end.servers)),
    )


class _TextAnswer(Answer):
    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")

    def __init__(self, engine: Engine, body: CompletionRequest, count: int) -> None:
        super().__init__(body.model, count, with_usage=body.include_usage)
        self._tokenizer = engine.tokenizer
        self._with_scores = body.logprobs is not None
        self._lengths = [0] * count
        """Characters of each answer's tokens so far."""

    def said(self, one: Said) -> dict[str, Any]:
        scores = text_logprobs(self._tokenizer, one.scored, self._lengths[one.index]) if one.scored else None
        if scores is not None:
            self._lengths[one.index] += sum(map(len, scores["tokens"]))
        return {"text": one.part.text, "logprobs": scores}

    def ended(self, one: Ended) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def choice(self, whole: Whole) -> dict[str, Any]:
        scores = text_logprobs(self._tokenizer, whole.scored) if self._with_scores else None
        return {"text": whole.texts["content"], "logprobs": scores}
