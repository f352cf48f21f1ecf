"""The process of `warm_servers`: imports modules, and forks for each request until the other side has gone."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

from warm_servers import MOST_BYTES, SET_BY_LIBRARIES, WarmServers, new_line


def main() -> None:
    """Imports modules, and forks for each request until the other side has gone."""
    from swarm_plugins.noise import no_bars_in_pipes

    no_bars_in_pipes()
    for module in sys.argv[1:]:
        importlib.import_module(module)
    # Collections in the forks would copy the pages of all these modules.
    gc.freeze()
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(socket.socket(fileno=os.dup(0)))
        path = os.environ.get("FORKED_PYTHON_LINE")
        calls = None if path is None else stack.enter_context(_listening(path))
        fork_for_all(line, calls)


def _listening(path: str) -> socket.socket:
    """Returns where `forked_python` calls."""
    calls = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    Path(path).unlink(missing_ok=True)  # of an earlier process
    calls.bind(path)
    calls.listen()
    return calls


def fork_for_all(line: socket.socket, calls: socket.socket | None = None) -> None:
    """Forks for each request of a line, until its other side has gone, and for each call, whose end is its."""
    ended, ends = os.pipe()
    os.set_blocking(ends, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ends)
    asked: list[socket.socket] = [line, *filter(None, [calls])]
    news: dict[int, int] = {}
    called: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([*asked, ended, *called], [], [])
        if ended in ready:
            os.read(ended, 64)
            _tell_of_ended(news)
            called = {fd: pid for fd, pid in called.items() if pid in news}
        for fd in called.keys() & set(ready):
            os.kill(called.pop(fd), signal.SIGKILL)
        for one in set(asked) & set(ready):
            request, fds = _taken(one, is_call=one is calls)
            if not request and one is line:
                return
            if len(fds) < 4:  # who called has ended amid the call
                for fd in fds:
                    os.close(fd)
                continue
            pid = _forked(request, fds, [*(each.fileno() for each in asked), ended, ends, *news.values()])
            news[pid] = fds[3]
            if one is calls:
                called[fds[3]] = pid


def _forked(request: bytes, fds: list[int], not_its: list[int]) -> int:
    """Forks, and tells who asked; returns the id of the new process."""
    import numpy as np

    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        np.random.seed()
        for fd in not_its:
            os.close(fd)
        _become(json.loads(request), fds)
    for fd in fds[:3]:
        os.close(fd)
    with contextlib.suppress(OSError):
        os.write(fds[3], b"%d" % pid)
    return pid


def _taken(asked: socket.socket, *, is_call: bool) -> tuple[bytes, list[int]]:
    """Returns the next request, with its descriptors."""
    if not is_call:
        return socket.recv_fds(asked, MOST_BYTES, 4)[:2]
    call, _ = asked.accept()
    with call, contextlib.suppress(OSError):
        return socket.recv_fds(call, MOST_BYTES, 4)[:2]
    return b"", []


def _tell_of_ended(news: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            if pid not in news:  # an import has started it
                continue
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
        if "environment" in request:
            _become_a_users(request["environment"])
            if request["swarms"]:
                _fork_servers_from_here()
        _run(request["command"][1:])
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)  # noqa: T201
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        if "environment" in request:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(words: list[str]) -> None:
    if words[0] in ("-P", "-u"):
        del words[0]
    option = words[0] if words[0] in ("-m", "-c") else None
    sys.argv = words if option is None else words[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent) if option is None else os.getcwd()
    if option == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def _become_a_users(environment: dict[str, str]) -> None:
    import datasets
    import huggingface_hub

    os.environ.clear()
    os.environ.update(environment)
    sys.executable = environment.get("FORKED_PYTHON", sys.executable)
    # Read by their imports.
    is_offline = environment.get("HF_HUB_OFFLINE") == "1"
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = is_offline
    sys.stdout.reconfigure(line_buffering="PYTHONUNBUFFERED" in environment or os.isatty(1))  # type: ignore[union-attr]


def _fork_servers_from_here() -> None:
    """Forks the process from which servers and workers of this program will be forked."""
    from swarm_plugins import child
    from swarm_plugins.local_swarm import swarm

    line, other = new_line()
    if os.fork() == 0:
        line.close()
        with open(os.devnull, "r+b", 0) as nothing:
            for target in range(3):
                os.dup2(nothing.fileno(), target)
        with other:
            fork_for_all(other)
        os._exit(0)
    other.close()
    servers = WarmServers(swarm._environment(1), SET_BY_LIBRARIES, children=True)
    servers._line = line
    child.subprocess = servers  # type: ignore[assignment]


if __name__ == "__main__":
    main()
