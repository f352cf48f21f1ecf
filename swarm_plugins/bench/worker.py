"""One client of many: a process of its own that decodes when it is told to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from swarm_plugins.bench.arms import decode, prompt_tokens, swarm_model
from swarm_plugins.bench.child import end_child
from swarm_plugins.errors import SwarmError
from swarm_plugins.noise import quiet_loading

__all__ = ["Worker", "main"]


class Job(msgspec.Struct, frozen=True):
    """What a worker is told to do."""

    directory: str
    initial_peers: tuple[str, ...]
    prefix: int
    shift: int


class Done(msgspec.Struct, frozen=True):
    """What a worker answers after each decoding."""

    tokens: list[int]
    times: list[float]


class Worker:
    """Starts a worker process and talks to it over its standard streams, a line of JSON each way."""

    def __init__(self, directory: Path, initial_peers: Sequence[str], *, prefix: int, shift: int) -> None:
        self.job = Job(str(directory), tuple(initial_peers), prefix, shift)
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Worker:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._send(msgspec.json.encode(self.job))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process is not None:
            end_child(self.process)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        if self.process is None:
            raise SwarmError("the worker has not been started; use it in a with statement")
        return self.process.pid

    def ask(self, new_tokens: int) -> None:
        """Starts one decoding."""
        self._send(msgspec.json.encode(new_tokens))

    def answer(self) -> Done:
        """Waits for the decoding that was asked for; the requests in it have deadlines of their own.

        Raises:
            SwarmError: If the worker has ended; what it said is on standard error.
        """
        line = self._pipe(self.process.stdout).readline() if self.process else b""
        if not line:
            raise SwarmError("a client process ended before it had decoded; its error is printed above")
        return msgspec.json.decode(line, type=Done)

    def _send(self, line: bytes) -> None:
        try:
            pipe = self._pipe(self.process.stdin if self.process else None)
            pipe.write(line + b"\n")
            pipe.flush()
        except OSError as exc:
            raise SwarmError("a client process ended; its error is printed above") from exc

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise SwarmError("the worker has not been started; use it in a with statement")
        return pipe


def main() -> None:
    """Runs the worker: a job, then numbers of tokens until the end of the input."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    with quiet_loading():
        model = swarm_model(Path(job.directory), job.initial_peers)
    prompt = prompt_tokens(Path(job.directory), length=job.prefix, vocab_size=model.config.vocab_size, shift=job.shift)
    for line in sys.stdin.buffer:
        decoded = decode(model, prompt, msgspec.json.decode(line, type=int))
        sys.stdout.buffer.write(msgspec.json.encode(Done(decoded.tokens, decoded.times)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
