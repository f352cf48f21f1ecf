"""One way of running the model, in a process of its own with a limit on its memory."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec
import torch
from torch import Tensor

from swarm_plugins.bench.child import end_child
from swarm_plugins.bench.memory_group import MemoryGroup
from swarm_plugins.bench.offload.arms import ArmName, LoadedArm, load_arm
from swarm_plugins.errors import SwarmError
from swarm_plugins.offload.stats import OffloadStats
from swarm_plugins.sizes import format_bytes

__all__ = ["ArmProcess", "Job", "Ready", "Round", "main"]

# Quiet before anything heavy is imported.
_START = f"""
from swarm_plugins.noise import quiet_command, quiet_loading
quiet_command()
from {__name__} import main
with quiet_loading():
    main()
"""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told to load."""

    arm: str
    directory: str
    fast_bytes: int
    smallest_bytes: int
    limit_bytes: int
    """Of memory beside what the libraries take; 0: none."""
    group: str = ""
    """The control group that sets the limit, page cache included; empty: only private memory is limited."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says when the model is loaded."""

    load_s: float
    written_bytes: int
    """To disk, while loading."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says after one decoding."""

    tokens: list[int]
    seconds_per_token: float
    """Of single steps: the prompt's own forward does not count."""
    cpu_s: float
    """A token."""
    read_bytes: float
    """From the disk itself, a token."""
    peak_bytes: int
    """Of memory beside what the libraries take."""
    hit_ratio: float | None
    recall: float | None
    stall_s: float | None
    """A token waited for the disk."""


class ArmProcess:
    """Starts the process of an arm and talks to it over its standard streams, a line of JSON each way."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._group = ExitStack()
        self.ready: Ready | None = None
        self.rounds: list[Round] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ArmProcess:
        with ExitStack() as group:
            if self.job.limit_bytes:
                path = group.enter_context(MemoryGroup(self.job.limit_bytes)).path
                self.job = msgspec.structs.replace(self.job, group=str(path or ""))
            self._process = subprocess.Popen(
                # A folder in the working directory is not taken for a package of its name.
                [sys.executable, "-P", "-c", _START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Modules that transformers imports while it loads must not count as written by the load.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            )
            self._group = group.pop_all()
        try:
            self._send(msgspec.json.encode(self.job))
        except SwarmError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            with self._group:
                end_child(self._process)

    def wait_until_ready(self) -> Ready:
        """Waits until the model is loaded.

        Raises:
            SwarmError: If the process has ended; what it said is on standard error.
        """
        self.ready = msgspec.json.decode(self._line(), type=Ready)
        return self.ready

    def decode(self, prompt: list[int], new_tokens: int) -> Round:
        """Decodes greedily after a prompt.

        Raises:
            SwarmError: If the process has ended.
        """
        self._send(msgspec.json.encode((prompt, new_tokens)))
        return msgspec.json.decode(self._line(), type=Round)

    def _line(self) -> bytes:
        line = self._pipe(self._process.stdout if self._process else None).readline()
        if not line:
            raise self._ended()
        return line

    def _send(self, line: bytes) -> None:
        try:
            pipe = self._pipe(self._process.stdin if self._process else None)
            pipe.write(line + b"\n")
            pipe.flush()
        except OSError as exc:
            raise self._ended() from exc

    def _ended(self) -> SwarmError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Its output ends a moment before it does.
            if self._process is not None and self._process.wait(timeout=5.0) == -signal.SIGKILL and self.job.group:
                return SwarmError(
                    f"{self.job.arm!r} took more than its limit of {format_bytes(self.job.limit_bytes)}, so that the "
                    "system ended it: give a larger --fast, or leave the arm out with --without"
                )
        return SwarmError(f"the process of {self.job.arm!r} ended; its error is printed above")

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise SwarmError("the process has not been started; use it in a with statement")
        return pipe


def main() -> None:
    """Runs an arm: a job, then decodings until the end of the input."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    arm, directory = ArmName(job.arm), Path(job.directory)
    resident = _memory("VmRSS")
    _limit_memory(job, arm)
    started, written = time.perf_counter(), _disk_bytes("write_bytes")
    with ExitStack() as stack:
        # Bars of several processes would overwrite each other, and that of the command.
        with contextlib.redirect_stderr(io.StringIO()):
            arm_loading = load_arm(
                arm,
                directory,
                fast_bytes=job.fast_bytes,
                smallest_bytes=job.smallest_bytes,
                has_bounded_cache=bool(job.group),
            )
            loaded = stack.enter_context(arm_loading)
        load_s = time.perf_counter() - started
        _answer(Ready(load_s=load_s, written_bytes=_disk_bytes("write_bytes") - written))
        for line in sys.stdin.buffer:
            prompt, new_tokens = msgspec.json.decode(line, type=tuple[list[int], int])
            _answer(_decode(loaded, torch.tensor([prompt]), new_tokens, resident))


def _limit_memory(job: Job, arm: ArmName) -> None:
    if job.group:
        # What the libraries have taken so far stays with the group where this process began.
        (Path(job.group) / "cgroup.procs").write_text("0")
    elif job.limit_bytes and arm.is_ours:
        limit = _memory("VmData") + job.limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _decode(loaded: LoadedArm, prompt: Tensor, new_tokens: int, resident: int) -> Round:
    clock = _Clock(loaded)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    with torch.no_grad():
        output = loaded.model.generate(  # type: ignore[operator]
            prompt, attention_mask=torch.ones_like(prompt), streamer=clock, pad_token_id=0, **options
        )
    first, last = clock.notes[0], clock.notes[-1]
    steps = new_tokens - 1
    return Round(
        tokens=output[0, prompt.shape[1] :].tolist(),
        seconds_per_token=(last.at - first.at - clock.paused_s) / steps,
        cpu_s=(last.cpu_s - first.cpu_s) / steps,
        read_bytes=(last.read_bytes - first.read_bytes) / steps,
        peak_bytes=_memory("VmHWM") - resident,
        **_experts(first.stats, last.stats, steps),
    )


def _experts(first: OffloadStats | None, last: OffloadStats | None, steps: int) -> dict[str, float | None]:
    """What the experts did between two tokens."""
    if first is None or last is None:
        return {"hit_ratio": None, "recall": None, "stall_s": None}
    asked = last.hits + last.misses - first.hits - first.misses
    guessed = last.asked_after_guess - first.asked_after_guess
    return {
        "hit_ratio": (last.hits - first.hits) / asked if asked else None,
        "recall": (last.guesses_used - first.guesses_used) / guessed if guessed else None,
        "stall_s": (last.stall_s - first.stall_s) / steps,
    }


@dataclass(frozen=True)
class _Note:
    """The state of the process when a token came."""

    at: float
    cpu_s: float
    read_bytes: int
    stats: OffloadStats | None


class _Clock:
    """A streamer that notes the state of the process at the first and at every later token."""

    def __init__(self, loaded: LoadedArm) -> None:
        self._loaded = loaded
        self._is_prompt = True
        self.notes: list[_Note] = []
        self.paused_s = 0.0

    def put(self, value: Tensor) -> None:
        """Takes the prompt first, then each new token."""
        if self._is_prompt:
            self._is_prompt = False
            return
        stats = getattr(self._loaded.model, "offload_stats", None)
        note = _Note(time.perf_counter(), time.process_time(), _disk_bytes("read_bytes"), stats() if stats else None)
        self.notes.append(note)
        self._loaded.before_token()
        # What comes between tokens is not what decoding takes.
        self.paused_s += time.perf_counter() - note.at

    def end(self) -> None:
        """Does nothing: the last token has been noted."""


def _memory(field: str) -> int:
    """Returns a size of this process, such as ``VmHWM``, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _disk_bytes(field: str) -> int:
    """Returns what this process has read from, or caused to be written to, the disk itself."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    return 0


def _answer(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()
