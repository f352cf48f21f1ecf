"""Server-sent events, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

import anyio
from fastapi import Request
from starlette.responses import StreamingResponse

from swarm_plugins.web.protocol.errors import ClientLeftError, api_error

T = TypeVar("T")


async def while_connected(request: Request, events: AsyncGenerator[T, None]) -> AsyncIterator[T]:
    """Yields events until they end; closes them at once when the client leaves.

    Raises:
        ClientLeftError: If it does.
    """
    leaving = asyncio.create_task(_until_gone(request))
    try:
        async with contextlib.aclosing(events):
            while True:
                following = asyncio.ensure_future(anext(events))
                try:
                    await asyncio.wait({following, leaving}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    # A generator cannot be closed while it runs, and a scope that is cancelled ends every wait in it.
                    if following.cancel():
                        with anyio.CancelScope(shield=True):
                            await asyncio.wait({following})
                if following.cancelled():
                    raise ClientLeftError
                try:
                    event = following.result()
                except StopAsyncIteration:
                    return
                yield event
    finally:
        leaving.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def event_stream(parts: AsyncIterator[dict[str, Any]], *, done: bool = True) -> StreamingResponse:
    """Streams parts as server-sent events; an error on the way is one of them.

    Returns when the first part is there, so that an error before it gets its own status.

    Args:
        parts: What to send; a part with a ``type`` is an event of that name.
        done: Whether ``[DONE]`` ends the stream.
    """
    first = await anext(parts)

    async def lines() -> AsyncIterator[str]:
        number = 1
        try:
            yield _event(first)
            async for part in parts:
                yield _event(part)
                number += 1
        except ClientLeftError:
            return
        except Exception as error:  # noqa: BLE001  # the status is out: the client reads the error here
            body = api_error(error).body()
            yield _event(body if done else {**body["error"], "type": "error", "sequence_number": number})
        if done:
            yield "data: [DONE]\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


def _event(part: dict[str, Any]) -> str:
    data = json.dumps(part, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"event: {part['type']}\ndata: {data}\n\n" if "type" in part else f"data: {data}\n\n"
