"""Evaluates versions of an adapter: only what is missing, each score kept on disk as soon as it is there."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from swarm_plugins.errors import CheckpointError, ConfigError, NumericError, SwarmError, UnsupportedError
from swarm_plugins.evaluation.plot import check_plot, draw_results
from swarm_plugins.evaluation.scoring import Tasks, software
from swarm_plugins.evaluation.tasks import EvalSettings, EvalTask
from swarm_plugins.evaluation.versions import TaggedVersion, base_to_use, bases_of, find_versions
from swarm_plugins.hub.push import RetryPlan
from swarm_plugins.hub.results import EvalRecord, Score, add_results
from swarm_plugins.hub.results_push import ResultsRepository
from swarm_plugins.kept_files import write_whole
from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

# Of one version alone; after any other error the next versions would fail too.
_OF_A_VERSION = (ConfigError, CheckpointError, NumericError, UnsupportedError)

Load = Callable[[TaggedVersion, ModelVersion], tuple[Any, Any]]
"""Loads a version's model, on its base, and the tokenizer; no adapter if the version ``is_base``."""


@dataclass(frozen=True, kw_only=True)
class EvalJob:
    """What to evaluate, and where the results go."""

    repo_id: str
    """Repository of the adapter."""
    tasks: Sequence[str]
    """Files, or names of lm_eval's tasks."""
    tags: Sequence[str] = ()
    """Versions. Empty: the newest."""
    all_versions: bool = False
    """Whether every tagged version is evaluated."""
    base: ModelVersion | None = None
    """The base to use. None: the one that each version was made for."""
    with_base: bool = False
    """Whether the base is evaluated too, without an adapter, to compare with."""
    settings: EvalSettings = field(default_factory=EvalSettings)
    """How tasks are run."""
    folder: Path
    """Where results, card and plot are written; one folder for each repository."""
    push: bool = False
    """Whether they are also committed to the repository."""
    token: str | bool | None = None
    """Access token of the Hub. None: the stored one."""
    endpoint: str | None = None
    """Address of the adapter's Hub; by default ``HF_ENDPOINT``."""
    retries: RetryPlan = field(default_factory=RetryPlan)
    """Attempts and pauses of the push."""


class Evaluated(NamedTuple):
    """Result of a job."""

    records: list[EvalRecord]
    """All results, known ones too."""
    num_new: int
    """Results that were added."""
    failures: list[SwarmError]
    """Why versions were not evaluated."""
    commit: str | None
    """What was pushed; None if nothing was."""


def evaluate_versions(job: EvalJob, load: Load, *, tell: Callable[[str], None] = log.info) -> Evaluated:
    """Runs tasks on versions of an adapter, except those whose results are published or in the folder.

    Args:
        job: What to evaluate.
        load: Loads the model of a version.
        tell: Is told what begins.

    Raises:
        ConfigError: If a task file is invalid, or a version that was asked for was made for another base.
        MissingExtraError: If matplotlib is not installed.
        HubError: If the Hub does not have the versions, cannot be reached, or refuses the push.
        CheckpointError: If known results or the card cannot be understood.
        OSError: If results cannot be written; files in the folder stay as they were.
    """
    check_plot()
    tasks = Tasks(job.tasks, job.settings)
    versions = find_versions(
        job.repo_id, job.tags, all_versions=job.all_versions, token=job.token, endpoint=job.endpoint, tell=tell
    )
    if not job.all_versions:
        for version in versions:
            base_to_use(version, job.base)
    repository = ResultsRepository(job.repo_id, token=job.token, endpoint=job.endpoint, retries=job.retries)
    published = repository.read()
    # A full disk shows now, not after the work.
    known = add_results(job.folder, published.records)
    run = _Run(job, tasks, load, known, tell)
    for version in [*(bases_of(versions, job.base) if job.with_base else ()), *versions]:
        if not run.evaluate(version):
            break
    commit = None
    if run.records:
        for name, content in repository.files(published, run.records, draw_results).items():
            write_whole(job.folder / name, content)
        commit = repository.push(run.records, draw_results) if job.push else None
    return Evaluated(run.records, len(run.records) - len(known), run.failures, commit)


class _Run:
    """Evaluates one version after the other."""

    def __init__(
        self, job: EvalJob, tasks: Tasks, load: Load, known: list[EvalRecord], tell: Callable[[str], None]
    ) -> None:
        self.records = known
        self.failures: list[SwarmError] = []
        self._job = job
        self._tasks = tasks
        self._load = load
        self._tell = tell

    def evaluate(self, version: TaggedVersion) -> bool:
        """Evaluates a version; returns whether the next one can be."""
        try:
            base = base_to_use(version, self._job.base)
            missing = self._missing(version, base)
            if not missing:
                self._tell(f"{version.label}: all results are known")
                return True
            gc.collect()  # lm_eval's wrapper is a reference cycle that keeps the previous version's model
            model, tokenizer = self._load(version, base)
            for task in missing:
                self._tell(f"{version.label}: evaluating {task.name}")
                scores = self._tasks.score(task, model, tokenizer)
                new = [_record(version, base, score) for score in scores]
                self.records = add_results(self._job.folder, new)
        except SwarmError as exc:
            _forget_frames(exc)
            self.failures.append(exc)
            return isinstance(exc, _OF_A_VERSION)
        return True

    def _missing(self, version: TaggedVersion, base: ModelVersion) -> list[EvalTask]:
        done = {(one.commit, one.base_revision, one.setting) for one in self.records}
        setting = self._tasks.setting
        return [one for one in self._tasks.tasks if (version.commit, base.revision, setting(one)) not in done]


def _forget_frames(error: BaseException | None) -> None:
    """Drops the tracebacks of an error and its causes; their frames keep the model alive."""
    if error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        _forget_frames(error.__cause__)
        _forget_frames(error.__context__)


def _record(version: TaggedVersion, base: ModelVersion, score: Score) -> EvalRecord:
    return EvalRecord(
        **msgspec.structs.asdict(score),
        tag=version.tag,
        commit=version.commit,
        base=base.name,
        base_revision=base.revision,
        software=software(),
    )
