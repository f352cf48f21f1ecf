"""``results.jsonl``: what versions of an adapter scored on tasks, one record a line, on the main branch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from filelock import FileLock, Timeout

from swarm_plugins.errors import CheckpointError, one_line
from swarm_plugins.kept_files import write_whole

RESULTS_FILE = "results.jsonl"
BASE_TAG = "(base)"
"""In place of a tag: the score of the base without an adapter. No tag has parentheses."""
MAX_RESULTS_BYTES = 16 << 20
_LOCK_S = 20.0
_SHORT_DIGEST = 7

Word = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Hex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8,64}$")]
Revision = Annotated[str, msgspec.Meta(pattern=r"^(local-)?[0-9a-f]{8,64}$")]


class TaskSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A task and how it is run; scores of equal settings can be compared."""

    task: Word
    """The task's name."""
    task_digest: Hex
    """SHA-256 of the task's file, the files it includes and its local data."""
    num_fewshot: int = 0
    """Examples before each question."""
    limit: int | None = None
    """Largest number of samples. None: all."""
    chat_template: bool = False
    """Whether questions are turns of a chat."""

    def label(self, *, with_digest: bool = False) -> str:
        """Returns the task's name and whatever is not the default."""
        more = [f"{self.num_fewshot}-shot"] if self.num_fewshot else []
        more += [f"first {self.limit}"] if self.limit is not None else []
        more += ["chat"] if self.chat_template else []
        more += [self.task_digest[:_SHORT_DIGEST]] if with_digest else []
        return f"{self.task} ({', '.join(more)})" if more else self.task


class Score(TaskSetting, frozen=True, kw_only=True):
    """A metric's value on a task."""

    metric: Word
    """lm_eval's name, such as ``acc``."""
    filter: Word = "none"
    """lm_eval's filter of the answers; ``none`` for all."""
    value: float
    """What the version scored."""
    stderr: float | None = None
    """Standard error of the value. None: not known."""
    num_samples: Annotated[int, msgspec.Meta(ge=0)]
    """Samples evaluated."""
    higher_is_better: bool | None = None
    """None: not known."""


class EvalRecord(Score, frozen=True, kw_only=True):
    """One line: what a version scored."""

    tag: Word
    """The version's tag; ``(base)`` for the base without an adapter."""
    commit: Revision
    """Its commit; the base's revision for the base."""
    base: Word
    """Id of the base on the Hub, or the name of its directory."""
    base_revision: Revision
    """Its commit, or ``local-`` and the fingerprint of its content."""
    software: dict[Word, Word] = {}
    """Versions of the packages that computed it."""

    @property
    def setting(self) -> TaskSetting:
        """The task and how it was run."""
        return TaskSetting(**{name: getattr(self, name) for name in TaskSetting.__struct_fields__})

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for records that measure the same."""
        return (self.commit, self.base_revision, self.setting, self.metric, self.filter)

    @property
    def metric_label(self) -> str:
        """The metric, and the filter if there is one."""
        return self.metric if self.filter == "none" else f"{self.metric} ({self.filter})"


def parse_results(content: bytes, label: str) -> list[EvalRecord]:
    """Reads records; the label names the file in messages.

    Raises:
        CheckpointError: If a line cannot be understood.
    """
    records = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            records.append(_DECODER.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise CheckpointError(
                f"line {number} of {label} is not a result ({one_line(exc)}); correct or remove it"
            ) from exc
    return records


_DECODER = msgspec.json.Decoder(EvalRecord)


def format_results(records: Iterable[EvalRecord]) -> bytes:
    """Returns the records as lines of JSON."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def as_builtins(records: Iterable[EvalRecord]) -> list[dict[str, Any]]:
    """Returns the records as dictionaries, to be printed as JSON."""
    return [msgspec.to_builtins(record) for record in records]


def merged(*lists: Iterable[EvalRecord]) -> list[EvalRecord]:
    """Returns all records in their order; of those that measure the same, the first."""
    found: dict[tuple[object, ...], EvalRecord] = {}
    for records in lists:
        for record in records:
            found.setdefault(record.key, record)
    return list(found.values())


def read_results(folder: Path) -> list[EvalRecord]:
    """Reads the records in a folder; none if the file does not exist.

    Raises:
        CheckpointError: If they cannot be understood, or are too many.
        OSError: If the file cannot be read.
    """
    file = folder / RESULTS_FILE
    if not file.exists():
        return []
    size = file.stat().st_size
    if size > MAX_RESULTS_BYTES:
        raise CheckpointError(f"{file} has {size} bytes; results have at most {MAX_RESULTS_BYTES}")
    return parse_results(file.read_bytes(), str(file))


def add_results(folder: Path, records: Iterable[EvalRecord]) -> list[EvalRecord]:
    """Adds records to the file in a folder, each once, and returns all of them.

    The file holds all of the old records or all of the new ones, at any time; two processes may add at once.

    Raises:
        CheckpointError: If the file cannot be understood, or another process keeps it locked.
        OSError: If it cannot be written; it stays as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / f".{RESULTS_FILE}.lock", timeout=_LOCK_S):
            found = merged(read_results(folder), records)
            write_whole(folder / RESULTS_FILE, format_results(found))
            return found
    except Timeout as exc:
        raise CheckpointError(
            f"{folder / RESULTS_FILE} has been locked by another process for {_LOCK_S:.0f} s; try again later"
        ) from exc


def in_order(tags: Iterable[str]) -> list[str]:
    """Returns tags of versions from old to new: ``v2`` before ``v10``, ``1.9`` before ``1.10``."""

    def place(tag: str) -> list[tuple[bool, int, str]]:
        parts = filter(None, re.split(r"(\d{1,18})", tag))
        return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]

    return sorted(tags, key=place)


class Series(NamedTuple):
    """A metric of a task over the versions of an adapter."""

    label: str
    """Task, settings that are not the default, and metric."""
    records: tuple[EvalRecord, ...]
    """One per version, from old to new."""


def series_of(records: Sequence[EvalRecord]) -> list[Series]:
    """Groups records by task, setting and metric, in the order of their first appearance."""
    groups: dict[tuple[TaskSetting, str], list[EvalRecord]] = {}
    for one in records:
        groups.setdefault((one.setting, one.metric_label), []).append(one)
    labels = Counter(setting.label() for setting in {setting for setting, _ in groups})
    found = []
    for (setting, metric), group in groups.items():
        # A tag may have been moved: its last record counts.
        by_tag = {record.tag: record for record in group}
        label = f"{setting.label(with_digest=labels[setting.label()] > 1)} {metric}"
        found.append(Series(label, tuple(by_tag[tag] for tag in in_order(by_tag))))
    return found
