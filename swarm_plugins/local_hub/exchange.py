"""One connection to the local Hub: routing, permissions, injected faults, answers."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

from swarm_plugins.local_hub.repositories import Commit, HubStore, Repo

_IDLE_S = 30.0
_MAX_BODY_BYTES = 4 << 30
_ID = r"(?P<repo>[^/]+/[^/]+|[^/]+)"


@dataclass(frozen=True, slots=True)
class HubRequest:
    """One request that came in."""

    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass(slots=True)
class HubFaults:
    """What goes wrong with the next requests."""

    statuses: list[int] = field(default_factory=list)
    """Answers given instead of the next files, one each."""
    cut_after_bytes: list[int] = field(default_factory=list)
    """The connections of the next files break after so many bytes, one each."""
    ignore_ranges: bool = False
    """Send whole files whatever is asked."""
    is_down: bool = False
    """Every connection is closed without an answer."""
    routes: dict[str, list[int | str]] = field(default_factory=dict)
    """By route (``create_repo``, ``preupload``, ``lfs_batch``, ``lfs_put``, ``commit``, ``create_tag`` ...), what
    becomes of its next requests: a status, ``"cut"`` (closed before anything is done), ``"lost"`` (done, but the answer
    is lost) or ``"ok"``."""
    delays_s: dict[str, float] = field(default_factory=dict)
    """By route, how long each request waits before anything is done."""

    def of_next(self, route: str) -> int | str:
        """Takes the fault of a request from the lists."""
        if self.is_down:
            return "cut"
        scripted = self.routes.get(route)
        return scripted.pop(0) if scripted else "ok"


class _Hub(Protocol):
    """What an exchange needs of the Hub it belongs to."""

    store: HubStore
    faults: HubFaults

    @property
    def endpoint(self) -> str: ...
    def track(self, connection: socket.socket, *, is_open: bool) -> None: ...
    def record(self, request: HubRequest) -> None: ...
    def pause(self, route: str) -> bool: ...
    def user(self, authorization: str | None) -> str | None: ...
    def may_write(self, user: str | None, repo_id: str) -> bool: ...
    def count(self, repo_id: str, path: str, num_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Route:
    """What answers the requests of a method whose path has a pattern."""

    name: str
    methods: tuple[str, ...]
    pattern: re.Pattern[str]
    answer: Callable[[Exchange], None]
    is_write: bool
    is_open: bool


def route(
    name: str,
    methods: str,
    pattern: str,
    answer: Callable[[Exchange], None],
    *,
    write: bool = False,
    open_: bool = False,
) -> Route:
    """Makes a route; ``{repo}`` in the pattern is a repository's id."""
    compiled = re.compile(pattern.replace("{repo}", _ID))
    return Route(name, tuple(methods.split()), compiled, answer, write, open_)


class Exchange(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    hub: _Hub
    routes: tuple[Route, ...]
    # Of the request that is being answered.
    repo: Repo | None
    parts: Mapping[str, str]
    query: Mapping[str, list[str]]
    user: str | None

    def setup(self) -> None:
        """Lets the Hub know of the connection."""
        super().setup()
        self.hub.track(self.connection, is_open=True)

    def finish(self) -> None:
        """Lets the Hub forget the connection."""
        self.hub.track(self.connection, is_open=False)
        super().finish()

    def log_message(self, *_: object) -> None:
        """Logs nothing; see `LocalHub.requests`."""

    def do_GET(self) -> None:
        """Answers."""
        self._dispatch()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _dispatch(self) -> None:
        url = urlsplit(self.path)
        authorization = self.headers.get("Authorization")
        self.hub.record(HubRequest(self.command, self.path, self.headers.get("Range"), authorization))
        # Matched before unquoting: a revision such as refs/pr/1 comes with its slashes quoted.
        found = ((one, one.pattern.fullmatch(url.path)) for one in self.routes if self.command in one.methods)
        for chosen, match in found:
            if match is not None:
                self.parts = {name: unquote(value or "") for name, value in match.groupdict().items()}
                self.query = parse_qs(url.query)
                self.repo = self.hub.store.find(self.parts.get("repo", ""))
                self._answer(chosen, authorization)
                return
        self.body()
        self.error(HTTPStatus.NOT_FOUND, None, f"no such route: {self.command} {url.path}")

    def _answer(self, chosen: Route, authorization: str | None) -> None:
        fault = self.hub.faults.of_next(chosen.name)
        if self.hub.pause(chosen.name):
            fault = "cut"
        if fault == "cut":
            self.close_connection = True
            return
        self.user = self.hub.user(authorization)
        if isinstance(fault, int):
            self.body()
            self.error(HTTPStatus(fault), None, "a fault that was asked for")
        elif self._is_allowed(chosen, authorization):
            if fault == "lost":
                # Carried out, but the answer is lost.
                self.wfile = _Nowhere()  # type: ignore[assignment]
                self.close_connection = True
            chosen.answer(self)
        elif chosen.is_write:
            # Read, so that it is not taken for the next request.
            self.body()

    def _is_allowed(self, chosen: Route, authorization: str | None) -> bool:
        if authorization and self.user is None:
            self.error(HTTPStatus.UNAUTHORIZED, None, "Invalid credentials in Authorization header")
            return False
        if chosen.is_write and self.user is None:
            self.error(HTTPStatus.UNAUTHORIZED, None, "Invalid username or password.")
            return False
        # Addresses of the large-file store carry their own permission on the real Hub.
        if chosen.is_open or "repo" not in self.parts:
            return True
        if not self._may_read(authorization):
            return False
        if chosen.is_write and self.repo is not None and not self.hub.may_write(self.user, self.repo.repo_id):
            message = "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request"
            self.error(HTTPStatus.FORBIDDEN, None, message)
            return False
        return True

    def _may_read(self, authorization: str | None) -> bool:
        repo = self.repo
        if repo is None or (repo.private and not authorization):
            # The real Hub answers 401, which hides the existence of private repositories.
            self.error(HTTPStatus.UNAUTHORIZED, "RepoNotFound", "Repository not found")
            return False
        if repo.gated and not authorization and "/api/" not in self.path:
            self.error(HTTPStatus.UNAUTHORIZED, "GatedRepo", f"Access to model {repo.repo_id} is restricted")
            return False
        return True

    def commit(self) -> Commit | None:
        """Returns the commit that the path names; None after answering an error."""
        revision = self.parts.get("rev") or "main"
        commit = self.repo.find(revision) if self.repo is not None else None
        if commit is None:
            self.error(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def body(self) -> bytes | None:
        """Returns the request's body; None if the connection broke."""
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            return self._chunks()
        length = int(self.headers.get("Content-Length") or 0)
        if length > _MAX_BODY_BYTES:
            self.close_connection = True
            return None
        try:
            content = self.rfile.read(length)
        except OSError:
            content = b""
        if len(content) < length:
            self.close_connection = True
            return None
        return content

    def _chunks(self) -> bytes | None:
        content = bytearray()
        try:
            while size := int(self.rfile.readline(64).split(b";")[0], 16):
                piece = self.rfile.read(size)
                if len(piece) < size or len(content) + size > _MAX_BODY_BYTES:
                    raise ValueError("cut or too long")
                content += piece
                self.rfile.readline(64)
            self.rfile.readline(64)
        except (OSError, ValueError):
            self.close_connection = True
            return None
        return bytes(content)

    def json_body(self) -> dict[str, Any] | None:
        """Returns the JSON object that was sent; None after answering an error."""
        content = self.body()
        try:
            value = json.loads(content or b"{}")
        except ValueError:
            value = None
        if content is None or not isinstance(value, dict):
            self.error(HTTPStatus.BAD_REQUEST, None, "the body is not a JSON object")
            return None
        return value

    def json(self, value: object, status: HTTPStatus = HTTPStatus.OK) -> None:
        """Answers with JSON."""
        self.send(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def error(
        self, status: HTTPStatus, code: str | None, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answers with an error as the real Hub does."""
        errors = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}
        self.send(status, {"Content-Type": "application/json", **errors}, json.dumps({"error": message}).encode())

    def send(self, status: HTTPStatus, headers: Mapping[str, str], body: bytes) -> None:
        """Answers."""
        self.start(status, headers, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def start(self, status: HTTPStatus, headers: Mapping[str, str], num_bytes: int) -> None:
        """Sends the head of an answer."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(num_bytes))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


class _Nowhere:
    """Discards what is written."""

    closed = False

    def write(self, data: bytes) -> int:
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
