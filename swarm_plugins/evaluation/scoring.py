"""Runs lm_eval's tasks on a loaded model."""

from __future__ import annotations

import contextlib
import copy
import difflib
import errno
import functools
import importlib.metadata
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval.utils
import msgspec
import numpy as np
import torch
from jinja2 import BaseLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from lm_eval.api.registry import metric_registry
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from swarm_plugins.errors import (
    CapacityError,
    ConfigError,
    HubError,
    NumericError,
    SwarmError,
    is_out_of_memory,
    one_line,
)
from swarm_plugins.evaluation.tasks import EvalSettings, EvalTask, digest_of_files, is_task_file, read_task_file
from swarm_plugins.hub.results import Score, TaskSetting
from swarm_plugins.hub_errors import translated_hub_errors
from swarm_plugins.noise import without_lm_eval_advice

_BOOTSTRAPS = 1000
_SEED = 1234
_PACKAGES = ("swarm_plugins", "lm_eval", "transformers", "peft", "torch")
_NEAR = 5
_NO_FORKS = "DISABLE_MULTIPROC"
_GROUPS = ("tag", "group", "task_list")
_BY_MODEL = "raised by the model, not by the task"


def software() -> dict[str, str]:
    """Returns the versions of the packages that compute scores."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


class Tasks:
    """The tasks to run: files, and tasks of lm_eval by name.

    Args:
        names: Files, names of tasks or groups, or tags of several tasks.
        settings: How they are run.

    Raises:
        ConfigError: If a file is not a task file, lm_eval has no task of a name, or the tasks of a group have different
            numbers of examples and ``settings`` none.
    """

    def __init__(self, names: Sequence[str], settings: EvalSettings) -> None:
        self.settings = settings
        # Reading the index of lm_eval's own tasks takes seconds.
        self._manager = TaskManager(include_defaults=not all(map(is_task_file, names)))
        found = [one for name in names for one in self._read(name)]
        self.tasks = list({one.name: one for one in found}.values())
        """Each task once."""
        if len({(one.name, one.digest) for one in found}) > len(self.tasks):
            twice = sorted({one.name for one in found if found.count(one) < sum(o.name == one.name for o in found)})
            raise ConfigError(f"two different tasks are named {', '.join(twice)}: rename one (task: in its file)")

    def _read(self, name: str) -> list[EvalTask]:
        if is_task_file(name):
            task = read_task_file(name, allow_code=self.settings.allow_code)
            self._check_metrics(task)
            return [task]
        index = self._manager.task_index
        if name not in index:
            near = difflib.get_close_matches(name, index, n=_NEAR, cutoff=0.5)
            hint = f"similar names: {', '.join(near)}" if near else "`lm-eval ls tasks` lists them"
            raise ConfigError(
                f"lm_eval has no task named {name!r}; {hint}; a task of your own is a file, such as {name}.yaml"
            )
        entry = index[name]
        if entry.kind.name == "TAG":
            return [one for member in sorted(entry.tags) for one in self._read(member)]
        parts = list(self._parts(name))
        few = sorted({number for _, number in parts if number is not None})
        if len(few) > 1 and self.settings.num_fewshot is None:
            raise ConfigError(
                f"the tasks of {name} have different numbers of examples ({', '.join(map(str, few))}), its results "
                "have one number: give num_fewshot for all of them, or the tasks instead of the group"
            )
        return [EvalTask(name, digest_of_files(file for file, _ in parts if file is not None), few[0] if few else 0)]

    def _parts(self, item: Any, given: Any = None) -> Iterator[tuple[Path | None, int | None]]:
        """Yields the files of a task or a group; a task's file comes with its number of examples.

        Args:
            item: A name, or what a group lists: a task or group with changes, or a group that has no name elsewhere.
            given: The number that groups around it give to their tasks.
        """
        listed = item if isinstance(item, dict) else {"task": item}
        entry = self._manager.task_index.get(str(listed.get("group") or listed.get("task")))
        if entry is None:
            file, config, members = None, listed, listed.get("task")
            if "group" not in listed:
                given = listed.get("num_fewshot", given)
        else:
            file, config, given = entry.yaml_path, entry.cfg or {}, listed.get("num_fewshot", given)
            members = sorted(entry.tags) if entry.kind.name == "TAG" else config.get("task")
        # As in lm_eval, settings of the groups around a task override those in the task's own file.
        number = config.get("num_fewshot") if given is None else given
        if not isinstance(members, list):
            yield file, number if isinstance(number, int) else 0
            return
        yield file, None
        for member in members:
            yield from self._parts(member, number)

    def _check_metrics(self, task: EvalTask) -> None:
        unknown = [name for name in task.metrics if name not in metric_registry]
        if unknown and not self.settings.allow_code:
            raise ConfigError(
                f"{task.file} has the metric {unknown[0]!r}, which lm_eval does not have: it would run the code of a "
                "metric from the Hub; give --allow-code if you trust it"
            )

    def setting(self, task: EvalTask) -> TaskSetting:
        """Returns what identifies scores of a task with these settings."""
        asked = self.settings
        return TaskSetting(
            task=task.name,
            task_digest=task.digest,
            num_fewshot=task.num_fewshot if asked.num_fewshot is None else asked.num_fewshot,
            limit=asked.limit,
            chat_template=asked.chat_template,
        )

    def score(self, task: EvalTask, model: Any, tokenizer: Any) -> list[Score]:
        """Runs a task on a model and returns each of its metrics.

        Raises:
            ConfigError: If the task cannot be run as its file says.
            NumericError: If a metric is not a number.
            CapacityError: If there is not enough memory.
            HubError: If its data cannot be fetched, or the disk has no room for them.
            SwarmError: If the model fails.
        """
        try:
            with _prepared(self.settings.allow_code):
                return self._scores(task, model, tokenizer)
        except SwarmError:
            raise
        except Exception as exc:
            _check_task_fault(task, exc)
            where = f" ({task.file})" if task.file is not None else ""
            raise ConfigError(
                f"the task {task.name}{where} cannot be run: {one_line(exc, with_kind=True)}; correct it, or its data"
            ) from exc

    def _load(self, task: EvalTask) -> Any:
        if task.file is None:
            return self._manager.load([task.name])
        # Paths of data files count from the task's folder.
        with contextlib.chdir(task.file.parent):
            # What was checked, not the file once more: it may have changed, and lm_eval reads it in its own way.
            is_checked = not self.settings.allow_code
            # A copy: lm_eval writes into it.
            alone = copy.deepcopy({key: value for key, value in task.config.items() if key not in _GROUPS})
            loaded = self._manager.load([alone if is_checked else str(task.file)])
        if read_task_file(task.file, allow_code=self.settings.allow_code).digest != task.digest:
            raise ConfigError(f"{task.file}, or a data file of it, has changed since it was read: evaluate again")
        return loaded

    def _scores(self, task: EvalTask, model: Any, tokenizer: Any) -> list[Score]:
        settings = self.settings
        loaded = self._load(task)
        for one in loaded["tasks"].values():
            if settings.num_fewshot is not None:
                one.set_config(key="num_fewshot", value=settings.num_fewshot)
            elif one.get_config("num_fewshot") is None:
                one.set_config(key="num_fewshot", value=0)
            one.set_fewshot_seed(seed=_SEED)
        report = evaluate(
            lm=_as_lm(model, tokenizer, settings.batch_size),
            task_dict=loaded,
            limit=settings.limit,
            bootstrap_iters=_BOOTSTRAPS,
            log_samples=False,
            apply_chat_template=settings.chat_template,
            # lm_eval's own default with a template.
            fewshot_as_multiturn=settings.chat_template,
            confirm_run_unsafe_code=settings.allow_code,
        )
        return _read_report(self.setting(task), report)


def _as_lm(model: Any, tokenizer: Any, batch_size: int) -> HFLM:
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    for name in ("_model_call", "_model_generate"):
        setattr(lm, name, _noting_faults()(getattr(lm, name)))
    if not sys.stderr.isatty():
        # lm_eval draws progress bars even into a pipe.
        for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            setattr(lm, name, functools.partial(getattr(lm, name), disable_tqdm=True))
    return lm


@contextlib.contextmanager
def _noting_faults() -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        exc.add_note(_BY_MODEL)
        raise


def _check_task_fault(task: EvalTask, error: Exception) -> None:
    """Raises an error of its own if the fault is not the task's: the model's, or a lack of memory, disk or network."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    if (too_large := next(filter(is_out_of_memory, causes), None)) is not None:
        raise CapacityError(
            f"there is not enough memory to run the task {task.name} ({one_line(too_large)}): free some, or evaluate "
            "on a machine that has more"
        ) from error
    if _BY_MODEL in getattr(error, "__notes__", ()):
        raise SwarmError(f"the model failed in the task {task.name}: {one_line(error, with_kind=True)}") from error
    for cause in causes:
        try:
            with translated_hub_errors(f"read the data of the task {task.name}"):
                raise cause
        except HubError as fault:
            is_disk_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
            if is_disk_full or fault.kind == "unreachable":
                raise
        except type(cause):
            continue


def _read_report(setting: TaskSetting, report: Any) -> list[Score]:
    name = setting.task
    measured = report["results"].get(name, {})
    better = report["higher_is_better"].get(name, {})
    counts = report["n-samples"].get(name, {})
    num_samples = counts.get("effective") or sum(one["effective"] for one in report["n-samples"].values())
    scores = []
    for key, value in measured.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise NumericError(f"{metric} of the task {name} is {value}: the version computes no usable numbers")
        error = measured.get(f"{metric}_stderr,{filtered}")
        is_known = isinstance(error, int | float) and math.isfinite(error)
        scores.append(
            Score(
                **msgspec.structs.asdict(setting),
                metric=metric,
                filter=filtered,
                value=float(value),
                stderr=float(error) if is_known else None,
                num_samples=num_samples,
                higher_is_better=better.get(metric),
            )
        )
    if not scores:
        raise ConfigError(f"the task {name} has no metric of its own: give the tasks of the group, one --task for each")
    return scores


@contextlib.contextmanager
def _prepared(allow_code: bool) -> Iterator[None]:
    """Keeps lm_eval from forking, printing to standard output, seeding the caller, and running templates' code.

    Random number generators are seeded as in lm_eval's `simple_evaluate`, because some tasks shuffle their choices.
    """
    plain, forks = lm_eval.utils.env, os.environ.get(_NO_FORKS)
    states = random.getstate(), np.random.get_state()
    # Its bootstrap would fork a process that has threads and connections.
    os.environ[_NO_FORKS] = "1"
    if not allow_code:
        fenced = SandboxedEnvironment(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
        fenced.filters.update(plain.filters)
        lm_eval.utils.env = fenced
    try:
        with (
            without_lm_eval_advice(),
            contextlib.redirect_stdout(sys.stderr),
            torch.random.fork_rng(devices=[]),
        ):
            random.seed(0)
            np.random.seed(_SEED)
            torch.manual_seed(_SEED)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        lm_eval.utils.env = plain
        if forks is None:
            os.environ.pop(_NO_FORKS, None)
        else:
            os.environ[_NO_FORKS] = forks
