"""A swarm of real ``swarm serve`` processes on this machine."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType

from swarm_plugins.errors import ConfigError, TransportError
from swarm_plugins.local_swarm.lines import Lines, Ports
from swarm_plugins.local_swarm.ports import HeldPorts
from swarm_plugins.local_swarm.server import LocalServer
from swarm_plugins.model_names import expanded
from swarm_plugins.server.config import ServeConfig

_CHOSEN = {
    *("model", "blocks", "part", "num_blocks", "experts", "slice", "remote_experts", "initial_peers", "identity"),
    *("discovery", "allowed_peers", "relays", "auto_relay", "nat_port_map", "points", "adapters"),
}
"""Settings of a server that the swarm chooses itself, or that make no sense on one machine."""
_OPTIONS = sorted(
    {field.name for field in fields(ServeConfig)} - _CHOSEN | {"adapter", "log_format", "log_level", "threads"}
)
_MOST_SERVERS = 64
"""Each is a process with torch in memory; more than that is a slip of the keyboard."""
_POLL_S = 0.02
_SWARM = ("-m", "swarm_plugins")


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
        link: Carries all connections, to add distance or faults. None: they are direct.
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
        link: Lines | None = None,
        start_timeout_s: float = 300.0,
        **serve_options: object,
    ) -> None:
        if not all(type(count) is int and count >= 1 for count in (num_servers, replicas)):
            raise ConfigError(f"num_servers and replicas must be at least 1, got {num_servers!r} and {replicas!r}")
        if link is not None and not isinstance(link, Lines):
            raise ConfigError(
                f"invalid link {link!r}: expected an object with the methods of swarm_plugins.local_swarm.Lines"
            )
        unknown = sorted(set(serve_options) - set(_OPTIONS))
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r} of a local swarm; known: {', '.join(_OPTIONS)}")
        self.model = str(expanded(model).resolve()) if expanded(model).exists() else str(model)
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
        if self.num_servers > _MOST_SERVERS:
            raise ConfigError(f"{self.num_servers} servers are too many for one machine: at most {_MOST_SERVERS}")
        self._link = link
        self._ports: Ports | None = None
        self._held = HeldPorts()
        self._start_timeout_s = start_timeout_s
        self._directory: Path | None = None
        self._servers: list[LocalServer] = []
        self._places: dict[int, list[str]] = {}
        """Where each server listened last: one started in its place may fail before it listens."""

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
            self._ports = None if self._link is None else self._link.start(self.num_servers)
            for index in range(self.num_servers):
                self._servers.append(self._spawn(index, {}))
            for index, server in enumerate(self._servers):
                server.tell_peers(self._ways_to_others(index))
                # Others join by the first. Behind links they call all that were there before, by their own ports.
                if index == 0 or self._ports is not None:
                    self._wait_for([server], "joined", deadline)
            self._wait_for(self._servers, "ready", deadline)
            self._held.hold(self.initial_peers)
            if self._link is not None:
                self._link.shut()
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
        self._servers, self._places = [], {}
        self._held.close()
        self._ports = None
        directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        if self._link is not None:
            self._link.close()

    def __enter__(self) -> LocalSwarm:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def restart(self, index: int, *, model: str | os.PathLike[str] | None = None) -> None:
        """Ends a server at once and starts it again, with its identity, ports and blocks; waits until it serves.

        Args:
            index: The server; negative ones count from the end.
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
        program: Sequence[str] = _SWARM,
    ) -> None:
        """Ends a server at once and starts one in its place, with the same ports and further options."""
        if not self._servers:
            raise ConfigError("this swarm is not running: start it first")
        index = range(len(self._servers))[index]
        old = self._servers[index]
        old.kill()
        if old.addresses:
            self._places[index] = [address.partition("/p2p/")[0] for address in old.addresses]
        same = {} if "host_maddrs" in self._options else {"host_maddrs": self._places.get(index, [])}
        if self._link is not None:
            self._link.admit(index)
        try:
            new = self._servers[index] = self._spawn(index, {**same, **options}, model=model, program=program)
            new.tell_peers(self._ways_to_others(index))
            self._wait_for([new], "ready", time.monotonic() + self._start_timeout_s)
        finally:
            if self._link is not None:
                self._link.shut()
        self._held.hold(new.addresses)

    def _ways_to_others(self, index: int) -> list[str]:
        """Returns the addresses by which a server reaches the others that run."""
        others = [(at, one) for at, one in enumerate(self._servers) if at != index and one.is_alive and one.addresses]
        if self._ports is None:
            return [address for _, server in others for address in server.addresses]
        ports = self._ports.for_servers[index]
        return [f"{_maddr(ports[at])}/p2p/{server.peer_id}" for at, server in others]

    def _spawn(
        self,
        index: int,
        options: Mapping[str, object],
        *,
        model: str | os.PathLike[str] | None = None,
        program: Sequence[str] = _SWARM,
    ) -> LocalServer:
        """Starts ``swarm serve``, or the same command of another program."""
        name = self.model if model is None else str(expanded(model).resolve())
        span = index // self._replicas
        by_number = self._num_blocks is not None
        chosen = ["--num-blocks", str(self._num_blocks)] if by_number else ["--blocks", self._blocks[span]]
        command = [sys.executable, *program, "serve", name, "--embedded", *chosen]
        if self._threads is not None:
            command += ["--threads", str(self._threads)]
        shares = {share: values[span] for share, values in self._shares.items() if values and values[span] is not None}
        known = {"drain_s": 0, "identity": self.folder / f"server-{index}.key", **self._options, **options, **shares}
        if self._ports is not None:
            ways = {"host_maddrs": self._ports.own[index], "announce_maddrs": self._ports.for_clients[index]}
            known |= {option: _maddr(port) for option, port in ways.items()}
        for option, value in known.items():
            command += _as_options(f"--{option.replace('_', '-')}", value)
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
                cure = "" if dead.status else "; another program sent it SIGTERM: start again"
                raise TransportError(f"a local server {dead.ending} before it served (pid {dead.pid}){cure}{dead.why}")
            if time.monotonic() > deadline:
                raise TransportError(
                    f"a local server (pid {late.pid}) did not serve within {self._start_timeout_s:g} s: "
                    f"raise start_timeout_s, or see why{late.why}"
                )
            time.sleep(_POLL_S)


def _as_options(option: str, value: object) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [part for one in value for part in _as_options(option, one)]
    if value is None or isinstance(value, bool):
        return [option] if value else []
    return [option, str(value)]


def _environment(threads: int | None) -> dict[str, str]:
    environment = dict(os.environ)
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    # The package may have been found through sys.path alone, which a child does not inherit.
    home = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(part for part in (home, environment.get("PYTHONPATH", "")) if part)
    return environment


def _maddr(port: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}"
