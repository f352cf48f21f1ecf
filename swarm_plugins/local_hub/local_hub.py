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
from collections.abc import Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path

from swarm_plugins.errors import ConfigError
from swarm_plugins.local_hub.exchange import Exchange
from swarm_plugins.local_hub.read_routes import READ_ROUTES
from swarm_plugins.local_hub.repositories import Blob
from swarm_plugins.local_hub.state import HubState
from swarm_plugins.local_hub.write_routes import WRITE_ROUTES

_CLOSE_S = 5.0


class LocalHub(HubState):
    """A server on the loopback interface; runs from ``start`` to ``close``, or in ``with``.

    ``requests`` lists what was asked, the last 10,000; ``faults`` breaks what comes next.

    Args:
        root: Folder that keeps what is pushed. None: in memory.
        port: Its port; 0 for a free one.
        tokens: Users by token, each of whom may write to repositories under their own name. None: any token may write
            everywhere.
    """

    def __init__(
        self, root: str | Path | None = None, *, port: int = 0, tokens: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(root, tokens)
        self.port = port
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
            self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
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
            handlers = list(self.connections.values())
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
        """Commits files; creates the repository if needed.

        Args:
            repo_id: Such as ``alice/tiny``.
            files: A directory, whose files are served from where they are, or contents by path.
            branch: Branch to commit to.
            gated: Whether files of a new repository are served only to requests with a token.
            private: Whether a new repository is hidden from requests without a token.

        Returns:
            The commit's hash.
        """
        repo = self.store.find(repo_id) or self.store.create(repo_id, gated=gated, private=private)
        if isinstance(files, Mapping):
            blobs = {path: self.store.put(content) for path, content in files.items()}
        else:
            root = Path(files)
            found = (path for path in sorted(root.rglob("*")) if path.is_file())
            blobs = {str(path.relative_to(root)): Blob.of(path) for path in found}
        return self.store.commit(repo, blobs, branch=branch)

    def bytes_served(self, repo_id: str, path: str | None = None) -> int:
        """Returns the bytes sent of a file's content, or of all files of a repository."""
        with self._lock:
            served = self._served.items()
            return sum(num for (repo, file), num in served if repo == repo_id and path in (None, file))

    def forget(self) -> None:
        """Clears counters and recorded requests."""
        with self._lock:
            self._served.clear()
            self.requests.clear()
