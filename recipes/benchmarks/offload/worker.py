"""Runs the model in one way, in its own process with limited memory."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from recipes.benchmarks.arms import frozen, generate
from recipes.benchmarks.measure import own
from recipes.benchmarks.memory_group import MemoryGroup, join
from recipes.benchmarks.offload.figures import ArmName
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.outline import meta_model
from swarm_plugins.child import Child, answer, jobs
from swarm_plugins.errors import SwarmError
from swarm_plugins.moe import is_fused_experts
from swarm_plugins.offload import OffloadConfig, load_offloaded
from swarm_plugins.offload.model.outline import stored_dtype
from swarm_plugins.offload.stats import OffloadStats
from swarm_plugins.sizes import format_bytes


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Tells a process what to load."""

    arm: str
    directory: str
    fast_bytes: int
    smallest_bytes: int
    policy: str
    """Of `OffloadConfig`, where experts are kept."""
    limit_bytes: int
    """Memory limit of the process, without the libraries; 0: no limit."""
    group: str = ""
    """Control group with the limit, page cache included; empty: only private memory is limited."""
    dtype: str | None = None
    """Type that offloaded arms compute in. None: the checkpoint's."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Reports that the model is loaded."""

    load_s: float
    written_bytes: int
    """Bytes written to disk while loading."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Reports one decoding."""

    tokens: list[int]
    seconds_per_token: float
    """Seconds of a single step, without the prompt's forward."""
    cpu_s: float
    """CPU seconds per token."""
    read_bytes: float
    """Bytes read from the disk itself per token."""
    peak_bytes: int
    """Peak memory, without the libraries."""
    hit_ratio: float | None
    recall: float | None
    stall_s: float | None
    """Seconds per token spent waiting for the disk."""


class MemoryExceededError(SwarmError):
    """The system has killed an arm for its memory."""


class ArmProcess(Child):
    """The process of an arm."""

    def __init__(self, job: Job) -> None:
        super().__init__(__name__, f"the process of {job.arm!r}")
        self.job = job
        self._group = ExitStack()
        self.ready: Ready | None = None
        self.rounds: list[Round] = []

    def __enter__(self) -> Self:
        with ExitStack() as group:
            if self.job.limit_bytes:
                path = group.enter_context(MemoryGroup(self.job.limit_bytes)).path
                self.job = msgspec.structs.replace(self.job, group=str(path or ""))
            super().__enter__()
            self._group = group.pop_all()
        try:
            self.send(self.job)
        except SwarmError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._group:
            super().__exit__(kind, error, at)

    def wait_until_ready(self) -> None:
        """Waits until the model is loaded; raises SwarmError if the process has ended."""
        self.ready = self.receive(Ready)

    def decode(self, prompt: list[int], new_tokens: int) -> Round:
        """Decodes greedily after a prompt; raises SwarmError if the process has ended."""
        self.send((prompt, new_tokens))
        return self.receive(Round)

    def _ended(self) -> SwarmError:
        # Its output ends a moment before it does.
        if self.process.wait(5.0) == -signal.SIGKILL and self.job.group:
            return MemoryExceededError(
                f"{self.job.arm!r} exceeded its limit of {format_bytes(self.job.limit_bytes)} and was killed by "
                "the system: give a larger --fast, or leave the arm out with --without"
            )
        return super()._ended()


@dataclass(frozen=True)
class LoadedArm:
    """A model that is ready to decode."""

    model: PreTrainedModel
    before_token: Callable[[], None]
    """Run between tokens."""


@contextlib.contextmanager
def load_arm(
    arm: ArmName,
    directory: Path,
    *,
    fast_bytes: int,
    smallest_bytes: int,
    policy: str,
    has_bounded_cache: bool,
    dtype: str | None = None,
) -> Iterator[LoadedArm]:
    """Loads the model in one of the ways; ``has_bounded_cache`` if the memory limit includes the page cache.

    Experts get ``fast_bytes``, or ``smallest_bytes`` in the arms without a cache.
    """
    if arm is ArmName.RESIDENT:
        yield LoadedArm(frozen(_load_all(directory, {})), lambda: None)
    elif arm is ArmName.ACCELERATE:
        with TemporaryDirectory(prefix=".accelerate-", dir=directory.parent) as folder:
            model = _load_all(directory, {"device_map": _experts_on_disk(directory), "offload_folder": folder})
            files = [*directory.glob("*.safetensors"), *(path for path in Path(folder).rglob("*") if path.is_file())]
            yield LoadedArm(frozen(model), (lambda: None) if has_bounded_cache else (lambda: drop_page_cache(files)))
    else:
        keeps = arm in (ArmName.FULL, ArmName.NO_GUESSES)
        config = OffloadConfig(
            fast_bytes=fast_bytes if keeps else smallest_bytes,
            prefetch=arm is ArmName.FULL,
            policy=policy if keeps else "counting",
        )
        model = load_offloaded(directory, config, dtype=dtype, device="cpu")
        if arm is ArmName.NAIVE:
            _read_every_expert(model)
        yield LoadedArm(frozen(model), lambda: None)


def _read_every_expert(model: PreTrainedModel) -> None:
    """Lets each layer borrow all its experts, whichever it computes with."""
    for module in filter(is_fused_experts, model.modules()):
        loans: Any = module._loans
        loans.borrow = functools.partial(_borrow_all, loans.borrow, range(int(module.num_experts)))  # type: ignore[arg-type]


def _borrow_all(borrow: Callable[..., Any], every: range, experts: Sequence[int], **options: Any) -> Iterator[Any]:
    with contextlib.closing(borrow(every, **options)) as lent:
        yield from (loan for loan in lent if loan[0] in experts)


def _load_all(directory: Path, options: dict[str, Any]) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", experts_implementation="grouped_mm", **options
    )
    return model


def _experts_on_disk(directory: Path) -> dict[str, str]:
    """Returns a device map that keeps all but the experts in memory."""
    checkpoint = Checkpoint.open(directory)
    places: dict[str, str] = {}
    _place(meta_model(checkpoint.config, stored_dtype(checkpoint)), "", places)
    return places


def _place(module: nn.Module, name: str, places: dict[str, str]) -> None:
    if is_fused_experts(module):
        places[name] = "disk"
    elif name and not any(is_fused_experts(inner) for inner in module.modules()):
        places[name] = "cpu"
    else:
        prefix = f"{name}." if name else ""
        places.update({f"{prefix}{own}": "cpu" for own, _ in module.named_parameters(recurse=False)})
        for inner_name, inner in module.named_children():
            _place(inner, f"{prefix}{inner_name}", places)


def drop_page_cache(files: list[Path]) -> None:
    """Makes the next read of the files come from disk, as under a limit without room for their pages."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # Dirty pages cannot be dropped.
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def main() -> None:
    """Runs an arm: reads a job, then decodes until the end of the input."""
    job = next(jobs(Job))
    arm, directory = ArmName(job.arm), Path(job.directory)
    resident = own("status", "VmRSS")
    _limit_memory(job, arm)
    started, written = time.perf_counter(), own("io", "write_bytes")
    with ExitStack() as stack:
        # Progress bars of several processes would overwrite each other.
        with contextlib.redirect_stderr(io.StringIO()):
            arm_loading = load_arm(
                arm,
                directory,
                fast_bytes=job.fast_bytes,
                smallest_bytes=job.smallest_bytes,
                policy=job.policy,
                has_bounded_cache=bool(job.group),
                dtype=job.dtype,
            )
            loaded = stack.enter_context(arm_loading)
        load_s = time.perf_counter() - started
        answer(Ready(load_s=load_s, written_bytes=own("io", "write_bytes") - written))
        for prompt, new_tokens in jobs(tuple[list[int], int]):
            answer(_decode(loaded, torch.tensor([prompt]), new_tokens, resident))


def _limit_memory(job: Job, arm: ArmName) -> None:
    if job.group:
        join(Path(job.group))  # without the libraries, which are in memory by now
    elif job.limit_bytes and arm.is_ours:
        limit = own("status", "VmData") + job.limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


@dataclass(frozen=True)
class _Note:
    """State of the process at a token."""

    at: float
    cpu_s: float
    read_bytes: int
    stats: OffloadStats | None


def _decode(loaded: LoadedArm, prompt: Tensor, new_tokens: int, resident: int) -> Round:
    pauses_s: list[float] = []

    def note() -> _Note:
        stats = getattr(loaded.model, "offload_stats", None)
        taken = _Note(
            time.perf_counter(), time.process_time(), own("io", "read_bytes"), None if stats is None else stats()
        )
        loaded.before_token()
        pauses_s.append(time.perf_counter() - taken.at)
        return taken

    tokens, notes = generate(loaded.model, prompt, new_tokens, note)
    first, last, steps = notes[0], notes[-1], new_tokens - 1
    return Round(
        tokens=tokens,
        # Decoding does not include the pauses between tokens; that after the last one is not between any.
        seconds_per_token=(last.at - first.at - sum(pauses_s[:-1])) / steps,
        cpu_s=(last.cpu_s - first.cpu_s) / steps,
        read_bytes=(last.read_bytes - first.read_bytes) / steps,
        peak_bytes=own("status", "VmHWM") - resident,
        **_experts(first.stats, last.stats, steps),
    )


def _experts(first: OffloadStats | None, last: OffloadStats | None, steps: int) -> dict[str, float | None]:
    """Returns the expert figures between two tokens."""
    if first is None or last is None:
        return {"hit_ratio": None, "recall": None, "stall_s": None}
    asked = last.hits + last.misses - first.hits - first.misses
    guessed = last.asked_after_guess - first.asked_after_guess
    return {
        "hit_ratio": (last.hits - first.hits) / asked if asked else None,
        "recall": (last.guesses_used - first.guesses_used) / guessed if guessed else None,
        "stall_s": (last.stall_s - first.stall_s) / steps,
    }
