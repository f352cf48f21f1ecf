"""A Hub on this machine: enough of the protocol for huggingface_hub to read from it and push to it.

```python
with LocalHub() as hub:
    sha = hub.add("alice/tiny", directory)
    checkpoint = Checkpoint.open("alice/tiny", endpoint=hub.endpoint, cache_dir=cache)
    hub.bytes_served("alice/tiny", "model.safetensors")  # what was really downloaded

    HfApi(endpoint=hub.endpoint, token="any").create_repo("alice/my-adapter")  # any token may write
    hub.faults.routes["commit"] = [412, "cut", "lost"]  # what becomes of the next three commits
```

Other libraries take the address from ``HF_ENDPOINT``, which huggingface_hub reads when it is imported: set it for a
new process, and ``HF_HUB_DISABLE_XET=1`` with it. Large files are redirected to a second address, as the real Hub does.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path

from swarm_plugins.errors import ConfigError
from swarm_plugins.local_hub.exchange import Exchange, HubFaults, HubRequest
from swarm_plugins.local_hub.read_routes import READ_ROUTES
from swarm_plugins.local_hub.repositories import Blob, HubStore
from swarm_plugins.local_hub.write_routes import WRITE_ROUTES

_ANYBODY = "user"
_CLOSE_S = 5.0


class LocalHub:
    """A server on the loopback interface; it runs from ``start`` to ``close``, or in ``with``.

    Args:
        root: Folder that keeps what is pushed. None: in memory.
        port: Its port; 0 for a free one.
        tokens: Users by token, each of whom may write to repositories under their own name. None: every token is good
            for everything.
    """

    def __init__(
        self, root: str | Path | None = None, *, port: int = 0, tokens: Mapping[str, str] | None = None
    ) -> None:
        self.root = root
        self.port = port
        self.tokens = tokens
        self.store = HubStore(root)
        self.faults = HubFaults()
        self.requests: list[HubRequest] = []
        self.connections: set[socket.socket] = set()
        self._handlers: set[threading.Thread] = set()
        self._served: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> LocalHub:
        """Starts the server.

        Raises:
            ConfigError: If the port is taken.
        """
        handler = type("_BoundExchange", (Exchange,), {"hub": self, "routes": (*WRITE_ROUTES, *READ_ROUTES)})
        self._closing.clear()
        try:
            self._server = _Server(("127.0.0.1", self.port), handler)
        except OSError as exc:
            raise ConfigError(
                f"port {self.port} of 127.0.0.1 cannot be used ({exc.strerror or exc}); take port 0 for a free one"
            ) from exc
        # A daemon, so that a Hub left open cannot keep the program alive.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="local-hub", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stops the server and waits for running answers. Idempotent."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        self._closing.set()
        server.shutdown()
        with self._lock:
            for connection in self.connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            handlers = list(self._handlers)
        server.server_close()
        for thread in (self._thread, *handlers):
            thread.join(_CLOSE_S)

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
        blobs = {
            path: self.store.put(content) if isinstance(content, bytes) else Blob.of(content)
            for path, content in contents.items()
        }
        return self.store.commit(repo, blobs, branch=branch)

    def bytes_served(self, repo_id: str, path: str | None = None) -> int:
        """Returns how many bytes of a file's content went out, or of all files of a repository."""
        with self._lock:
            return sum(
                count
                for (repo, file), count in self._served.items()
                if repo == repo_id and (path is None or path == file)
            )

    def forget(self) -> None:
        """Clears counters and recorded requests."""
        with self._lock:
            self._served.clear()
            self.requests.clear()

    def record(self, request: HubRequest) -> None:
        """Notes a request."""
        with self._lock:
            self.requests.append(request)

    def user(self, authorization: str | None) -> str | None:
        """Returns whose token comes with a request."""
        token = (authorization or "").removeprefix("Bearer ").strip()
        if not token:
            return None
        return _ANYBODY if self.tokens is None else self.tokens.get(token)

    def may_write(self, user: str | None, repo_id: str) -> bool:
        """Returns whether a user may change a repository."""
        return user is not None and (self.tokens is None or repo_id.split("/")[0] == user)

    def pause(self, route: str) -> bool:
        """Waits as long as the faults say; True if the Hub was closed during the wait."""
        delay = self.faults.delays_s.get(route, 0.0)
        return delay > 0 and self._closing.wait(delay)

    def count(self, repo_id: str, path: str, num_bytes: int) -> None:
        """Notes bytes of a file that went out."""
        with self._lock:
            self._served[repo_id, path] += num_bytes

    def track(self, connection: socket.socket, *, is_open: bool) -> None:
        """Notes a connection, so that `close` can end it."""
        with self._lock:
            (self.connections.add if is_open else self.connections.discard)(connection)
            (self._handlers.add if is_open else self._handlers.discard)(threading.current_thread())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
