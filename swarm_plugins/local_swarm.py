"""A swarm of real ``swarm serve`` processes on this machine, for notebooks, demos and tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from swarm_plugins.errors import ConfigError, TransportError

_OPTIONS = (
    "activation_bytes",
    "adapter",
    "adapter_bytes",
    "announce_every_s",
    "announce_maddrs",
    "device",
    "drain_s",
    "dtype",
    "host_maddrs",
    "kv_bytes",
    "log_format",
    "log_level",
    "max_batch_tokens",
    "max_peer_kv_share",
    "max_peer_share",
    "max_session_tokens",
    "offload",
    "quantization",
    "request_bytes",
    "revision",
    "run_bytes",
    "threads",
)
"""Options of ``swarm serve`` that make sense for a local swarm."""
_STOP_TIMEOUT_S = 15.0
_LOG_TAIL_LINES = 15
_POLL_S = 0.02


class _Event(msgspec.Struct):
    """A line of a server's standard output."""

    event: str
    peer_id: str = ""
    addresses: tuple[str, ...] = ()
    start: int = 0
    end: int = 0


class LocalServer:
    """One server process, started by [`LocalSwarm`][swarm_plugins.LocalSwarm]; its standard error goes to a file."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log_path: Path) -> None:
        self._log_path = log_path
        self._line = b""
        self._events: dict[str, _Event] = {}
        with log_path.open("ab") as log:
            # A session of its own: Ctrl-C in a terminal reaches only the parent, which then ends its servers in order.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
                bufsize=0,
            )
        if self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)

    @property
    def pid(self) -> int:
        """Process id of the server; its libp2p daemon is a child of it."""
        return self._process.pid

    @property
    def span(self) -> tuple[int, int]:
        """First block served, and one past the last."""
        if "ready" not in self._events:
            raise ConfigError("this server is not serving yet: start the swarm first")
        return (self._events["ready"].start, self._events["ready"].end)

    @property
    def peer_id(self) -> str:
        """Base58 id of the peer."""
        if "joined" not in self._events:
            raise ConfigError("this server has not joined yet: start the swarm first")
        return self._events["joined"].peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses that reach it; none before it has joined."""
        return self._events["joined"].addresses if "joined" in self._events else ()

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """The server's warnings, errors and progress so far."""
        with contextlib.suppress(OSError):
            return self._log_path.read_text(errors="replace")
        return ""

    def kill(self) -> None:
        """Ends the process at once, without telling the swarm, as a crash would."""
        self._process.kill()
        self._wait(_STOP_TIMEOUT_S)

    def terminate(self, *, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Lets the process leave the swarm; kills it if that takes longer than ``timeout_s``."""
        self.ask_to_end()
        self._wait(timeout_s)

    def ask_to_end(self) -> None:
        """Asks the process to leave the swarm, without waiting."""
        if self.is_alive:
            self._process.send_signal(signal.SIGTERM)

    def _wait(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def tell_peers(self, addresses: Sequence[str]) -> None:
        """Sends the addresses to join by, which the process waits for."""
        if self._process.stdin is not None:
            # The caller waits for events next, and finds out there if the process has died.
            with contextlib.suppress(OSError):
                self._process.stdin.write(msgspec.json.encode(list(addresses)) + b"\n")

    def listen(self) -> None:
        """Reads new events, without waiting."""
        pipe = self._process.stdout
        if pipe is None or pipe.closed:
            return
        while chunk := pipe.read(4096):
            *lines, self._line = (self._line + chunk).split(b"\n")
            for line in lines:
                event = msgspec.json.decode(line, type=_Event)
                self._events[event.event] = event

    def has_reached(self, event: str) -> bool:
        """Returns whether it has ``joined``, so that others can join by its addresses, or is ``ready`` to serve."""
        return event in self._events


class LocalSwarm:
    """A swarm of server processes on this machine, for the length of a ``with`` block.

    The servers end with this process, however it ends.

    Args:
        model: Directory of a model, or its id on the Hub.
        num_servers: Servers that share the blocks evenly.
        spans: ``(start, end)`` for each server, instead of even shares.
        num_blocks: Blocks of each server, which chooses them itself and moves when that helps. None: fixed spans.
        replicas: Servers for each span.
        experts: ``--experts`` of each span's servers, such as ``["remote", "0:4", "4:8"]``. None: whole blocks.
        slices: ``--slice`` of each span's servers, None for whole experts.
        dtype: Compute dtype: ``float32``, ``bfloat16`` or ``float16``. None: the checkpoint's.
        threads: CPU threads of each server.
        start_timeout_s: How long all servers together may take to start.
        serve_options: Other options of ``swarm serve``, such as ``kv_bytes="256MB"`` or ``quantization="int8"``.

    Raises:
        ConfigError: If a setting is wrong.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        num_servers: int = 2,
        spans: Sequence[tuple[int, int]] | None = None,
        num_blocks: int | None = None,
        replicas: int = 1,
        experts: Sequence[str | None] | None = None,
        slices: Sequence[str | None] | None = None,
        dtype: object = None,
        threads: int | None = 1,
        start_timeout_s: float = 300.0,
        **serve_options: object,
    ) -> None:
        if num_servers < 1 or replicas < 1:
            raise ConfigError(f"num_servers and replicas must be at least 1, got {num_servers} and {replicas}")
        unknown = sorted(set(serve_options) - set(_OPTIONS))
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r} of a local swarm; known: {', '.join(_OPTIONS)}")
        self.model = str(Path(model).expanduser().resolve()) if Path(model).expanduser().is_dir() else str(model)
        parts = [f"{index}/{num_servers}" for index in range(1, num_servers + 1)]
        self._blocks = [f"{start}:{end}" for start, end in spans] if spans is not None else parts
        if num_blocks is not None and spans is not None:
            raise ConfigError(f"num_blocks {num_blocks} and spans are given: servers choose their blocks, or you do")
        self._num_blocks = num_blocks
        if not self._blocks:
            raise ConfigError("spans is empty: give at least one (start, end)")
        self._shares = {"experts": experts, "slice": slices}
        for name, values in self._shares.items():
            if values is not None and len(values) != len(self._blocks):
                raise ConfigError(f"{name} has {len(values)} entries for {len(self._blocks)} spans: give one for each")
        self._replicas = replicas
        self._threads = threads
        # str() of a torch.dtype, so that torch itself need not be loaded here.
        self._options = serve_options | ({} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")})
        self._start_timeout_s = start_timeout_s
        self._directory: Path | None = None
        self._servers: list[LocalServer] = []

    @property
    def servers(self) -> tuple[LocalServer, ...]:
        """The servers in order of their spans; replicas of a span are adjacent."""
        return tuple(self._servers)

    @property
    def num_servers(self) -> int:
        """Number of servers, also of those that do not run yet."""
        return len(self._blocks) * self._replicas

    @property
    def folder(self) -> Path:
        """Folder of identities and logs, removed when the swarm is closed."""
        if self._directory is None:
            raise ConfigError("this swarm is not running: start it first")
        return self._directory

    @property
    def initial_peers(self) -> list[str]:
        """Addresses of all live servers, to join the swarm by."""
        return [address for server in self._servers if server.is_alive for address in server.addresses]

    def start(self) -> LocalSwarm:
        """Starts the servers and waits until all serve.

        Raises:
            TransportError: If a server ends or is not ready in time; the message quotes the end of its log.
        """
        if self._servers:
            raise ConfigError("this swarm is already running: close it first")
        self._directory = Path(tempfile.mkdtemp(prefix="swarm-local-"))
        deadline = time.monotonic() + self._start_timeout_s
        try:
            for index in range(self.num_servers):
                self._servers.append(self._spawn(index, {}))
            first, *others = self._servers
            first.tell_peers([])
            self._wait_for([first], "joined", deadline)
            for server in others:
                server.tell_peers(first.addresses)
            self._wait_for(self._servers, "ready", deadline)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Ends all servers. Idempotent."""
        for server in self._servers:
            server.ask_to_end()
        for server in self._servers:
            server.terminate()
        self._servers = []
        directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    def __enter__(self) -> LocalSwarm:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def restart(self, index: int, *, model: str | os.PathLike[str] | None = None) -> None:
        """Ends a server at once and starts it again, with its identity, ports and blocks; waits until it serves.

        Args:
            index: The server.
            model: Directory of another model to serve. None: this swarm's.

        Raises:
            TransportError: If it ends or is not ready in time; the message quotes the end of its log.
        """
        self._replace(index, {}, model=model)

    def _replace(
        self,
        index: int,
        options: Mapping[str, object],
        *,
        model: str | os.PathLike[str] | None = None,
        module: str = "swarm_plugins",
    ) -> None:
        """Ends a server at once and starts one in its place, with the same ports and further options."""
        if not self._servers:
            raise ConfigError("this swarm is not running: start it first")
        old = self._servers[index]
        old.kill()
        ports = [address.partition("/p2p/")[0] for address in old.addresses]
        same = {} if "host_maddrs" in self._options else {"host_maddrs": ports}
        new = self._servers[index] = self._spawn(index, {**same, **options}, model=model, module=module)
        new.tell_peers(self.initial_peers)
        self._wait_for([new], "ready", time.monotonic() + self._start_timeout_s)

    def _spawn(
        self,
        index: int,
        options: Mapping[str, object],
        *,
        model: str | os.PathLike[str] | None = None,
        module: str = "swarm_plugins",
    ) -> LocalServer:
        """Starts ``swarm serve``, or the same command of another module."""
        name = self.model if model is None else str(Path(model).expanduser().resolve())
        span = index // self._replicas
        by_number = self._num_blocks is not None
        chosen = ["--num-blocks", str(self._num_blocks)] if by_number else ["--blocks", self._blocks[span]]
        command = [sys.executable, "-m", module, "serve", name, "--embedded", *chosen]
        if self._threads is not None:
            command += ["--threads", str(self._threads)]
        shares = {share: values[span] for share, values in self._shares.items() if values and values[span] is not None}
        identity = self.folder / f"server-{index}.key"
        for option, value in {"identity": identity, **self._options, **options, **shares}.items():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                command += [f"--{option.replace('_', '-')}", str(item)]
        return LocalServer(command, _environment(self._threads), self.folder / f"server-{index}.log")

    def _wait_for(self, servers: Sequence[LocalServer], event: str, deadline: float) -> None:
        while True:
            for server in self._servers:
                server.listen()
            late = next((server for server in servers if not server.has_reached(event)), None)
            if late is None:
                return
            dead = next((server for server in servers if not server.is_alive), None)
            if dead is not None:
                raise TransportError(f"a local server ended before it served (pid {dead.pid}){_end_of_log(dead)}")
            if time.monotonic() > deadline:
                raise TransportError(
                    f"a local server (pid {late.pid}) did not serve within {self._start_timeout_s:g} s: "
                    f"raise start_timeout_s, or see why{_end_of_log(late)}"
                )
            time.sleep(_POLL_S)


def _environment(threads: int | None) -> dict[str, str]:
    environment = dict(os.environ)
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    # The package may have been found through sys.path alone, which a child does not inherit.
    home = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(part for part in (home, environment.get("PYTHONPATH", "")) if part)
    return environment


def _end_of_log(server: LocalServer) -> str:
    lines = [line for line in server.log.replace("\r", "\n").splitlines() if line.strip()]
    return ":\n" + "\n".join(lines[-_LOG_TAIL_LINES:]) if lines else "; its log is empty"
