"""Who may ask, how much at once, and how long a request may be."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import Request
from starlette.exceptions import HTTPException

from swarm_plugins.web.protocol.errors import ApiError
from swarm_plugins.web.protocol.values import ValueCounter
from swarm_plugins.web.settings import ApiSettings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FILES = "/api/v1/files/"
"""Before tokens that nobody can guess: whoever knows one needs no key."""

_PAGE = "/"
_OPEN = ("/page/", FILES)
"""The page and what needs no key begin so."""

_GENERATING = "/v1/"
_TRAINING = "/api/v1/"
_PROTOBUF = f"{_TRAINING}forward_backward"
_ANSWER = f"{_TRAINING}retrieve_future"
_MOST_CALLS = 192
"""Most questions for answers of training's protocol that one key has at once, and most other calls of it.

Its clients ask for answers again and again, and wait for them: the SDK for 64 samples of each sampler. With as many
calls of both kinds, a key leaves a quarter of the connections that a server takes.
"""

MAX_BODY_BYTES = 4 << 20
"""Longest request."""

MAX_OBJECTS = 1 << 13
"""Most objects in a request, such as messages and their parts: each takes 10 us, in which nothing else runs."""

_BODY_S = 30.0
"""Time for a client to send all of a request's body."""


def tenant_of(request: Request) -> str:
    """Returns whose request this is; an empty text where there are no keys."""
    return str(request.scope.get("swarm.tenant", ""))


class Access:
    """ASGI middleware: keys, bounds per key, and longest bodies.

    Args:
        app: What it protects.
        settings: Keys and bounds.
        max_values: Most values in a body.
    """

    def __init__(self, app: App, settings: ApiSettings, max_values: int) -> None:
        self._app = app
        self._settings = settings
        self._max_values = max_values
        # Compared by their hashes: so no comparison takes longer the more of a key is right.
        self._keys = {hashlib.sha256(key.encode()).hexdigest() for key in settings.api_keys}
        self._running: Counter[tuple[str, str]] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            tenant, kind = self._tenant(scope), _kind_of(scope)
            most = self._settings.most_of_a_key if kind == _GENERATING else _MOST_CALLS
            if tenant and kind and self._running[tenant, kind] >= most:
                raise ApiError(
                    f"{most} requests of this key are running, which is the limit: wait for one",
                    status=429,
                    code="rate_limit_exceeded",
                )
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        scope["swarm.tenant"] = tenant
        self._running[tenant, kind] += 1
        try:
            await self._app(scope, self._bounded(receive, is_json=_path(scope) != _PROTOBUF), send)
        finally:
            self._running[tenant, kind] -= 1

    def _tenant(self, scope: Scope) -> str:
        path = _path(scope)
        if not self._keys or path == _PAGE or path.startswith(_OPEN):
            return ""
        headers = dict(scope["headers"])
        # The second is how Tinker's SDK sends it.
        given = headers.get(b"authorization") or b"bearer " + headers.get(b"x-api-key", b"")
        kind, _, key = given.partition(b" ")
        shown = hashlib.sha256(key.strip()).hexdigest()
        # Compares with each of them, whatever it finds.
        found = [hmac.compare_digest(shown, known) for known in self._keys]
        if kind.lower() != b"bearer" or not any(found):
            raise ApiError(
                "a wrong API key" if key else "no API key: send it as 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
            )
        return shown

    def _bounded(self, receive: Receive, *, is_json: bool) -> Receive:
        """Raises HTTPException, as FastAPI's own checks of a body do."""
        read, is_complete, due = 0, False, asyncio.get_running_loop().time() + _BODY_S
        values = ValueCounter()

        async def next_message() -> Message:
            nonlocal read, is_complete
            try:
                # After the body, only the end of the connection can come, whenever the client leaves.
                async with asyncio.timeout_at(None if is_complete else due):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(
                    408, f"the request did not arrive within {_BODY_S:g} s: send it faster, or less at once"
                ) from error
            is_complete = not message.get("more_body", False)
            body = message.get("body", b"")
            read += len(body)
            if read > MAX_BODY_BYTES:
                raise HTTPException(413, f"the request is longer than {MAX_BODY_BYTES} bytes: send less at once")
            if not is_json:
                return message
            if b"\0" in body:
                # In UTF-16, which JSON readers take, quotes and commas could not be told from parts of letters.
                raise HTTPException(400, "the request is not JSON in UTF-8")
            if values.add(body) > self._max_values:
                raise HTTPException(413, f"the request has more than {self._max_values} values: send less at once")
            if values.num_objects > MAX_OBJECTS:
                raise HTTPException(413, f"the request has more than {MAX_OBJECTS} objects: send less at once")
            return message

        return next_message


def _path(scope: Scope) -> str:
    # In a mounted app, the path begins with the place where it is mounted.
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _kind_of(scope: Scope) -> str:
    """Returns what a request is counted with; an empty text if it is not."""
    path = _path(scope)
    if path.startswith(_TRAINING):
        return _ANSWER if path == _ANSWER else _TRAINING
    return _GENERATING if scope["method"] == "POST" else ""
