"""A Hub of one's own, on this machine: enough of its protocol for huggingface_hub to read from it.

```python
with LocalHub() as hub:
    sha = hub.add("alice/tiny", directory)
    checkpoint = Checkpoint.open("alice/tiny", endpoint=hub.endpoint, cache_dir=cache)
    hub.bytes_served("alice/tiny", "model.safetensors")  # what was really downloaded
```

Other libraries take the address from ``HF_ENDPOINT``, which huggingface_hub reads when it is imported: set it for a
new process. Large files are redirected to a second address, as the real Hub does.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from swarm_plugins.errors import ConfigError
from swarm_plugins.testing.hub_store import Blob, Commit, HubStore, Repo

__all__ = ["HubFaults", "HubRequest", "LocalHub"]

_CHUNK_BYTES = 64 << 10
_IDLE_S = 30.0
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(slots=True)
class HubFaults:
    """What goes wrong with the next downloads."""

    statuses: list[int] = field(default_factory=list)
    """Answers given instead of the next files, one each."""
    cut_after_bytes: list[int] = field(default_factory=list)
    """The connections of the next files break after so many bytes, one each."""
    ignore_ranges: bool = False
    """Send whole files whatever is asked."""


@dataclass(frozen=True, slots=True)
class HubRequest:
    """One request that came in."""

    method: str
    path: str
    range: str | None
    authorization: str | None


class LocalHub:
    """A server on a free port of the loopback interface; it runs from ``start`` to ``close``, or in ``with``."""

    def __init__(self) -> None:
        self.store = HubStore()
        self.faults = HubFaults()
        self.requests: list[HubRequest] = []
        self.connections: set[socket.socket] = set()
        self._served: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> LocalHub:
        """Starts to serve."""
        handler = type("_BoundHandler", (_Handler,), {"hub": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="local-hub")
        self._thread.start()
        return self

    def close(self) -> None:
        """Stops to serve and waits for running answers. Idempotent."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        server.shutdown()
        with self._lock:
            for connection in self.connections:
                connection.shutdown(socket.SHUT_RDWR)
        server.server_close()
        self._thread.join()

    def __enter__(self) -> LocalHub:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """The address, for ``endpoint=`` or ``HF_ENDPOINT``."""
        if self._server is None:
            raise ConfigError("the local Hub is not running: call start() or use it in a with block")
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(
        self,
        repo_id: str,
        files: str | Path | Mapping[str, bytes],
        *,
        branch: str = "main",
        gated: bool = False,
        private: bool = False,
    ) -> str:
        """Commits files, making the repository if need be.

        Args:
            repo_id: Such as ``alice/tiny``.
            files: A directory, whose files are served from where they are, or contents by path.
            branch: Branch to commit to.
            gated: Whether a new repository is served only to requests with a token.
            private: Whether a new repository does not exist for requests without a token.

        Returns:
            The commit's hash.
        """
        repo = self.store.find(repo_id) or self.store.create(repo_id, gated=gated, private=private)
        contents: Mapping[str, bytes | Path]
        if isinstance(files, Mapping):
            contents = files
        else:
            root = Path(files)
            contents = {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}
        return self.store.commit(repo, {path: Blob.of(content) for path, content in contents.items()}, branch=branch)

    def bytes_served(self, repo_id: str, path: str | None = None) -> int:
        """Returns how many bytes of a file's content went out, or of all files of a repository."""
        with self._lock:
            return sum(
                count
                for (repo, file), count in self._served.items()
                if repo == repo_id and (path is None or path == file)
            )

    def forget(self) -> None:
        """Sets the counters back to zero."""
        with self._lock:
            self._served.clear()
            self.requests.clear()

    def record(self, request: HubRequest) -> None:
        """Notes a request."""
        with self._lock:
            self.requests.append(request)

    def count(self, repo_id: str, path: str, num_bytes: int) -> None:
        """Notes bytes of a file that went out."""
        with self._lock:
            self._served[repo_id, path] += num_bytes

    def track(self, connection: socket.socket, *, is_open: bool) -> None:
        """Notes a connection, so that `close` can end it."""
        with self._lock:
            (self.connections.add if is_open else self.connections.discard)(connection)


class _Server(ThreadingHTTPServer):
    # close() waits for the threads of connections; it ends the connections first.
    daemon_threads = False


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    hub: LocalHub

    def setup(self) -> None:
        super().setup()
        self.hub.track(self.connection, is_open=True)

    def finish(self) -> None:
        self.hub.track(self.connection, is_open=False)
        super().finish()

    def log_message(self, *_: object) -> None:
        """Keeps quiet; `LocalHub.requests` has it all."""

    def do_GET(self) -> None:
        self._dispatch()

    def do_HEAD(self) -> None:
        self._dispatch()

    def _dispatch(self) -> None:
        url = urlsplit(self.path)
        authorization = self.headers.get("Authorization")
        self.hub.record(HubRequest(self.command, self.path, self.headers.get("Range"), authorization))
        for pattern, answer in _ROUTES:
            # Matched before unquoting: a revision such as refs/pr/1 comes with its slashes quoted.
            match = pattern.fullmatch(url.path)
            if match:
                parts = {name: unquote(value or "") for name, value in match.groupdict().items()}
                repo = self.hub.store.find(parts.get("repo", ""))
                # Addresses of the large-file store carry their own permission on the real Hub.
                is_open = answer is _Handler.cdn or "repo" not in parts
                if not is_open and not self._may_read(repo, authorization):
                    return
                answer(self, repo, parts, parse_qs(url.query))
                return
        self._error(HTTPStatus.NOT_FOUND, None, f"no such route: {self.command} {url.path}")

    def _may_read(self, repo: Repo | None, authorization: str | None) -> bool:
        if repo is None or (repo.private and not authorization):
            # The real one says 401 to strangers, lest it tell which private repositories exist.
            self._error(HTTPStatus.UNAUTHORIZED, "RepoNotFound", "Repository not found")
            return False
        if repo.gated and not authorization and "/api/" not in self.path:
            self._error(HTTPStatus.UNAUTHORIZED, "GatedRepo", f"Access to model {repo.repo_id} is restricted")
            return False
        return True

    def list_models(self, _: Repo | None, __: Mapping[str, str], query: Mapping[str, list[str]]) -> None:
        """``GET /api/models``."""
        wanted = query.get("search", [""])[0]
        repos = [repo for repo in self.hub.store.repos() if wanted in repo.repo_id and not repo.private]
        self._json([{"id": repo.repo_id, "modelId": repo.repo_id, "tags": []} for repo in repos])

    def model_info(self, repo: Repo | None, parts: Mapping[str, str], _: object) -> None:
        """``GET /api/models/ID[/revision/REV]``."""
        commit = self._commit(repo, parts)
        if repo is None or commit is None:
            return
        self._json(
            {
                "id": repo.repo_id,
                "modelId": repo.repo_id,
                "sha": commit.sha,
                "private": repo.private,
                "gated": "manual" if repo.gated else False,
                "tags": [],
                "siblings": [{"rfilename": path} for path in sorted(commit.files)],
            }
        )

    def tree(self, repo: Repo | None, parts: Mapping[str, str], _: object) -> None:
        """``GET /api/models/ID/tree/REV[/FOLDER]``."""
        commit = self._commit(repo, parts)
        if commit is None:
            return
        folder = f"{parts['path']}/" if parts.get("path") else ""
        self._json([_entry(path, blob) for path, blob in sorted(commit.files.items()) if path.startswith(folder)])

    def refs(self, repo: Repo | None, _: Mapping[str, str], __: object) -> None:
        """``GET /api/models/ID/refs``."""
        if repo is not None:
            self._json(
                {
                    "branches": [_ref("heads", name, sha) for name, sha in repo.branches.items()],
                    "tags": [_ref("tags", name, sha) for name, sha in repo.tags.items()],
                    "converts": [],
                }
            )

    def resolve(self, repo: Repo | None, parts: Mapping[str, str], _: object) -> None:
        """``GET|HEAD /ID/resolve/REV/PATH``."""
        commit = self._commit(repo, parts)
        if repo is None or commit is None:
            return
        blob = commit.files.get(parts["path"])
        if blob is None:
            self._error(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit.sha})
            return
        headers = {"X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes", "ETag": f'"{blob.sha256}"'}
        if not self.hub.store.is_large(parts["path"], blob):
            self._send_file(repo, parts["path"], blob, headers)
            return
        # Another host name, as on the real Hub: clients must not send their token there.
        cdn = self.hub.endpoint.replace("127.0.0.1", "localhost") + "/cdn"
        headers |= {
            "X-Linked-Size": str(blob.size),
            "X-Linked-ETag": f'"{blob.sha256}"',
            "Location": f"{cdn}/{quote(repo.repo_id)}/{commit.sha}/{quote(parts['path'])}",
        }
        self._send(HTTPStatus.FOUND, headers, b"")

    def cdn(self, repo: Repo | None, parts: Mapping[str, str], _: object) -> None:
        """``GET|HEAD /cdn/ID/SHA/PATH``: where large files are redirected to."""
        commit = self._commit(repo, parts)
        if repo is not None and commit is not None:
            self._send_file(repo, parts["path"], commit.files[parts["path"]], {"Accept-Ranges": "bytes"})

    def _commit(self, repo: Repo | None, parts: Mapping[str, str]) -> Commit | None:
        revision = parts.get("rev") or "main"
        commit = repo.find(revision) if repo is not None else None
        if commit is None:
            self._error(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def _send_file(self, repo: Repo, path: str, blob: Blob, headers: dict[str, str]) -> None:
        faults = self.hub.faults
        if self.command == "GET" and faults.statuses:
            self._error(HTTPStatus(faults.statuses.pop(0)), None, "a fault that was asked for")
            return
        start, end, status = 0, blob.size, HTTPStatus.OK
        asked = _RANGE.fullmatch(self.headers.get("Range") or "")
        if asked and not faults.ignore_ranges:
            start, end = int(asked[1]), min(int(asked[2]) + 1 if asked[2] else blob.size, blob.size)
            if start >= blob.size:
                self._send(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, {"Content-Range": f"bytes */{blob.size}"}, b"")
                return
            status = HTTPStatus.PARTIAL_CONTENT
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{blob.size}"
        self._start(status, headers, end - start)
        if self.command == "GET":
            self._send_content(repo, path, blob, start, end)

    def _send_content(self, repo: Repo, path: str, blob: Blob, start: int, end: int) -> None:
        faults = self.hub.faults
        cut = start + faults.cut_after_bytes.pop(0) if faults.cut_after_bytes else end
        for position in range(start, min(end, cut), _CHUNK_BYTES):
            data = blob.read(position, min(position + _CHUNK_BYTES, end, cut))
            try:
                self.wfile.write(data)
            except OSError:
                # The client has gone: nothing is owed to it.
                self.close_connection = True
                return
            self.hub.count(repo.repo_id, path, len(data))
        self.close_connection = self.close_connection or cut < end

    def _json(self, value: object) -> None:
        self._send(HTTPStatus.OK, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _error(
        self, status: HTTPStatus, code: str | None, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        errors = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}
        self._send(status, {"Content-Type": "application/json", **errors}, json.dumps({"error": message}).encode())

    def _send(self, status: HTTPStatus, headers: Mapping[str, str], body: bytes) -> None:
        self._start(status, headers, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _start(self, status: HTTPStatus, headers: Mapping[str, str], num_bytes: int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(num_bytes))
        self.end_headers()


def _entry(path: str, blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": blob.sha256[:40], "size": blob.size, "path": path}
    if HubStore.is_large(path, blob):
        entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": 134}
    return entry


def _ref(kind: str, name: str, sha: str) -> dict[str, str]:
    return {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": sha}


_Answer = Callable[[_Handler, Repo | None, Mapping[str, str], Mapping[str, list[str]]], None]
_ID = r"(?P<repo>[^/]+/[^/]+|[^/]+)"
_ROUTES: tuple[tuple[re.Pattern[str], _Answer], ...] = (
    (re.compile(r"/api/models"), _Handler.list_models),
    (re.compile(rf"/api/models/{_ID}/tree/(?P<rev>[^/]+)(?:/(?P<path>.+))?"), _Handler.tree),
    (re.compile(rf"/api/models/{_ID}/refs"), _Handler.refs),
    (re.compile(rf"/api/models/{_ID}/revision/(?P<rev>[^/]+)"), _Handler.model_info),
    (re.compile(rf"/cdn/{_ID}/(?P<rev>[0-9a-f]{{40}})/(?P<path>.+)"), _Handler.cdn),
    (re.compile(rf"/{_ID}/resolve/(?P<rev>[^/]+)/(?P<path>.+)"), _Handler.resolve),
    (re.compile(rf"/api/models/{_ID}"), _Handler.model_info),
)
