"""Starts the libp2p daemon and detects its death.

The daemon is a separate process, part of hivemind. It ends when its parent's socket closes, so it cannot outlive a
killed parent (tests/integration/test_p2p_daemon.py); this module watches for the opposite case.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import sys
from collections.abc import Awaitable
from typing import Any, TypeVar

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.utils.multiaddr import Multiaddr

from swarm_plugins.errors import ConfigError, RequestTimeoutError, TransportError
from swarm_plugins.transport.config import NodeConfig
from swarm_plugins.transport.daemon.sockets import SocketFolder
from swarm_plugins.transport.identity import IdentityFile, write_identity

log = logging.getLogger(__name__)

_T = TypeVar("_T")
MAX_DAEMON_MESSAGE_BYTES = 1 << 20
"""Largest call of the DHT, or answer to one, that the daemon passes on."""

_START_TIMEOUT_S = 60.0
"""Longest start of the daemon; a second attempt follows."""
_ATTEMPTS = 2
_STOP_TIMEOUT_S = 5.0
_IDENTITY_CHECK_PAUSES_S = (0.0, 0.2, 0.4, 0.8)
_IDENTITY_CHECK_TIMEOUT_S = 15.0
MEMORY_GOAL = "256MiB"
"""From here on the daemon, a Go program, frees at once what it does not need."""
_START = (
    f"import os, sys; os.environ.setdefault('GOMEMLIMIT', '{MEMORY_GOAL}'); "
    "os.setpgid(0, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Starts the daemon so that Ctrl-C, which reaches all processes of a terminal's group, leaves it to its parent."""
# hivemind passes on the last line of the daemon's log: ``Daemon failed to start: 2026/11/21 07:59:06 failed to ...``.
_LOG_PREFIX = re.compile(r"^Daemon failed to start: (?:\d{4}/\d\d/\d\d \d\d:\d\d:\d\d )?")


class Daemon:
    """A running libp2p daemon."""

    def __init__(self, p2p: P2P) -> None:
        self.p2p = p2p
        self.peer_id: str = p2p.peer_id.to_base58()
        self.socket_path: str = p2p.daemon_listen_maddr["unix"]
        self._is_stopping = False
        # When the daemon dies, these tasks end with errors that hivemind never retrieves; `_watch` reports the death.
        control = p2p._client.control
        for task in (control._read_task, control._write_task, p2p._reader_task):
            task.add_done_callback(ignore_error)
        self._death = asyncio.create_task(self._watch(), name="watch libp2p daemon")

    @property
    def pid(self) -> int:
        return int(self.p2p._child.pid)

    @property
    def is_alive(self) -> bool:
        return not self._death.done() and self.p2p._child.returncode is None

    def check_alive(self) -> None:
        """Raises TransportError if the process has ended."""
        if not self.is_alive:
            raise TransportError(self._obituary())

    async def wait_dead(self) -> None:
        await asyncio.shield(self._death)

    async def race(self, work: Awaitable[_T], *, timeout_s: float, what: str) -> _T:
        """Awaits ``work`` that talks to the daemon, but stops when the daemon dies, which ``work`` would not notice.

        Raises:
            RequestTimeoutError: After ``timeout_s``.
            TransportError: If the daemon has ended.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._death}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if task.done() and not task.cancelled():
            return task.result()
        self.check_alive()
        raise RequestTimeoutError(f"{what} took longer than {timeout_s:g} s")

    async def stop(self) -> None:
        """Stops the process, by force if necessary. Idempotent."""
        self._is_stopping = True
        await _stop(self.p2p)
        await asyncio.wait({self._death}, timeout=_STOP_TIMEOUT_S)

    async def _watch(self) -> None:
        await self.p2p._child.wait()
        self.p2p.sockets.remove()
        if not self._is_stopping:
            log.error("%s", self._obituary())

    def _obituary(self) -> str:
        return (
            f"the libp2p daemon of this node has ended (exit code {self.p2p._child.returncode}): start a new node; "
            "if the system killed it, memory or open files ran out"
        )


async def start_daemon(config: NodeConfig, identity: IdentityFile) -> Daemon:
    """Starts the daemon.

    Raises:
        ConfigError: If an address is in use or cannot be listened on, or another peer has the same identity.
        TransportError: If no initial peer can be reached, or the daemon does not start.
    """
    for address in config.host_maddrs:
        _check_port_free(address)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            if identity.existed and config.initial_peers and not config.is_client and config.discovery == "dht":
                await _check_identity_free(config, identity)
            return Daemon(await _create(_arguments(config), identity))
        except P2PDaemonError as exc:
            if "failed to start in" in str(exc) and attempt < _ATTEMPTS:
                log.warning("the libp2p daemon has not started within %g s; trying again", _START_TIMEOUT_S)
                continue
            raise _translate(exc, config) from exc
        except OSError as exc:
            raise TransportError(f"cannot start the libp2p daemon: {exc}; is /tmp writable?") from exc
    raise TransportError("the libp2p daemon was not started")


def ignore_error(task: asyncio.Task[None]) -> None:
    """Retrieves the error of a task that has ended, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()


async def _check_identity_free(config: NodeConfig, identity: IdentityFile) -> None:
    # hivemind has the same check, for RSA keys only.
    asking = await _create(
        {
            "initial_peers": list(config.initial_peers),
            "dht_mode": "client",
            "no_listen": True,
            "auto_nat": False,
            "nat_port_map": False,
            "startup_timeout": _START_TIMEOUT_S,
        }
    )
    try:
        is_taken = await _answers(asking, PeerID.from_base58(identity.identity.peer_id))
    finally:
        await _stop(asking)
    if is_taken:
        raise ConfigError(
            f"another peer of the swarm uses identity {identity.path} ({identity.identity.peer_id}): stop it, or give "
            "each peer its own file"
        )


async def _answers(asking: P2P, peer_id: PeerID) -> bool:
    """Returns whether a peer with this id answers in the swarm."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_IDENTITY_CHECK_TIMEOUT_S):
            for pause_s in _IDENTITY_CHECK_PAUSES_S:
                # A node that has just started knows other nodes, but not yet that they can look up ids.
                await asyncio.sleep(pause_s)
                with contextlib.suppress(P2PDaemonError):
                    await asking._client.connect(peer_id, [])
                    return True
    return False


async def _create(arguments: dict[str, Any], identity: IdentityFile | None = None) -> P2P:
    created: list[P2P] = []
    folder = SocketFolder.take()
    copy = folder.path / "key"

    class TrackedP2P(P2P):  # type: ignore[misc]  # hivemind has no types
        _UNIX_SOCKET_PREFIX = f"/unix{folder.path}/"

        def __init__(self) -> None:
            super().__init__()
            self.sockets = folder
            created.append(self)

        @staticmethod
        def _make_process_args(*arguments: Any, **options: Any) -> list[str]:
            command: list[str] = P2P._make_process_args(*arguments, **options)
            return [sys.executable, "-I", "-S", "-c", _START, *command]

    try:
        if identity is not None:
            path = identity.path
            if path is None or not path.exists():
                path = copy
                write_identity(copy, identity.identity)
            arguments = {**arguments, "identity_path": str(path)}
        return await TrackedP2P.create(**arguments)
    except BaseException:
        # hivemind does not stop a daemon that failed to start.
        for p2p in created:
            if p2p._child is not None:
                await _stop(p2p)
        folder.remove()
        raise
    finally:
        copy.unlink(missing_ok=True)  # the daemon has read it: a killed process then leaves none on disk


async def _stop(p2p: P2P) -> None:
    child = p2p._child
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await p2p.shutdown()
    except TimeoutError:
        log.warning("the libp2p daemon (pid %d) ignores SIGTERM; killing it", child.pid)
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    p2p.sockets.remove()


def _arguments(config: NodeConfig) -> dict[str, Any]:
    is_static = config.discovery == "static"
    reaches_outside = not config.is_loopback_only
    return {
        "initial_peers": [] if is_static else list(config.initial_peers),
        "announce_maddrs": list(config.announced) or None,
        "host_maddrs": list(config.host_maddrs),
        # See `_check_identity_free`.
        "check_if_identity_free": False,
        "dht_mode": "client" if config.is_client or is_static else "server",
        "no_listen": not config.host_maddrs,
        "auto_nat": reaches_outside,
        "nat_port_map": reaches_outside and config.nat_port_map,
        "use_auto_relay": config.auto_relay,
        "startup_timeout": _START_TIMEOUT_S,
        "persistent_conn_max_msg_size": MAX_DAEMON_MESSAGE_BYTES,
    }


def _translate(exc: Exception, config: NodeConfig) -> TransportError | ConfigError:
    reason = _LOG_PREFIX.sub("", str(exc))
    if "bootstrap peers" in reason:
        return TransportError(
            f"none of the initial peers can be reached: {', '.join(config.initial_peers)}; "
            "check that a server runs there, and its address, port and firewall"
        )
    if "not found" in reason or "incompatible" in reason:
        return TransportError(
            f"cannot run hivemind's libp2p daemon ({reason}); reinstall it: pip install --force-reinstall hivemind"
        )
    if "failed to start in" in reason:
        return TransportError(
            f"the libp2p daemon has not started within {_START_TIMEOUT_S:g} s, {_ATTEMPTS} times; "
            "the machine is overloaded, or initial_peers lead to a firewall that drops packets"
        )
    if "listen" in reason or "assign" in reason:
        return ConfigError(
            f"cannot listen on {', '.join(config.host_maddrs)}: {reason}; use an address of this machine"
        )
    return TransportError(f"the libp2p daemon does not start: {reason}")


def _check_port_free(address: str) -> None:
    # libp2p sets SO_REUSEPORT: a second daemon on a port would silently get a random half of the connections.
    parsed = Multiaddr(address)
    if "ip4" not in parsed and "ip6" not in parsed:
        raise ConfigError(
            f"cannot listen on {address}: expected an IP address of this machine, such as /ip4/0.0.0.0/tcp/31337"
        )
    if "tcp" not in parsed or int(parsed["tcp"]) == 0:
        return
    family, host = (socket.AF_INET6, parsed["ip6"]) if "ip6" in parsed else (socket.AF_INET, parsed["ip4"])
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger do not count
        try:
            probe.bind((host, int(parsed["tcp"])))
        except OSError as exc:
            raise ConfigError(
                f"cannot listen on {address}: {os.strerror(exc.errno or 0)}; "
                "give another port (0 picks a free one) or an address of this machine"
            ) from exc
