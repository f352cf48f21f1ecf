"""Evaluates published versions while training goes on: `swarm eval` in a process of its own.

A separate process, because an evaluation must be of the version's weights, which the training has changed meanwhile;
because lm_eval seeds random numbers and keeps a core busy; and because its failure must not be the training's.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm_plugins.backbone.served import stack_of, swarm_connection
from swarm_plugins.callbacks.saving import AdapterSource
from swarm_plugins.child import Process
from swarm_plugins.errors import ConfigError, naming_extras, one_line
from swarm_plugins.evaluation.tasks import is_task_file, read_task_file
from swarm_plugins.hub.worker import BackgroundQueue

log = logging.getLogger(__name__)

_POLL_S = 0.2
_LEAVE_S = 5.0


def check_tasks(tasks: Sequence[str]) -> None:
    """Checks, before a training, what an evaluation needs.

    Raises:
        ConfigError: If a file is not a task file.
        MissingExtraError: If lm_eval or matplotlib is not installed.
    """
    with naming_extras():
        for package in ("lm_eval", "matplotlib"):
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    for task in filter(is_task_file, tasks):
        read_task_file(task)


def eval_options(source: AdapterSource) -> list[str]:
    """Returns the options of ``swarm eval`` for the base of an adapter in training: the base, and its swarm.

    Raises:
        ConfigError: If another process cannot have that base.
    """
    base: Any = source.model.get_base_model()
    if source.base is None:
        raise ConfigError(
            "eval_tasks needs a base that was loaded from the Hub or a directory: the model's is not known"
        )
    stack = stack_of(base)
    options: list[str] = []
    if source.base.is_local:
        name = stack.model if stack is not None else base.config.name_or_path
        options = ["--base", str(Path(str(name)).absolute())]
    if stack is None:
        if hasattr(base, "offload_stats"):
            raise ConfigError(
                "eval_tasks would load the whole base, which is offloaded here: run `swarm eval` elsewhere"
            )
        return [*options, "--local"]
    connection = swarm_connection(base)
    if not connection.initial_peers:
        raise ConfigError(
            "eval_tasks needs addresses of the swarm: load the model with initial_peers=, not connection="
        )
    config = connection.config
    if config.allowed_peers is not None or any(config.local_blocks):
        raise ConfigError(
            "eval_tasks would send texts to servers that allowed_peers or local_blocks keep yours from: leave it out, "
            "and run `swarm eval` for published versions where all servers may read the tasks"
        )
    for address in connection.initial_peers:
        options += ["--initial-peers", address]
    options += ["--discovery", config.discovery] if config.discovery != "dht" else []
    # Not the identity, which this process has in use: another one of the same would be refused.
    return options + (["--secret-file", str(config.secret_file.absolute())] if config.secret_file is not None else [])


class EvalWorker(BackgroundQueue[str]):
    """Runs ``swarm eval`` for published versions, one version and one process at a time.

    The processes end with this one, even if it is killed.

    Args:
        repo_id: Repository of the adapter.
        options: Options of the command, such as tasks and the base.
        folder: Where results and the process's output are written.
        token: Access token of the Hub. None: the stored one.
        timeout_s: Longest evaluation of a version.
    """

    def __init__(
        self,
        repo_id: str,
        options: Sequence[str],
        folder: Path,
        *,
        token: str | bool | None = None,
        timeout_s: float = 3600.0,
    ) -> None:
        # The process gets some time to end, and is killed.
        super().__init__("swarm-eval", leave_s=2 * _LEAVE_S)
        self.evaluated: list[str] = []
        """Tags of evaluated versions."""
        self.failed: list[str] = []
        """Tags of versions whose evaluation failed."""
        self._command = ["eval", repo_id, *options, "--out", str(folder), "--push"]
        self._folder = folder
        self._token = token
        self._timeout_s = timeout_s

    def submit(self, tag: str) -> None:
        """Queues a version."""
        self._add(tag)

    def close(self, timeout_s: float) -> list[str]:
        """Waits up to ``timeout_s`` for the queue, ends the process, and returns the versions without results."""
        # One of them may have ended since.
        late = [tag for tag in self._end(timeout_s) if tag not in (*self.evaluated, *self.failed)]
        if late:
            log.warning("no time for the evaluation of %s; evaluate with: %s", ", ".join(late), self._for_user(late))
        return [*self.failed, *late]

    def _work(self, tag: str, stop: threading.Event) -> None:
        """Evaluates a version, or notes that it failed."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            process = self._start(tag)
            code = self._waited(process, stop)
            said = one_line(ValueError(process.end_of_log[-1])) if process.end_of_log else "it said nothing"
            reason = said if code is not None else f"not finished within {self._timeout_s:g} s"
        except OSError as exc:
            code, reason = -1, one_line(exc)
        if code is None and stop.is_set():
            return
        if code == 0:
            log.info("%s evaluated; results are in %s", tag, self._folder)
            self.evaluated.append(tag)
        else:
            again = self._for_user([tag])
            log.warning("evaluation of %s failed (%s); training goes on; evaluate with: %s", tag, reason, again)
            self.failed.append(tag)

    def _start(self, tag: str) -> Process:
        environment: Mapping[str, str] = {"OMP_NUM_THREADS": "1", **os.environ, "TQDM_DISABLE": "1"}
        if isinstance(self._token, str):
            # Other users can read command lines.
            environment = {**environment, "HF_TOKEN": self._token}
        log_file = self._folder / "log.txt"
        log_file.unlink(missing_ok=True)
        nice = ["nice"] if shutil.which("nice") else []
        command = [*nice, sys.executable, "-m", "swarm_plugins", *self._command, "--version", tag]
        return Process([*command, "--parent", str(os.getpid())], environment, log_file, is_asked=False)

    def _waited(self, process: Process, stop: threading.Event) -> int | None:
        """Returns the exit code; None if the process was ended because time was up."""
        deadline = time.monotonic() + self._timeout_s
        while process.is_alive and time.monotonic() < deadline and not stop.wait(_POLL_S):
            pass
        if not process.is_alive:
            return process.status
        process.terminate(timeout_s=_LEAVE_S)
        return None

    def _for_user(self, tags: list[str]) -> str:
        return shlex.join(["swarm", *self._command, *(part for tag in tags for part in ("--version", tag))])
