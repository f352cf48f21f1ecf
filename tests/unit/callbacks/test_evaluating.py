"""Published versions are evaluated by processes of their own; whatever these do, the training goes on."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import PeftModel

from swarm_plugins import child
from swarm_plugins.callbacks import evaluating
from swarm_plugins.callbacks.evaluating import EvalWorker, check_tasks, eval_options
from swarm_plugins.callbacks.publishing import Publishing
from swarm_plugins.callbacks.saving import find_adapter
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.errors import ConfigError, MissingExtraError
from swarm_plugins.local_hub import LocalHub

Adapted = Callable[..., PeftModel]
WAIT_S = 30.0


class Processes:
    """Stands for `swarm eval`: notes each command, and runs a script instead."""

    def __init__(self) -> None:
        self.scripts: dict[str, str] = {}
        """By version; the others succeed at once."""
        self.commands: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.started = threading.Event()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes()
    monkeypatch.setattr(child.subprocess, "Popen", _only_ours(made, subprocess.Popen))
    return made


def _only_ours(made: Processes, real: Any) -> Any:
    def start(command: list[str], **options: Any) -> Any:
        if "eval" in command:
            made.commands.append(command[command.index("eval") :])
            made.environments.append(options["env"])
            script = made.scripts.get(command[command.index("--version") + 1])
            process = real(["true"] if script is None else [sys.executable, "-c", script], **options)
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
    processes.scripts["v1"] = "import sys; print('noise'); sys.exit('swarm eval: no living server holds blocks 0:1')"
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
    processes.scripts["v1"] = "import time; time.sleep(600)"
    one = worker(tmp_path)
    with caplog.at_level(logging.WARNING):
        one.submit("v1")
        assert processes.started.wait(WAIT_S)
        one.submit("v2")
        assert one.close(0.0) == ["v1", "v2"]  # the fixture of all tests sees that no process is left
    assert "no time for the evaluation of v1, v2; evaluate with: swarm eval me/adapter" in caplog.text
    assert "--version v1 --version v2" in caplog.text


def test_an_evaluation_that_hangs_does_not_block_the_next(
    processes: Processes, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluating, "_LEAVE_S", 0.2)
    processes.scripts["v1"] = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    one = worker(tmp_path, timeout_s=2.0)
    with caplog.at_level(logging.WARNING):
        one.submit("v1")
        one.submit("v2")
        assert one.close(WAIT_S) == ["v1"]
    assert one.evaluated == ["v2"]
    assert "evaluation of v1 failed (not finished within 2 s); training goes on; evaluate with: swarm" in caplog.text


def test_a_version_that_fails_fails_alone(processes: Processes, tmp_path: Path) -> None:
    go = tmp_path / "go"
    processes.scripts["v1"] = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)"
    processes.scripts["v2"] = "import sys; sys.exit(1)"
    one = worker(tmp_path)
    for tag in ("v1", "v2", "v3"):
        one.submit(tag)
    go.touch()  # now both others wait
    assert one.close(WAIT_S) == ["v2"]
    assert one.evaluated == ["v1", "v3"]


def test_the_command_ends_if_the_training_has_gone(tmp_path: Path) -> None:
    task = tmp_path / "mine.yaml"
    task.write_text("task: mine\ndataset_path: org/data\n")
    command = ["eval", "me/adapter", "--task", str(task), "--local", "--endpoint", "http://192.0.2.1", "--parent", "0"]
    done = subprocess.run([sys.executable, "-m", "swarm_plugins", *command], timeout=120, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


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
        *["--parent", str(os.getpid())],
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


def test_the_process_joins_the_swarm_with_its_secret_and_another_identity(
    adapted: Adapted, base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SwarmConfig(discovery="static", secret_file=tmp_path / "secret", identity=tmp_path / "key")
    connection = SimpleNamespace(initial_peers=("/ip4/127.0.0.1/tcp/1/p2p/Qm",), config=config)
    monkeypatch.setattr(evaluating, "stack_of", lambda base: SimpleNamespace(model=str(base_dir)))
    monkeypatch.setattr(evaluating, "swarm_connection", lambda base: connection)
    assert eval_options(find_adapter(adapted())) == [
        *["--base", str(base_dir), "--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/Qm", "--discovery", "static"],
        *["--secret-file", str(tmp_path / "secret")],
    ]
    for kept in ({"allowed_peers": ("Qm",)}, {"local_blocks": (1, 0)}):
        connection.config = SwarmConfig(**kept)
        with pytest.raises(ConfigError, match="texts to servers that allowed_peers or local_blocks keep yours from"):
            eval_options(find_adapter(adapted()))
