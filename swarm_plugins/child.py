"""Child processes: a worker that takes jobs and gives answers as JSON lines; a child that ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from swarm_plugins.errors import SwarmError

Message = TypeVar("Message")

_ANSWER_S = 3600.0
"""Default deadline; longer than any measurement except those whose length the user chooses."""
_LEAVE_S = 20.0
_DIE_S = 10.0
_PARENT_POLL_S = 0.5
_LAST_RESORT_S = 15.0
# Quiet before anything heavy is imported.
_START = """
from swarm_plugins.noise import quiet_command, quiet_loading
quiet_command()
from {module} import main
with quiet_loading():
    main()
"""


class Child:
    """Runs ``main`` of a module in a process with one thread; the label names it in messages."""

    def __init__(self, module: str, label: str) -> None:
        self.label = label
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process."""
        self._process = subprocess.Popen(
            # -P: folders in the working directory are not mistaken for packages.
            [sys.executable, "-P", "-c", _START.format(module=self._module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Bytecode of modules imported late must not count as written by a load.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            # A terminal's Ctrl-C is the parent's to answer.
            start_new_session=True,
        )

    def close(self) -> None:
        """Makes the process leave, and ends it if it does not. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        pipes: Any = process
        pipes.stdin.close()
        try:
            process.wait(timeout=_LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=_DIE_S)
        pipes.stdout.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and self._process is not None:
            self._process.kill()  # its answer is not waited for
        self.close()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running process."""
        if self._process is None:
            raise SwarmError(f"{self.label} has not been started; use it in a with statement")
        return self._process

    def send(self, message: object) -> None:
        """Sends a message; raises SwarmError if the process has ended (its error is on standard error)."""
        pipe: Any = self.process.stdin
        try:
            pipe.write(msgspec.json.encode(message) + b"\n")
            pipe.flush()
        except OSError as exc:
            raise self._ended() from exc

    def receive(self, kind: type[Message], *, timeout_s: float = _ANSWER_S) -> Message:
        """Waits for an answer.

        Raises:
            SwarmError: If the process has ended (its error is on standard error), or was killed because it did not
                answer in time.
        """
        process = self.process
        pipe: Any = process.stdout
        has_timed_out = threading.Event()

        def end_it() -> None:
            has_timed_out.set()
            process.kill()

        deadline = threading.Timer(timeout_s, end_it)
        deadline.daemon = True
        deadline.start()
        try:
            line = pipe.readline()
        finally:
            deadline.cancel()
            deadline.join()
        if has_timed_out.is_set():
            raise SwarmError(f"{self.label} did not answer within {timeout_s:g} s and was killed: try again")
        if not line:
            raise self._ended()
        return msgspec.json.decode(line, type=kind)

    def _ended(self) -> SwarmError:
        return SwarmError(f"{self.label} ended; its error is printed above")


def jobs(kind: type[Message]) -> Iterator[Message]:
    """Yields the parent's messages until it closes the pipe; called in the child."""
    for line in sys.stdin.buffer:
        yield msgspec.json.decode(line, type=kind)


def answer(message: msgspec.Struct) -> None:
    """Sends an answer to the parent; called in the child."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def end_with(parent: int) -> None:
    """Ends this process with SIGTERM, or else hard, once its parent has gone; called in the child.

    Args:
        parent: Id of the parent's process; it may have gone already.
    """
    threading.Thread(target=_watch, args=(parent,), name="watch the parent", daemon=True).start()


def _watch(parent: int) -> None:
    # The kernel's signal at the parent's death is tied to the thread that started this process, which may end
    # long before the parent does; the parent's id is not.
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LAST_RESORT_S)
    os._exit(1)
