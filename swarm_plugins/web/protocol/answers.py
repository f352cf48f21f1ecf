"""What is said in the answers to a request, and OpenAI's objects for it: parts of a stream, or the whole answer."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from starlette.responses import JSONResponse, Response

from swarm_plugins.web.engine.request import Done, Event, Finished, Piece, Scored
from swarm_plugins.web.protocol.streams import event_stream
from swarm_plugins.web.protocol.tools import DemandedReader, MessageReader, Part, ToolCall

Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Said:
    """A part of the answer ``index``."""

    index: int
    part: Part
    scored: tuple[Scored, ...] = ()


@dataclass(frozen=True)
class Ended:
    """The end of the answer ``index``."""

    index: int
    reason: Reason


async def read_answers(
    events: AsyncIterator[Event], readers: Sequence[MessageReader | DemandedReader]
) -> AsyncIterator[Said | Ended | Done]:
    """Yields what is said in each answer; each has a reader."""
    called: set[int] = set()
    async for event in events:
        if isinstance(event, Done):
            yield event
        elif isinstance(event, Piece):
            parts = readers[event.index].add(event.text)
            if event.scored and not parts:
                parts = [Part("content")]
            for number, part in enumerate(parts):
                called |= {event.index} if part.call else set()
                yield Said(event.index, part, () if number else event.scored)
        elif isinstance(event, Finished):
            for part in readers[event.index].end():
                called |= {event.index} if part.call else set()
                yield Said(event.index, part)
            is_call = event.reason == "stop" and event.index in called
            yield Ended(event.index, "tool_calls" if is_call else event.reason)


@dataclass
class Whole:
    """One answer as a whole."""

    texts: defaultdict[str, str] = field(default_factory=lambda: defaultdict(str))
    """By field of the message."""
    calls: list[ToolCall] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    reason: Reason = "stop"

    def add(self, said: Said) -> None:
        self.scored += said.scored
        if said.part.call is not None:
            self.calls.append(said.part.call)
        else:
            self.texts[said.part.field] += said.part.text


class Answer:
    """The answers to one request in OpenAI's shape; subclasses say what a choice looks like.

    Args:
        model: The model's name in the request.
        count: How many answers there are.
        with_usage: Whether a stream ends with its counts.
    """

    prefix: ClassVar[str]
    """Of ids."""
    kinds: ClassVar[tuple[str, str]]
    """OpenAI's names of a part's object and of the whole one."""

    def __init__(self, model: str, count: int, *, with_usage: bool) -> None:
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._count = count
        self._with_usage = with_usage

    def said(self, one: Said) -> dict[str, Any]:
        """Returns a streamed choice with something said."""
        raise NotImplementedError

    def ended(self, one: Ended) -> dict[str, Any]:
        """Returns the last streamed choice of an answer."""
        raise NotImplementedError

    def choice(self, whole: Whole) -> dict[str, Any]:
        """Returns a whole choice, without its index and the reason of its end."""
        raise NotImplementedError

    async def response(self, said: AsyncIterator[Said | Ended | Done], *, stream: bool) -> Response:
        return await event_stream(self._parts(said)) if stream else JSONResponse(await self._whole(said))

    async def _parts(self, said: AsyncIterator[Said | Ended | Done]) -> AsyncIterator[dict[str, Any]]:
        head = {**self._head, "object": self.kinds[0], **({"usage": None} if self._with_usage else {})}
        async for one in said:
            if isinstance(one, Said):
                yield {**head, "choices": [{"index": one.index, "finish_reason": None, **self.said(one)}]}
            elif isinstance(one, Ended):
                yield {**head, "choices": [{"index": one.index, "finish_reason": one.reason, **self.ended(one)}]}
            elif self._with_usage:
                yield {**head, "choices": [], "usage": usage(one), "swarm": extension(one)}

    async def _whole(self, said: AsyncIterator[Said | Ended | Done]) -> dict[str, Any]:
        answers = [Whole() for _ in range(self._count)]
        counts: dict[str, Any] = {}
        async for one in said:
            if isinstance(one, Said):
                answers[one.index].add(one)
            elif isinstance(one, Ended):
                answers[one.index].reason = one.reason
            else:
                counts = {"usage": usage(one), "swarm": extension(one)}
        choices = [
            {"index": index, "finish_reason": one.reason, **self.choice(one)} for index, one in enumerate(answers)
        ]
        return {**self._head, "object": self.kinds[1], "choices": choices, **counts}


def usage(done: Done) -> dict[str, Any]:
    """Returns OpenAI's ``usage``."""
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.new_tokens,
        "total_tokens": done.prompt_tokens + done.new_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    }


def extension(done: Done) -> dict[str, Any]:
    """Returns the field ``swarm``: which servers carried the answer, and how fast."""
    return {
        "servers": list(done.servers),
        "tokens_per_s": round(done.new_tokens / done.seconds, 2) if done.seconds > 0 else None,
        "cached_tokens": done.cached_tokens,
    }
