"""Decides when to publish a version of an adapter; shared by the callbacks for Lightning and transformers."""

from __future__ import annotations

import atexit
import logging
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from torch import Tensor, nn

from swarm_plugins.callbacks.evaluating import EvalWorker, check_tasks, eval_options
from swarm_plugins.callbacks.saving import AdapterSource, find_adapter, manifest_of, write_version
from swarm_plugins.errors import ConfigError, SwarmError, one_line
from swarm_plugins.evaluation.tasks import is_task_file
from swarm_plugins.hub import AdapterFacts, PushedVersion, PushTarget, PushWorker, RetryPlan
from swarm_plugins.hub.folder import push_command
from swarm_plugins.hub.names import check_repo_id
from swarm_plugins.model_names import expanded

log = logging.getLogger(__name__)

Event = Literal["save", "best", "end"]
_EVENTS = ("save", "best", "end")
_INTERRUPTED_S = 10.0
# Logged by trainers, but not metrics of the model.
_NOT_METRICS = ("_runtime", "_per_second", "epoch", "step", "_jit_compilation_time")


class Publishing:
    """Publishes versions of the trained adapter to a repository on the Hub, in the background.

    A version is one commit with the adapter, its card and ``swarm.json``, and then a tag: v1, v2 ... If publishing
    fails, training goes on, the files stay in a folder, and a warning names the command that publishes them later.

    Args:
        repo_id: The repository, such as ``me/my-adapter``; created if missing.
        on: When: at each ``save`` of a checkpoint, at each new ``best`` of the monitored metric, at the ``end``.
        monitor: Metric for ``best``. None: the one by which the trainer keeps its best checkpoint.
        mode: Whether the best value is the smallest (``min``) or the largest (``max``).
        folder: Where versions are written. None: ``hub_adapters`` in the trainer's own folder.
        private: Whether a new repository is private.
        token: Access token of the Hub. None: the one that ``hf auth login`` stored, or ``HF_TOKEN``.
        endpoint: Address of the Hub; by default ``HF_ENDPOINT``.
        base_model: Id of the base on the Hub, if it was loaded from a directory.
        tags: More tags for the card.
        dataset: Id of the dataset behind the metrics, for the card.
        eval_tasks: Tasks of lm_eval, files or names, that each published version is evaluated on: by `swarm eval` in a
            process of its own, one at a time with low priority, on the same swarm; without a swarm, it loads the base
            once more. The results are published too.
        eval_s: Longest evaluation of a version, in seconds; after that it has failed, and the next one begins.
        finish_s: Longest wait for pending uploads and evaluations after training.
        retries: Attempts and pauses of each upload.

    Raises:
        ConfigError: If a setting is wrong.
    """

    def __init__(
        self,
        repo_id: str,
        *,
        on: Sequence[Event] = ("save", "best", "end"),
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        folder: str | Path | None = None,
        private: bool = False,
        token: str | bool | None = None,
        endpoint: str | None = None,
        base_model: str | None = None,
        tags: Sequence[str] = (),
        dataset: str | None = None,
        eval_tasks: Sequence[str | Path] = (),
        eval_s: float = 3600.0,
        finish_s: float = 300.0,
        retries: RetryPlan | None = None,
    ) -> None:
        unknown = [event for event in on if event not in _EVENTS]
        if isinstance(on, str) or unknown or not on:
            raise ConfigError(f"on={on!r} must be a list of some of {', '.join(_EVENTS)}")
        if mode not in ("min", "max"):
            raise ConfigError(f"mode={mode!r} must be 'min' or 'max'")
        if not eval_s > 0:
            raise ConfigError(f"eval_s={eval_s} must be above 0")
        if finish_s < 0:
            raise ConfigError(f"finish_s={finish_s} must be at least 0")
        self.repo_id = check_repo_id(repo_id)
        self.base_model = None if base_model is None else check_repo_id(base_model)
        self.on = tuple(on)
        self.monitor = monitor
        self.mode = mode
        self.folder = None if folder is None else expanded(folder)
        self.private = private
        self.tags = tuple(tags)
        self.dataset = dataset
        if isinstance(eval_tasks, str):
            raise ConfigError(f"eval_tasks={eval_tasks!r} must be a list of files and names of tasks")
        self.eval_tasks = tuple(str(one) for one in eval_tasks)
        self.endpoint = endpoint
        self.eval_s = eval_s
        self.finish_s = finish_s
        self.best: float | None = None
        """Best value of the monitored metric so far."""
        self.pushed: list[PushedVersion] = []
        """Published versions."""
        self.unpushed: list[Path] = []
        """Folders of versions that were not published."""
        self.unevaluated: list[str] = []
        """Tags of published versions whose evaluation failed, or did not end in time."""
        self._token = token
        self._retries = retries
        self._source: AdapterSource | None = None
        self._root = Path()
        self._worker: PushWorker | None = None
        self._evaluator: EvalWorker | None = None
        self._digest: str | None = None
        self._step: int | None = None

    def begin(self, module: nn.Module, default_folder: Path) -> None:
        """Finds the adapter and starts the worker, before the first step.

        Raises:
            ConfigError: If there is no adapter to train, or ``eval_tasks`` cannot evaluate it.
            MissingExtraError: If there are ``eval_tasks`` and lm_eval is not installed.
        """
        self._close(0.0)  # of a run that failed: transformers' Trainer reports no errors
        atexit.register(self._close, min(_INTERRUPTED_S, self.finish_s))
        self._source = find_adapter(module)
        self._root = (self.folder or default_folder / "hub_adapters").absolute()
        if self.eval_tasks:
            self._evaluator = self._make_evaluator(self._source)
        self._worker = PushWorker(token=self._token, retries=self._retries, on_pushed=self._on_pushed)
        self._digest = self._step = None
        if self._source.base is None and self.base_model is None:
            log.warning(
                "unknown base of %s (the model was not loaded from the Hub or a directory): the adapter is published "
                "without the base's version",
                self.repo_id,
            )

    def publish(self, event: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes a version and queues it; logs failures instead of raising."""
        if self._worker is None:
            return
        written = self._write(event, step, metrics)
        if written is not None:
            self._worker.submit(*written)

    def publish_if_best(self, monitor: str | None, mode: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Publishes if the monitored metric is at a new best; what is evaluated outside of training does not count."""
        if self._worker is None or "best" not in self.on or not self.note_if_best(monitor, mode, metrics):
            return
        if step > 0:  # nothing is trained at step 0 (transformers' eval_on_start)
            self.publish("best", step, metrics)

    def note_if_best(self, monitor: str | None, mode: str, metrics: Mapping[str, Any]) -> bool:
        """Notes a new best of the monitored metric; returns whether it was one."""
        value = _number(metrics.get(monitor)) if monitor is not None else None
        if value is None or (self.best is not None and (value >= self.best if mode == "min" else value <= self.best)):
            return False
        self.best = value
        return True

    def finish(self) -> None:
        """Waits up to ``finish_s`` for pending uploads and evaluations."""
        self._close(self.finish_s)

    def interrupt(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes what was trained since the last version, unpublished, and stops within seconds."""
        if self._worker is None:
            return
        if step > 0 and step != self._step:
            written = self._write("interrupted", step, metrics)
            if written is not None:
                folder, target = written
                self.unpushed.append(folder)
                how = push_command(folder, target.endpoint)
                log.warning("training was interrupted: the adapter is in %s; publish it with: %s", folder, how)
        self._close(min(_INTERRUPTED_S, self.finish_s))

    def _close(self, timeout_s: float) -> None:
        atexit.unregister(self._close)
        worker, evaluator = self._worker, self._evaluator
        deadline = time.monotonic() + timeout_s
        self._source = None
        if worker is not None:
            self.unpushed += worker.close(timeout_s)
            self.pushed += worker.pushed
            self._worker = None
        if evaluator is not None:
            self.unevaluated += evaluator.close(max(0.0, deadline - time.monotonic()))
            self._evaluator = None

    def _write(self, event: str, step: int, metrics: Mapping[str, Any]) -> tuple[Path, PushTarget] | None:
        if self._source is None:
            return None
        try:
            return self._written(self._source, event, step, _numbers(metrics))
        except (OSError, RuntimeError, ValueError, KeyError, SwarmError, SafetensorError) as exc:
            log.warning(
                "the adapter at step %d could not be written to %s (%s); training goes on, and the next version "
                "is tried again; free some space or choose another folder=",
                step,
                self._root,
                one_line(exc, with_kind=True),
            )
            return None

    def _written(
        self, source: AdapterSource, event: str, step: int, metrics: dict[str, float]
    ) -> tuple[Path, PushTarget] | None:
        manifest = manifest_of(source, event=event, step=step, metrics=metrics)
        facts = AdapterFacts(
            repo_id=self.repo_id,
            pipeline_tag=source.pipeline_tag,
            base_model=self.base_model or _hub_name(source),
            tags=self.tags,
            dataset=self.dataset,
            distillation=getattr(source.model.get_base_model().config, "distillation", None),
        )
        target = PushTarget(repo_id=self.repo_id, private=self.private, endpoint=self.endpoint)
        folder, digest = write_version(source, self._root, f"step-{step:08d}-{event}", facts, manifest, target)
        self._step = step
        if digest == self._digest:
            # Saved, best and ended at the same step: one version.
            shutil.rmtree(folder, ignore_errors=True)
            return None
        self._digest = digest
        return folder, target

    def _make_evaluator(self, source: AdapterSource) -> EvalWorker:
        check_tasks(self.eval_tasks)
        options = [part for task in self.eval_tasks for part in ("--task", _absolute(task))] + eval_options(source)
        options += ["--endpoint", self.endpoint] if self.endpoint is not None else []
        log.info(
            "each version published to %s is evaluated on %s by a process of its own, which uses %s",
            self.repo_id,
            ", ".join(self.eval_tasks),
            "memory for another copy of the base" if "--local" in options else "the same servers",
        )
        return EvalWorker(self.repo_id, options, self._root / "evaluation", token=self._token, timeout_s=self.eval_s)

    def _on_pushed(self, pushed: PushedVersion) -> None:
        """Queues a published version's evaluation. Called in the worker's thread."""
        if self._evaluator is not None:
            self._evaluator.submit(pushed.tag)
        self._tidy(pushed)

    def _tidy(self, pushed: PushedVersion) -> None:
        """Deletes older published versions from disk."""
        worker = self._worker
        for version in worker.pushed if worker is not None else []:
            if version.folder != pushed.folder:
                shutil.rmtree(version.folder, ignore_errors=True)


def _absolute(task: str) -> str:
    return str(expanded(task).absolute()) if is_task_file(task) else task


def _hub_name(source: AdapterSource) -> str | None:
    return None if source.base is None or source.base.is_local else source.base.name


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics that are finite numbers."""
    found = {}
    for name, value in metrics.items():
        number = _number(value)
        if number is not None and not name.endswith(_NOT_METRICS):
            found[str(name)] = number
    return found


def _number(value: Any) -> float | None:
    try:
        value = value.detach() if isinstance(value, Tensor) else value
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number if math.isfinite(number) else None
