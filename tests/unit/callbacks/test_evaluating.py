"""Published versions are evaluated by processes of their own; whatever these do, the training goes on."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from swarm_plugins.callbacks import evaluating
from swarm_plugins.callbacks.evaluating import EvalWorker, check_tasks, eval_options
from swarm_plugins.callbacks.publishing import Publishing
from swarm_plugins.callbacks.saving import find_adapter
from swarm_plugins.errors import ConfigError, MissingExtraError
from swarm_plugins.local_hub import LocalHub

Adapted = Callable[..., PeftModel]
WAIT_S = 30.0


class Processes:
    """Stands for `swarm eval`: notes each command, and runs a script instead."""

    def __init__(self, script: str = "") -> None:
        self.script = script
        self.commands: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.started = threading.Event()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes()
    monkeypatch.setattr(evaluating.subprocess, "Popen", _only_ours(made, subprocess.Popen))
    return made


def _only_ours(made: Processes, real: Any) -> Any:
    def start(command: list[str], **options: Any) -> Any:
        if "eval" in command:
            made.commands.append(command[command.index("eval") :])
            made.environments.append(options["env"])
            process = real([sys.executable, "-c", made.script], **options)
            made.started.set()
            return process
        return real(command, **options)

    return start


def worker(folder: Path, **options: Any) -> EvalWorker:
    return EvalWorker("me/adapter", ["--task", "mine.yaml", "--local"], folder, **options)


def test_versions_are_evaluated_in_order_and_the_token_is_not_on_the_command_line(
    processes: Processes, tmp_path: Path
) -> None:
    one = worker(tmp_path / "evaluation", token="secret")
    one.submit("v1")
    one.submit("v2")
    assert one.close(WAIT_S) == []
    assert one.evaluated == ["v1", "v2"]
    tags = [word for command in processes.commands for word in command if word.startswith("v")]
    assert tags == ["v1", "v2"]
    assert processes.commands[0][:6] == ["eval", "me/adapter", "--task", "mine.yaml", "--local", "--out"]
    assert "--push" in processes.commands[0]
    assert processes.environments[0]["HF_TOKEN"] == "secret"
    assert "secret" not in " ".join(processes.commands[0])


def test_a_failure_is_a_warning_with_its_last_line_and_the_command(
    processes: Processes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    processes.script = "import sys; print('noise'); sys.exit('swarm eval: no living server holds blocks 0:1')"
    one = worker(tmp_path)
    with caplog.at_level(logging.WARNING):
        one.submit("v1")
        assert one.close(WAIT_S) == ["v1"]
    assert "evaluation of v1 failed (swarm eval: no living server holds blocks 0:1); training goes on" in caplog.text
    assert "swarm eval me/adapter --task mine.yaml --local" in caplog.text
    assert "--version v1" in caplog.text


def test_an_evaluation_that_takes_too_long_is_ended(
    processes: Processes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    processes.script = "import time; time.sleep(600)"
    one = worker(tmp_path)
    with caplog.at_level(logging.WARNING):
        one.submit("v1")
        assert processes.started.wait(WAIT_S)
        one.submit("v2")
        assert one.close(0.0) == ["v1", "v2"]  # the fixture of all tests sees that no process is left
    assert "no time for the evaluation of v1, v2; evaluate with: swarm eval me/adapter" in caplog.text
    assert "--version v1 --version v2" in caplog.text


def test_a_folder_that_cannot_be_made_is_a_warning(
    processes: Processes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    one = worker(tmp_path / "file" / "evaluation")
    with caplog.at_level(logging.WARNING):
        one.submit("v1")
        assert one.close(WAIT_S) == ["v1"]
    assert "evaluation of v1 failed (" in caplog.text


def test_the_callback_evaluates_what_it_publishes(
    processes: Processes, hub: LocalHub, adapted: Adapted, base_dir: Path, tmp_path: Path
) -> None:
    task = tmp_path / "mine.yaml"
    task.write_text("task: mine\ndataset_path: org/data\n")
    publisher = Publishing("me/adapter", endpoint=hub.endpoint, token="token", eval_tasks=[task, "arc_easy"])
    publisher.begin(adapted(), tmp_path)
    publisher.publish("end", 1, {})
    publisher.finish()
    assert publisher.unevaluated == []
    (command,) = processes.commands
    folder = tmp_path / "hub_adapters" / "evaluation"
    assert command == [
        *["eval", "me/adapter", "--task", str(task), "--task", "arc_easy", "--base", str(base_dir), "--local"],
        *["--endpoint", hub.endpoint, "--out", str(folder), "--push", "--version", "v1"],
    ]


def test_what_cannot_be_evaluated_is_refused_before_the_training(
    hub: LocalHub, adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*tasks: str | Path) -> None:
        Publishing("me/adapter", endpoint=hub.endpoint, eval_tasks=tasks).begin(adapted(), tmp_path)

    with pytest.raises(ConfigError, match=r"eval_tasks='a.yaml' must be a list"):
        Publishing("me/adapter", eval_tasks="a.yaml")
    with pytest.raises(ConfigError, match=r"none.yaml cannot be read"):
        begin(tmp_path / "none.yaml")
    monkeypatch.setattr(evaluating.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"lm_eval is missing: install it.*'.\[eval\]'"):
        check_tasks(["arc_easy"])


def test_a_base_that_another_process_cannot_have_is_refused(adapted: Adapted, base_dir: Path) -> None:
    source = find_adapter(adapted())
    assert eval_options(source) == ["--base", str(base_dir), "--local"]
    source.model.get_base_model().offload_stats = dict
    with pytest.raises(ConfigError, match=r"would load the whole base, which is offloaded here"):
        eval_options(source)
