"""One connection to the local Hub: routing, permissions, injected faults, answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from swarm_plugins.errors import one_line, printable
from swarm_plugins.local_hub.repositories import Commit, Repo
from swarm_plugins.local_hub.state import HubRequest, HubState

_IDLE_S = 30.0
_MAX_BODY_BYTES = 4 << 30
_ID = r"(?P<repo>[^/]+/[^/]+|[^/]+)"


class Refusal(Exception):  # an answer, not a fault of the Hub
    """Ends a request with an error answer, as the real Hub gives it."""

    def __init__(
        self, status: HTTPStatus, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        # The message may quote a request or a file, but a header is one line of Latin-1.
        header = printable(message).encode("latin-1", "replace").decode("latin-1")
        self.headers = {"X-Error-Message": header, **({"X-Error-Code": code} if code else {}), **(headers or {})}


def unknown_revision(revision: object) -> Refusal:
    """Returns the refusal of a revision that does not exist."""
    return Refusal(HTTPStatus.NOT_FOUND, f"Invalid rev id: {revision}", code="RevisionNotFound")


@dataclass(frozen=True, slots=True)
class Route:
    """Answers requests by method and path."""

    name: str
    methods: str
    """Separated by spaces."""
    pattern: str
    """Regular expression of the path; ``{repo}`` matches a repository's id."""
    answer: Callable[[Exchange], None]
    is_write: bool = False
    """Whether it needs a token that may write."""
    is_open: bool = False
    """Whether it skips the repository's permissions."""

    def match(self, method: str, path: str) -> re.Match[str] | None:
        """Returns the match of a request; None if it belongs to another route."""
        return re.fullmatch(self.pattern.replace("{repo}", _ID), path) if method in self.methods.split() else None


class Exchange(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    hub: HubState
    routes: tuple[Route, ...]
    # Of the current request.
    parts: Mapping[str, str]
    query: Mapping[str, list[str]]
    user: str | None
    content: bytes
    is_answered: bool

    def setup(self) -> None:
        super().setup()
        self.hub.track(self.connection)

    def finish(self) -> None:
        self.hub.untrack(self.connection)
        super().finish()

    def log_message(self, *_: object) -> None:
        """Logs nothing; see `LocalHub.requests`."""

    def do_GET(self) -> None:
        """Answers a request of any method."""
        url = urlsplit(self.path)
        authorization = self.headers.get("Authorization")
        self.hub.record(HubRequest(self.command, self.path, self.headers.get("Range"), authorization))
        # Matched before unquoting: a revision such as refs/pr/1 comes with its slashes quoted.
        matches = ((route, route.match(self.command, url.path)) for route in self.routes)
        chosen, match = next(((route, match) for route, match in matches if match is not None), (None, None))
        groups = match.groupdict() if match is not None else {}
        self.parts = {name: unquote(value or "") for name, value in groups.items()}
        self.query = parse_qs(url.query)
        fault = self.hub.faults.of_next(chosen.name) if chosen is not None else "ok"
        is_closed = chosen is not None and self.hub.pause(chosen.name)
        # The body is read even for a refusal, or it would be taken for the next request.
        content = None if is_closed or fault == "cut" else self._body()
        if content is None:
            self.close_connection = True
            return
        self.content, self.is_answered = content, False
        try:
            if chosen is None:
                raise Refusal(HTTPStatus.NOT_FOUND, f"no such route: {self.command} {url.path}")
            self._answer(chosen, authorization, fault)
        except Refusal as refusal:
            self._refuse(refusal)
        except Exception as exc:
            # Whatever one repository holds must not cut clients off from the others.
            if self.is_answered:
                raise
            self._refuse(Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, one_line(exc, with_kind=True)))

    def _refuse(self, refusal: Refusal) -> None:
        self.json({"error": str(refusal)}, refusal.status, refusal.headers)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _answer(self, route: Route, authorization: str | None, fault: int | str) -> None:
        if isinstance(fault, int):
            raise Refusal(HTTPStatus(fault), "injected fault")
        self.user = self.hub.user(authorization)
        if authorization and self.user is None:
            raise Refusal(HTTPStatus.UNAUTHORIZED, "Invalid credentials in Authorization header")
        if route.is_write and self.user is None:
            raise Refusal(HTTPStatus.UNAUTHORIZED, "Invalid username or password.")
        # Addresses of the large-file store carry their own permission on the real Hub.
        if "repo" in self.parts and not route.is_open:
            self._check_access(route, authorization)
        if fault == "lost":
            self.wfile = _Nowhere()  # type: ignore[assignment]
            self.close_connection = True
        route.answer(self)

    def _check_access(self, route: Route, authorization: str | None) -> None:
        repo = self.repo
        if repo.private and not authorization:
            raise _unknown_repo()
        if repo.gated and not authorization and "/api/" not in self.path:
            message = f"Access to model {repo.repo_id} is restricted"
            raise Refusal(HTTPStatus.UNAUTHORIZED, message, code="GatedRepo")
        if route.is_write and not self.hub.may_write(self.user, repo.repo_id):
            message = "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request"
            raise Refusal(HTTPStatus.FORBIDDEN, message)

    @property
    def repo(self) -> Repo:
        repo = self.hub.store.find(self.parts["repo"])
        if repo is None:
            raise _unknown_repo()
        return repo

    @property
    def commit(self) -> Commit:
        revision = self.parts.get("rev") or "main"
        commit = self.repo.find(revision)
        if commit is None:
            raise unknown_revision(revision)
        return commit

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.connection.getsockname()[1]}"

    def _body(self) -> bytes | None:
        """Returns the request's body; None if it is too long or of unknown length, or the connection broke."""
        if "Transfer-Encoding" in self.headers:  # the libraries of Hugging Face tell the length
            return None
        try:
            length = int(self.headers.get("Content-Length") or 0)
            content = self.rfile.read(length) if length <= _MAX_BODY_BYTES else b""
        except (OSError, ValueError):
            return None
        return content if len(content) == length else None

    def json_body(self) -> dict[str, Any]:
        try:
            value = json.loads(self.content or b"{}")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise Refusal(HTTPStatus.BAD_REQUEST, "the body is not a JSON object")
        return value

    def json(self, value: object, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> None:
        self.send(status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode())

    def send(self, status: HTTPStatus, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Answers; only the head if the request is HEAD."""
        self.start(status, headers, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def start(self, status: HTTPStatus, headers: Mapping[str, str], num_bytes: int) -> None:
        self.is_answered = True
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(num_bytes))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


def _unknown_repo() -> Refusal:
    # The real Hub answers 401, which hides the existence of private repositories.
    return Refusal(HTTPStatus.UNAUTHORIZED, "Repository not found", code="RepoNotFound")


class _Nowhere:
    """Discards an answer that is to be lost."""

    closed = False

    def write(self, data: bytes) -> int:
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
