"""The worker publishes beside training, and never raises."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import swarm_plugins.hub.worker as worker_module
from swarm_plugins.hub import PushedVersion, PushTarget, PushWorker, RetryPlan
from swarm_plugins.hub.push import push_folder
from swarm_plugins.local_hub import LocalHub

TOKEN = "token-of-alice"
HELD_S = 30.0
FAST = RetryPlan(attempts=2, first_pause_s=0.01, attempt_s=20.0)
MakeFolder = Callable[..., Path]


def test_folders_are_published_in_order(hub: LocalHub, target: PushTarget, make_folder: MakeFolder) -> None:
    seen: list[str] = []
    worker = PushWorker(token=TOKEN, retries=FAST, on_pushed=lambda version: seen.append(version.tag))
    folders = [make_folder(seed) for seed in range(3)]
    for folder in folders:
        worker.submit(folder, target)
    assert worker.close(30.0) == []
    assert [version.folder for version in worker.pushed] == folders
    assert seen == ["v1", "v2", "v3"]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is published before it is set."""
    gate = threading.Event()

    def push(*args: Any, **kwargs: Any) -> PushedVersion:
        assert gate.wait(HELD_S), "the test waited for what it holds up"
        return push_folder(*args, **kwargs)

    monkeypatch.setattr(worker_module, "push_folder", push)
    yield gate
    gate.set()


def begin(worker: PushWorker, folder: Path, target: PushTarget) -> None:
    """Submits a folder, and waits until its push is under way."""
    worker.submit(folder, target)
    deadline = time.monotonic() + HELD_S
    while worker._waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_submitting_does_not_wait(
    hub: LocalHub, target: PushTarget, make_folder: MakeFolder, gate: threading.Event
) -> None:
    worker = PushWorker(token=TOKEN, retries=FAST)
    worker.submit(make_folder(), target)
    gate.set()
    assert worker.close(30.0) == []
    assert len(worker.pushed) == 1


def test_a_failure_tells_where_the_files_are_and_what_to_type(
    hub: LocalHub, target: PushTarget, make_folder: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    hub.faults.is_down = True
    worker = PushWorker(token=TOKEN, retries=FAST)
    folder = make_folder()
    with caplog.at_level(logging.WARNING):
        worker.submit(folder, target)
        assert worker.close(30.0) == [folder]
    assert "the Hub cannot be reached" in caplog.text
    assert f"swarm push {folder} --endpoint {hub.endpoint}" in caplog.text
    assert (folder / "adapter_model.safetensors").exists()


def test_a_failure_does_not_stop_the_next_one(hub: LocalHub, target: PushTarget, make_folder: MakeFolder) -> None:
    broken = make_folder(0)
    (broken / "adapter_config.json").unlink()
    worker = PushWorker(token=TOKEN, retries=FAST)
    worker.submit(broken, target)
    worker.submit(make_folder(1), target)
    assert worker.close(30.0) == [broken]
    assert [version.tag for version in worker.pushed] == ["v1"]


def test_closing_has_a_deadline(
    hub: LocalHub,
    target: PushTarget,
    make_folder: MakeFolder,
    gate: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = PushWorker(token=TOKEN, retries=FAST)
    first, second = make_folder(1), make_folder(2)
    worker.submit(first, target)
    worker.submit(second, target)
    assert worker.close(0.3) == [first, second]
    assert worker.failed == [], "it did not wait for the end of a try"
    assert f"swarm push {second} --endpoint {hub.endpoint}" in caplog.text


def test_what_waits_is_bounded(
    hub: LocalHub,
    target: PushTarget,
    make_folder: MakeFolder,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "_MAX_WAITING", 1)
    worker = PushWorker(token=TOKEN, retries=FAST)
    folders = [make_folder(seed) for seed in range(3)]
    begin(worker, folders[0], target)
    worker.submit(folders[1], target)
    worker.submit(folders[2], target)
    gate.set()
    assert worker.close(30.0) == [folders[1]], "the older of the waiting ones stays on disk"
    assert [version.folder for version in worker.pushed] == [folders[0], folders[2]]


def test_asking_again_and_again_displaces_no_other(
    hub: LocalHub,
    target: PushTarget,
    make_folder: MakeFolder,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "_MAX_WAITING", 2)
    worker = PushWorker(token=TOKEN, retries=FAST)
    folders = [make_folder(seed) for seed in range(3)]
    begin(worker, folders[0], target)
    for folder in (folders[1], *[folders[2]] * 5, folders[0]):
        worker.submit(folder, target)
    gate.set()
    assert worker.close(30.0) == []
    assert [version.folder for version in worker.pushed] == folders


def test_what_waits_can_be_withdrawn(
    hub: LocalHub,
    target: PushTarget,
    make_folder: MakeFolder,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "_MAX_WAITING", 1)
    worker = PushWorker(token=TOKEN, retries=FAST)
    first, second, third = (make_folder(seed) for seed in range(3))
    begin(worker, first, target)
    assert not worker.displaces(second, target)
    worker.submit(second, target)
    assert not worker.displaces(second, target)
    assert worker.displaces(third, target)
    worker.withdraw(second)
    assert not worker.displaces(third, target)
    gate.set()
    assert worker.close(30.0) == []
    assert [version.folder for version in worker.pushed] == [first]


def test_a_closed_worker_starts_again(hub: LocalHub, target: PushTarget, make_folder: MakeFolder) -> None:
    worker = PushWorker(token=TOKEN, retries=FAST)
    assert worker.close(1.0) == []
    for seed in range(2):
        worker.submit(make_folder(seed), target)
        assert worker.close(30.0) == []
    assert [version.tag for version in worker.pushed] == ["v1", "v2"]
