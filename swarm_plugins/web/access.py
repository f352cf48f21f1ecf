"""Who may ask, how much at once, and how long a request may be."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import Request

from swarm_plugins.web.protocol.errors import ApiError
from swarm_plugins.web.settings import ApiSettings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_GUARDED = ("/v1", "/api", "/metrics")
"""Paths that need a key, if there are keys; the page itself is for everybody."""

_BODY_S = 30.0
"""Longest pause within a request."""


def owner_of(request: Request) -> str:
    """Returns whose request this is; an empty text where there are no keys."""
    return str(request.scope.get("swarm.owner", ""))


class Access:
    """ASGI middleware: keys, bounds per key, and longest bodies.

    Args:
        app: What it protects.
        settings: Keys and bounds.
    """

    def __init__(self, app: App, settings: ApiSettings) -> None:
        self._app = app
        self._settings = settings
        # Compared by their hashes: so no comparison takes longer the more of a key is right.
        self._keys = {_hash(key) for key in settings.api_keys}
        self._running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            owner = self._owner(scope)
            self._check_length(scope)
            if owner and scope["method"] == "POST" and self._running[owner] >= self._settings.max_running_per_key:
                raise ApiError(
                    f"{self._running[owner]} requests of this key are running, the most that may: wait for one",
                    status=429,
                    code="rate_limit_exceeded",
                )
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        scope["swarm.owner"] = owner
        counted = int(scope["method"] == "POST")
        self._running[owner] += counted
        try:
            await self._app(scope, self._bounded(receive), send)
        finally:
            self._running[owner] -= counted

    def _owner(self, scope: Scope) -> str:
        if not self._keys or not str(scope["path"]).startswith(_GUARDED):
            return ""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        shown = hashlib.sha256(key.strip()).hexdigest()
        # Compares with each of them, whatever it finds.
        found = [hmac.compare_digest(shown, known) for known in self._keys]
        if kind.lower() != b"bearer" or not any(found):
            raise ApiError(
                "a wrong API key" if given else "no API key: send it as 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
            )
        return shown

    def _check_length(self, scope: Scope) -> None:
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not length.isdigit() or int(length) > self._settings.max_body_bytes:
            raise self._too_long()

    def _too_long(self) -> ApiError:
        return ApiError(
            f"the request is longer than {self._settings.max_body_bytes} bytes", status=413, code="request_too_large"
        )

    def _bounded(self, receive: Receive) -> Receive:
        read, is_complete = 0, False

        async def next_message() -> Message:
            nonlocal read, is_complete
            # After the body, only the end of the connection can come, whenever the client leaves.
            message = await (receive() if is_complete else asyncio.wait_for(receive(), _BODY_S))
            is_complete = not message.get("more_body", False)
            read += len(message.get("body", b""))
            if read > self._settings.max_body_bytes:
                raise self._too_long()
            return message

        return next_message


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
