"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}`` with the status that fits."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from swarm_plugins.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    HubError,
    MissingBlocksError,
    SwarmError,
    TransportError,
    UnsupportedError,
    one_line,
    printable,
)
from swarm_plugins.web.engine.models import UnknownModelError

log = logging.getLogger(__name__)

_TYPES = {429: "rate_limit_error"}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}
_CLIENT_LEFT = 499
"""Status of a request whose client has left; only logs show it."""


class ClientLeftError(Exception):
    """The client closed its connection before the answer was complete."""


class ApiError(SwarmError):
    """A request cannot be answered.

    Args:
        message: What is wrong, and what to do.
        status: HTTP status.
        param: The field that is wrong.
        code: OpenAI's short name of the error, for programs.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, _HEADERS.get(self.status))


def api_error(error: BaseException) -> ApiError:
    """Returns the error to show a client; what it cannot know of this machine stays in the log."""
    if isinstance(error, ApiError):
        return error
    text = one_line(error, max_chars=1000)
    if isinstance(error, UnknownModelError):
        return ApiError(text, status=404, param="model", code="model_not_found")
    if isinstance(error, HubError):
        missing = error.kind in ("no repository", "no revision", "no file")
        return ApiError(
            text, status=404 if missing else 503, param="model", code="model_not_found" if missing else None
        )
    if isinstance(error, MissingBlocksError | CapacityError):
        return ApiError(text, status=503, code="overloaded")
    if isinstance(error, TransportError):
        return ApiError(text, status=502, code="server_failed")
    if isinstance(error, ConfigError | UnsupportedError | CheckpointError):
        return ApiError(text)
    if isinstance(error, RecursionError):
        return ApiError("the request is nested too deeply")
    log.error("a request failed", exc_info=error)
    return ApiError("an internal error; the server's log has the details", status=500)


def add_error_handlers(app: FastAPI) -> None:
    """Makes an app answer all errors in OpenAI's shape."""

    async def on_invalid(request: Request, error: Exception) -> JSONResponse:
        details = error.errors() if isinstance(error, RequestValidationError) else []
        return invalid(details).response()

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        status = getattr(error, "status_code", 500)
        path = f"{request.method} {request.url.path}"
        text = f"{path} does not exist here" if status in (404, 405) else str(getattr(error, "detail", error))
        return ApiError(text, status=status, code="unknown_url" if status in (404, 405) else None).response()

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response()

    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)

    async def on_leaving(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    for expected in (SwarmError, RecursionError, Exception):
        app.add_exception_handler(expected, on_error)
    app.add_exception_handler(ClientLeftError, on_leaving)


def invalid(details: Any) -> ApiError:
    """Returns the error for what pydantic found wrong in a request; names the most deeply nested field."""
    # Each type of a union is tried. The one that matches furthest is what the client meant.
    first = max(details, key=lambda one: len(one.get("loc", ())), default=None)
    if first is None:
        return ApiError("the request is not valid")
    named = [printable(str(part)) for part in first.get("loc", ())]
    place = [part for part in named if part != "body" and "[" not in part]
    if first.get("type") == "json_invalid":
        return ApiError("the request's body is not JSON", code="invalid_json")
    param = ".".join(place) or None
    what = f"invalid {param}: " if param else ""
    missing = first.get("type") == "missing"
    return ApiError(
        f"{what}{str(first.get('msg', 'not valid')).removeprefix('Value error, ')}",
        param=param,
        code="missing_required_parameter" if missing else "invalid_value",
    )
