"""Serves an app over HTTP until Ctrl-C."""

from __future__ import annotations

import errno
import functools
import ipaddress
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm_plugins.errors import ConfigError, printable
from swarm_plugins.web.connections import Connection, Owing

_BACKLOG = 128
_MAX_CONNECTIONS = 512
_END_S = 3
"""Time for open answers when the server ends."""


def serve_app(
    app: ASGIApp, host: str, port: int, on_ready: Callable[[str], None], *, listener: socket.socket | None = None
) -> None:
    """Serves an app until SIGINT, which raises KeyboardInterrupt at the end, or SIGTERM.

    Args:
        app: The app.
        host: Name or address to listen on.
        port: Port to listen on; 0: any free one.
        on_ready: Called once with the address, such as ``http://127.0.0.1:8000``, when connections are accepted.
        listener: What `listen` has returned for the same host and port, and is closed here. None: listen now.

    Raises:
        ConfigError: If the port is in use, or the host is not an address of this machine.
    """
    listener = listener or listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        _OwnNames(app, host) if is_loopback(listener) else app,
        log_level="warning",
        access_log=False,
        server_header=False,
        http=functools.partial(Connection, owing=Owing()),  # type: ignore[arg-type]  # called like the class
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_END_S,
    )
    with listener:
        _Server(config, lambda: on_ready(address)).run(sockets=[listener])


def is_loopback(listener: socket.socket) -> bool:
    """Returns whether only this machine reaches a socket, whatever name it was opened by."""
    address = ipaddress.ip_address(listener.getsockname()[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _name_in(host: str) -> str | None:
    """Returns the name in a header, without its port; None if it cannot be read."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


class _OwnNames:
    """Answers only requests for this machine: a stranger's page could have its name resolved to 127.0.0.1.

    Args:
        app: Gets the others.
        host: What the server listens on.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._names = {"localhost", "127.0.0.1", "::1", host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = Headers(scope=scope).get("host", "localhost") if scope["type"] == "http" else "localhost"
        if _name_in(asked) in self._names:
            await self._app(scope, receive, send)
            return
        message = (
            f"this server listens on loopback and is asked as {printable(asked)!r}: ask for localhost or 127.0.0.1, "
            "also behind a proxy, or start it with another --host"
        )
        error = {"error": {"message": message, "type": "invalid_request_error"}}
        await JSONResponse(error, status_code=403)(scope, receive, send)


def listen(host: str, port: int) -> socket.socket:
    """Takes a port, so that one in use is found before a model is loaded or a swarm joined.

    Raises:
        ConfigError: If the port is in use, or the host is not an address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as exc:
        if isinstance(exc, OSError) and exc.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use: give another --port, or 0 for any free one") from exc
        code = exc.errno if isinstance(exc, OSError) else None
        # The socket's own message repeats the address.
        reason = os.strerror(code) if code is not None and code > 0 else getattr(exc, "strerror", None) or exc
        raise ConfigError(
            f"cannot listen on port {port} of {host} ({reason}): give an address of this machine as --host, such as "
            "127.0.0.1, and a port that you may use"
        ) from exc


class _Server(uvicorn.Server):
    """Says when it accepts connections, and ends without an error on SIGTERM."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGTERM:
            # Raised again after the end, it would kill the process before the caller has closed anything.
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)
