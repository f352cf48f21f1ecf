"""An HTTP endpoint for Prometheus, next to a server."""

from __future__ import annotations

from types import TracebackType

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from swarm_plugins.errors import ConfigError


class Endpoint:
    """Serves the metrics of a registry over HTTP, for the length of a ``with`` block, from a thread of its own.

    Args:
        host: Address to listen on. The endpoint has no password: anyone who can connect can read it.
        port: Port. 0: any free one.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.registry = CollectorRegistry()
        """What is served: memory and processor time of this process, and the collectors that are registered."""

    @property
    def url(self) -> str:
        """Where the metrics are."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def __enter__(self) -> Endpoint:
        """Starts to listen.

        Raises:
            ConfigError: If host and port cannot be used.
        """
        try:
            self._server, self._thread = start_http_server(self.port, self.host, registry=self.registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on port {self.port} of {self.host}: {error.strerror or error}; "
                "give another --metrics-port (0: any free one) or --metrics-host"
            ) from error
        self.port = self._server.server_port
        ProcessCollector(registry=self.registry)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
