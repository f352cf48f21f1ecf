"""llama.cpp in a process of its own, as a yardstick: one thread, by the wheel ``xllamacpp``."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from recipes.benchmarks.measure import own
from recipes.benchmarks.memory_group import join
from swarm_plugins.child import Child, answer, jobs
from swarm_plugins.errors import ConfigError, MissingExtraError, SwarmError

_ANSWER_S = 600.0
_END_S = 5.0
_ROOM = 64
"""Tokens of context besides those that are asked for."""


class Open(msgspec.Struct, tag=True):
    """Asks the child to load a file; it answers when that is done."""

    file: str
    num_tokens: int
    group: str = ""
    """Folder of a control group to join first, which limits memory with the mapped file; empty: none.

    In a group, weights stay as they are mapped. By default llama.cpp copies 4-bit ones into an order that it multiplies
    faster.
    """


class Decode(msgspec.Struct, tag=True):
    """Asks the child to decode greedily after a prompt."""

    prompt: list[int]
    new_tokens: int


class Decoded(msgspec.Struct):
    """What llama.cpp says that it took, without sampling's set-up and words."""

    seconds_per_token: float
    prompt_s: float
    read_bytes: int
    """Read from the disk meanwhile."""


Message: Any = Open | Decode


class LlamaCpp:
    """Decodes with a GGUF file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._child = _Child(__name__, f"llama.cpp with {file.name}")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.process.pid

    def __enter__(self) -> Self:
        self._child.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._child.__exit__(kind, error, at)

    def open(self, num_tokens: int, *, group: Path | None = None) -> None:
        """Loads the file for a context of so many tokens, in a control group if one is given."""
        self._child.send(Open(file=str(self.file.resolve()), num_tokens=num_tokens, group=str(group or "")))
        self._child.receive(Decoded, timeout_s=_ANSWER_S)

    def decode(self, prompt: Sequence[int], new_tokens: int) -> Decoded:
        """Decodes after a prompt, which is not kept from the call before."""
        self._child.send(Decode(prompt=list(prompt), new_tokens=new_tokens))
        return self._child.receive(Decoded, timeout_s=_ANSWER_S)


class _Child(Child):
    def _ended(self) -> SwarmError:
        # Its output ends a moment before it does.
        if self.process.wait(_END_S) == -signal.SIGKILL:
            return SwarmError(
                f"{self.label} was killed by the system: it had too little memory; allow more, as by --fast"
            )
        return SwarmError(f"{self.label} ended: it may not be able to load the file")


def has_llama_cpp() -> bool:
    """Returns whether the wheel is installed."""
    return importlib.util.find_spec("xllamacpp") is not None


def need_llama_cpp() -> None:
    """Raises MissingExtraError unless the wheel is installed."""
    if not has_llama_cpp():
        raise MissingExtraError(
            "llama.cpp is run by the package xllamacpp, which is not installed: pip install xllamacpp"
        )


def check_llama_cpp(files: Sequence[Path]) -> None:
    """Checks before anything is measured that llama.cpp can run files.

    Raises:
        MissingExtraError: If there are any, and the wheel is not installed.
        ConfigError: If a file does not exist.
    """
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file} does not exist: give a GGUF file of the same model")
    if files:
        need_llama_cpp()


def main() -> None:
    """The child."""
    server: Any = None
    for message in jobs(Message):
        if isinstance(message, Open):
            server = _server(message)
            answer(Decoded(seconds_per_token=0.0, prompt_s=0.0, read_bytes=0))
            continue
        request = {
            "prompt": message.prompt,
            "n_predict": message.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        before = own("io", "read_bytes")
        times = server.handle_completions(request)["timings"]
        answer(
            Decoded(
                seconds_per_token=times["predicted_per_token_ms"] / 1e3,
                prompt_s=times["prompt_ms"] / 1e3,
                read_bytes=own("io", "read_bytes") - before,
            )
        )


def _server(asked: Open) -> Any:
    import xllamacpp

    if asked.group:
        join(Path(asked.group))  # libraries, which are in memory by now, do not count
    # It logs pages to standard output, which the parent reads answers from, and to standard error.
    parent = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    params = xllamacpp.CommonParams()
    params.model.path = asked.file
    params.n_ctx, params.n_parallel, params.warmup = asked.num_tokens + _ROOM, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.no_extra_bufts = bool(asked.group)
    server = xllamacpp.Server(params)
    os.dup2(parent, 1)
    return server
