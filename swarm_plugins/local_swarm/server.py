"""One process of a local swarm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from swarm_plugins.errors import ConfigError

_STOP_TIMEOUT_S = 15.0
_LOG_TAIL_LINES = 15


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
    def ending(self) -> str:
        """How the process has ended, as a verb for messages."""
        status = self._process.poll()
        if status == -signal.SIGKILL:
            return "was killed (the system may have run out of memory: start fewer servers)"
        if status is not None and status < 0:
            return f"was ended by signal {-status}"
        return "ended" if status else "was asked to end"

    @property
    def log(self) -> str:
        """The server's warnings, errors and progress so far."""
        with contextlib.suppress(OSError):
            return self._log_path.read_text(errors="replace")
        return ""

    @property
    def end_of_log(self) -> str:
        """The last lines of the log, to be appended to a message."""
        lines = [line for line in self.log.replace("\r", "\n").splitlines() if line.strip()]
        return ":\n" + "\n".join(lines[-_LOG_TAIL_LINES:]) if lines else "; its log is empty"

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
