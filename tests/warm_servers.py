"""Starts processes, such as the servers of local swarms, from one process that has imported what they need.

Importing takes a server some seconds, and a suite starts hundreds of servers. This process imports once, and forks for
each server; the fork runs the same command. Tests of the processes themselves start them in the ordinary way: see the
fixture ``cold_servers``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

SET_BY_LIBRARIES = frozenset({
    "KMP_INIT_AT_FORK",  # torch
    "KMP_DUPLICATE_LIB_OK",  # torch
    "TORCHINDUCTOR_CACHE_DIR",  # torch._inductor
    "TRITON_CACHE_DIR",  # torch._inductor
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # lightning
    "CRC32C_SW_MODE",  # lightning
    "ACCELERATE_MIXED_PRECISION",  # accelerate
    "GRPC_VERBOSITY",  # hivemind
    "HF_XET_HIGH_PERFORMANCE",  # lm_eval
    "TQDM_DISABLE",
})  # fmt: skip
"""Environment variables that libraries set when they are imported or used."""
_OF_CHILDREN = {"MKL_NUM_THREADS", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH"}
MOST_BYTES = 1 << 16
"""Of a request: a command and a working directory."""
_IMPORT_S = 120.0
_END_S = 10.0
SERVER_MODULES = (
    "swarm_plugins.cli",
    "swarm_plugins.offload.text",
    "swarm_plugins.server.process",
    "swarm_plugins.server.server",
)


class WarmServers:
    """Replaces `subprocess` in the module that starts children.

    Args:
        environment: Of the process. Servers with another one are started in the ordinary way: imports may have read it.
        ignored: Variables that may differ.
        modules: What it imports.
        children: Whether it also forks the workers of `swarm_plugins.child.Child`.
    """

    PIPE = subprocess.PIPE
    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(
        self,
        environment: dict[str, str],
        ignored: Collection[str],
        modules: Sequence[str] = SERVER_MODULES,
        *,
        children: bool = False,
    ) -> None:
        self._environment = environment
        self._ignored = ignored
        self._modules = modules
        self._children = children
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; None if it has not been needed yet."""
        return None if self._process is None else self._process.pid

    def Popen(self, command: Sequence[str], *, env: dict[str, str], **options: Any) -> Any:
        """Starts a server, or in the ordinary way another child."""
        names = (env.keys() | self._environment.keys()) - set(self._ignored)
        is_server, is_child = "serve" in command[:5], self._children and list(command[1:3]) == ["-P", "-c"]
        if is_child:
            names -= _OF_CHILDREN
        if not (is_server or is_child) or any(env.get(name) != self._environment.get(name) for name in names):
            return subprocess.Popen(command, env=env, **options)
        return self.start(command, 2 if options["stderr"] is None else options["stderr"].fileno())

    def start(self, command: Sequence[str], stderr: int) -> WarmServer:
        """Starts ``python -m MODULE ...`` or ``python FILE ...`` with pipes for its input and output."""
        return WarmServer(self.open(), {"command": list(command), "cwd": os.getcwd()}, stderr)

    def close(self) -> None:
        """Ends the process; servers that still run notice that, and end."""
        process, line = self._process, self._line
        self._process = self._line = None
        if process is None or line is None:
            return
        with line, contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_S)

    def open(self) -> socket.socket:
        """Starts the process unless it runs; returns the line to it."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._line is None:
            line, other = new_line()
            with other:
                self._process = subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("warm_main.py")), *self._modules],
                    env=self._environment,
                    stdin=other,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._line = line
        return self._line


@contextlib.contextmanager
def used(ignored: Collection[str] = SET_BY_LIBRARIES) -> Iterator[WarmServers]:
    """Starts the servers of local swarms in that way while the ``with`` block runs."""
    from swarm_plugins import child
    from swarm_plugins.local_swarm import swarm

    warm = WarmServers(swarm._environment(1), ignored)
    child.subprocess = warm  # type: ignore[assignment]
    try:
        yield warm
    finally:
        child.subprocess = subprocess
        warm.close()


class Forked:
    """A forked process, with the part of Popen's interface that needs no pipes.

    Args:
        line: To the process that forks it.
        request: Its ``command``, ``python`` with what follows, and its working directory ``cwd``. With an
            ``environment`` it is a user's program, which may start local swarms of its own if ``swarms`` says so.
        files: Descriptors of its input, output and errors.
    """

    def __init__(self, line: socket.socket, request: dict[str, Any], files: Sequence[int]) -> None:
        self._lock = threading.Lock()
        self._status: int | None = None
        with contextlib.ExitStack() as stack:
            self._news, news = map(stack.enter_context, new_line())
            with news:
                socket.send_fds(line, [json.dumps(request).encode()], [*files, news.fileno()])
            self.pid = int(self._told(_IMPORT_S) or 0)
            assert self.pid, "the process that starts servers has ended: see what it printed"
            stack.pop_all()

    def poll(self) -> int | None:
        """Returns the exit status, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float) -> int:
        """Waits for the end; raises TimeoutExpired."""
        with self._lock:
            if self._status is None:
                self._status = int(self._told(timeout) or -signal.SIGKILL)
                self._news.close()
            return self._status

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            # Its end is told a little later than it is known.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _told(self, timeout: float) -> bytes:
        if not select.select([self._news], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return self._news.recv(64)


class WarmServer(Forked):
    """One with pipes, as `LocalServer` uses it."""

    def __init__(self, line: socket.socket, request: dict[str, Any], log: int) -> None:
        with contextlib.ExitStack() as stack:
            stdin, to_stdin = os.pipe()
            from_stdout, stdout = os.pipe()
            self.stdin = stack.enter_context(open(to_stdin, "wb", 0))
            self.stdout = stack.enter_context(open(from_stdout, "rb", 0))
            try:
                super().__init__(line, request, (stdin, stdout, log))
            finally:
                for end in (stdin, stdout):
                    os.close(end)
            stack.pop_all()


def new_line() -> tuple[socket.socket, socket.socket]:
    """Returns two ends of a line that keeps messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
