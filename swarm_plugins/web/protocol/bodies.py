"""From a request's body to a request, in a thread: a body of many values takes longer than other keys should wait."""

from __future__ import annotations

import json
from email.message import Message
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from swarm_plugins.web.access import tenant_of
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.protocol.errors import ApiError, ClientLeftError, invalid
from swarm_plugins.web.protocol.fields import Fields

F = TypeVar("F", bound=Fields)


async def read_body(kind: type[F], request: Request, engine: Engine) -> F:
    """Returns what a request asks for, after checking its fields. Keys take turns.

    Raises:
        ApiError: If the body is not JSON, or one of its fields is wrong or cannot be honoured.
        ClientLeftError: If the client leaves before the body has arrived.
    """
    try:
        content = await request.body()
    except ClientDisconnect as error:
        raise ClientLeftError from error
    # No page of another site can send this type without being asked whether it may.
    if not _is_json(request.headers.get("content-type", "")):
        raise ApiError("the request's body is not JSON: send it as Content-Type: application/json", code="invalid_json")

    def read() -> F:
        try:
            found = kind.model_validate(json.loads(content))
        except ValidationError as error:
            raise invalid(error.errors(include_context=False, include_input=False, include_url=False)) from error
        except ValueError as error:
            raise ApiError("the request's body is not JSON", code="invalid_json") from error
        found.check()
        return found

    return await engine.in_turn(tenant_of(request), read)


def _is_json(content_type: str) -> bool:
    message = Message()
    message["content-type"] = content_type
    kind = message.get_content_subtype() if message.get_content_maintype() == "application" else ""
    return kind == "json" or kind.endswith("+json")
