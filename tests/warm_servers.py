"""Starts processes, such as the servers of local swarms, from one process that has imported what they need.

Importing takes a server some seconds, and a suite starts hundreds of servers. This process imports once, and forks for
each server; the fork runs the same command. Tests of the processes themselves start them in the ordinary way: see the
fixture ``cold_servers``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

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
_MOST_BYTES = 1 << 16
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
    """

    PIPE = subprocess.PIPE
    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(
        self, environment: dict[str, str], ignored: Collection[str], modules: Sequence[str] = SERVER_MODULES
    ) -> None:
        self._environment = environment
        self._ignored = ignored
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; None if it has not been needed yet."""
        return None if self._process is None else self._process.pid

    def Popen(self, command: Sequence[str], *, env: dict[str, str], **options: Any) -> Any:
        """Starts a server, or in the ordinary way another child."""
        names = (env.keys() | self._environment.keys()) - set(self._ignored)
        is_server = "serve" in command[:5]
        if not is_server or any(env.get(name) != self._environment.get(name) for name in names):
            return subprocess.Popen(command, env=env, **options)
        return self.start(command, options["stderr"].fileno())

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
            line, other = _line()
            with other:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, *self._modules],
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


class WarmServer:
    """A forked process, with the part of Popen's interface that `LocalServer` uses."""

    def __init__(self, line: socket.socket, request: dict[str, Any], log: int) -> None:
        self._lock = threading.Lock()
        self._status: int | None = None
        with contextlib.ExitStack() as stack:
            stdin, to_stdin = os.pipe()
            from_stdout, stdout = os.pipe()
            self._news, news = map(stack.enter_context, _line())
            self.stdin = stack.enter_context(open(to_stdin, "wb", 0))
            self.stdout = stack.enter_context(open(from_stdout, "rb", 0))
            try:
                socket.send_fds(line, [json.dumps(request).encode()], [stdin, stdout, log, news.fileno()])
            finally:
                for end in (stdin, stdout):
                    os.close(end)
                news.close()
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
            raise subprocess.TimeoutExpired("swarm serve", timeout)
        return self._news.recv(64)


def _line() -> tuple[socket.socket, socket.socket]:
    """Returns two ends of a line that keeps messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def main() -> None:
    """Imports modules, and forks for each request until the other side has gone."""
    from swarm_plugins.noise import no_bars_in_pipes

    no_bars_in_pipes()
    import numpy as np

    for module in sys.argv[1:]:
        importlib.import_module(module)
    # Collections in the forks would copy the pages of all these modules.
    gc.freeze()
    ended, ends = os.pipe()
    os.set_blocking(ends, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ends)
    news: dict[int, int] = {}
    with socket.socket(fileno=os.dup(0)) as line:
        while True:
            ready, _, _ = select.select([line, ended], [], [])
            if ended in ready:
                os.read(ended, 64)
                _tell_of_ended(news)
            if line not in ready:
                continue
            request, fds, _, _ = socket.recv_fds(line, _MOST_BYTES, 4)
            if not request:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                np.random.seed()
                for fd in (line.fileno(), ended, ends, *news.values()):
                    os.close(fd)
                _become(json.loads(request), fds)
            for fd in fds[:3]:
                os.close(fd)
            news[pid] = fds[3]
            with contextlib.suppress(OSError):
                os.write(news[pid], b"%d" % pid)


def _tell_of_ended(news: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            with contextlib.suppress(OSError):
                os.write(news[pid], b"%d" % os.waitstatus_to_exitcode(status))
            os.close(news.pop(pid))


def _become(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Runs the command as a process of its own would."""
    status = 1
    try:
        os.setsid()
        for target, fd in enumerate(fds[:3]):
            os.dup2(fd, target)
        for fd in fds:
            os.close(fd)
        os.chdir(request["cwd"])
        _python, *sys.argv = request["command"]
        if sys.argv[0] == "-m":
            sys.argv.pop(0)
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
