"""Child processes: started, watched and ended in one way; a worker that takes jobs and answers; the child's own end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from swarm_plugins.errors import SwarmError

Message = TypeVar("Message")

_ANSWER_S = 3600.0
"""Default deadline; longer than any measurement except those whose length the user chooses."""
_LEAVE_S = 20.0
_DIE_S = 15.0
_PARENT_POLL_S = 0.5
_LAST_RESORT_S = 15.0
_CHUNK_BYTES = 1 << 16
_TAIL_LINES = 15
# Quiet before anything heavy is imported.
_START = """
from swarm_plugins.noise import quiet_command, quiet_loading
quiet_command()
from {module} import main
with quiet_loading():
    main()
"""


class Process:
    """A child in a session of its own: a terminal's Ctrl-C is the parent's to answer.

    Args:
        command: What to run.
        environment: Its environment.
        log: File to which it appends its standard error, and what it prints unless the parent reads that. None: its
            errors are shown with the parent's.
        is_asked: Whether the parent writes to it and reads what it prints.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path | None = None, *, is_asked: bool = True
    ) -> None:
        self._log = log
        self._said = b""
        with contextlib.nullcontext() if log is None else log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if is_asked else subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_asked else errors,
                stderr=errors,
                env=dict(environment),
                start_new_session=True,
                bufsize=0,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status; below 0 the signal that ended it. None while it runs."""
        return self._process.poll()

    @property
    def is_alive(self) -> bool:
        """Whether it is running."""
        return self.status is None

    @property
    def ending(self) -> str:
        """How it has ended, as a verb for messages."""
        status = self.status
        if status == -signal.SIGKILL:
            return "was killed (the system may have run out of memory: start fewer servers)"
        if status is not None and status < 0:
            return f"was ended by signal {-status}, {signal.strsignal(-status) or 'unknown'} (start again)"
        return "ended" if status else "was asked to end"

    @property
    def log(self) -> str:
        """What it has written to its log so far."""
        with contextlib.suppress(OSError):
            return "" if self._log is None else self._log.read_text(errors="replace")
        return ""

    @property
    def end_of_log(self) -> list[str]:
        """The last lines of the log."""
        return [line for line in self.log.replace("\r", "\n").splitlines() if line.strip()][-_TAIL_LINES:]

    def write(self, line: bytes) -> None:
        """Writes a line to its standard input; raises OSError if it has ended."""
        pipe: Any = self._process.stdin
        if pipe.closed:
            raise BrokenPipeError("the process has ended")
        rest = memoryview(line + b"\n")
        while rest:
            # A signal can cut a write short.
            rest = rest[pipe.write(rest) :]

    def read_line(self, timeout_s: float) -> bytes | None:
        """Returns the next line that it prints; None if there is none within ``timeout_s``.

        Raises:
            EOFError: If it prints no more.
        """
        pipe: Any = self._process.stdout
        if pipe.closed:
            raise EOFError
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as ready:
            ready.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._said:
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    return None
                if not (chunk := os.read(pipe.fileno(), _CHUNK_BYTES)):
                    raise EOFError
                self._said += chunk
        line, _, self._said = self._said.partition(b"\n")
        return line

    def wait(self, timeout_s: float) -> int | None:
        """Waits for its end; returns the exit status, None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def ask_to_end(self) -> None:
        """Sends SIGTERM, without waiting."""
        if self.is_alive:
            self._process.send_signal(signal.SIGTERM)

    def terminate(self, *, timeout_s: float = _DIE_S) -> None:
        """Asks it to end, and kills it with its children if it has not after ``timeout_s``."""
        self.ask_to_end()
        self._end(timeout_s)

    def kill(self) -> None:
        """Ends it at once, as a crash would."""
        self._process.kill()
        self._end(_DIE_S)

    def leave(self, timeout_s: float) -> None:
        """Closes its standard input, which tells it to end, and kills it if it has not after ``timeout_s``."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        if self.wait(timeout_s) is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # with its children: the session is its own
            self.wait(_DIE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Child:
    """Runs ``main`` of a module in a process with one thread; the label names it in messages."""

    def __init__(self, module: str, label: str) -> None:
        self.label = label
        self._module = module
        self._running: Process | None = None

    def start(self) -> None:
        """Starts the process."""
        self._running = Process(
            # -P: folders in the working directory are not mistaken for packages.
            [sys.executable, "-P", "-c", _START.format(module=self._module)],
            # Bytecode of modules imported late must not count as written by a load.
            {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )

    def close(self) -> None:
        """Makes the process leave, and ends it if it does not. Idempotent."""
        process, self._running = self._running, None
        if process is not None:
            process.leave(_LEAVE_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and self._running is not None:
            self._running.kill()  # its answer is not waited for
        self.close()

    @property
    def process(self) -> Process:
        """The running process."""
        if self._running is None:
            raise SwarmError(f"{self.label} has not been started; use it in a with statement")
        return self._running

    def send(self, message: object) -> None:
        """Sends a message; raises SwarmError if the process has ended (its error is on standard error)."""
        try:
            self.process.write(msgspec.json.encode(message))
        except OSError as exc:
            raise self._ended() from exc

    def receive(self, kind: type[Message], *, timeout_s: float = _ANSWER_S) -> Message:
        """Waits for an answer.

        Raises:
            SwarmError: If the process has ended (its error is on standard error), or was killed because it did not
                answer in time.
        """
        process = self.process
        try:
            line = process.read_line(timeout_s)
        except EOFError as exc:
            raise self._ended() from exc
        if line is None:
            process.kill()
            raise SwarmError(f"{self.label} did not answer within {timeout_s:g} s and was killed: try again")
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
