"""From the engine's events to what happens in messages: text of a field, calls, the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from swarm_plugins.web.engine.request import Done, Event, Finished, Piece, Scored
from swarm_plugins.web.protocol.chat_request import ChatRequest, Prepared
from swarm_plugins.web.protocol.tools import DemandedReader, MessageReader, Part

Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Said:
    """A part of the message ``index``."""

    index: int
    part: Part
    scored: tuple[Scored, ...] = ()


@dataclass(frozen=True)
class Ended:
    """The end of the message ``index``."""

    index: int
    reason: Reason


async def read_messages(
    events: AsyncIterator[Event], body: ChatRequest, prepared: Prepared
) -> AsyncIterator[Said | Ended | Done]:
    """Yields what happens in each of the wanted messages."""
    readers = [_reader(body, prepared) for _ in range(prepared.generation.n)]
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


def _reader(body: ChatRequest, prepared: Prepared) -> MessageReader | DemandedReader:
    if prepared.opened is not None:
        return DemandedReader()
    return MessageReader(prepared.template, prepared.begun, body.offered)
