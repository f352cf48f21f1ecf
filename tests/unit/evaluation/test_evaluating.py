"""What is evaluated, what is not, and what becomes of results when something fails."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evaluation_kit import BASE, OTHER, REPO, Evaluation, write_task
from typer.testing import CliRunner

from swarm_plugins.cli.main import app
from swarm_plugins.errors import (
    CheckpointError,
    ConfigError,
    HubError,
    MissingBlocksError,
    MissingExtraError,
    NumericError,
)
from swarm_plugins.evaluation.scoring import Tasks
from swarm_plugins.evaluation.tasks import EvalSettings, EvalTask
from swarm_plugins.evaluation.versions import TaggedVersion
from swarm_plugins.hub.results import RESULTS_FILE, Score, read_results
from swarm_plugins.hub.results_push import ResultsRepository
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.versions import ModelVersion


def tags_on_main(hub: LocalHub) -> list[str]:
    repo = hub.store.find(REPO)
    assert repo is not None
    head = repo.find("main")
    assert head is not None
    content = head.files[RESULTS_FILE].content
    assert isinstance(content, bytes)
    return [json.loads(line)["tag"] for line in content.splitlines()]


def test_only_what_is_missing_is_evaluated(evaluation: Evaluation, task_file: Path, tmp_path: Path) -> None:
    evaluation.run(all_versions=False, tags=["v2"], push=False)
    assert evaluation.loaded == ["v2"]
    done = evaluation.run(tasks=[str(task_file), str(write_task(tmp_path, "more"))])
    assert evaluation.loaded == ["v2", "v1", "v2", "v3"]
    assert done.num_new == 5
    assert evaluation.run().num_new == 0
    (tmp_path / "data.jsonl").write_text('{"question": "was it?"}')
    changed = evaluation.run(all_versions=False)
    assert [(one.tag, one.task) for one in changed.records[5 + 1 :]] == [("v3", "honest")]
    other = evaluation.run(all_versions=False, settings=EvalSettings(limit=3, num_fewshot=1))
    assert [(one.num_samples, one.limit, one.num_fewshot) for one in other.records[7:]] == [(3, 3, 1)]
    assert evaluation.run(all_versions=False, settings=EvalSettings(limit=3, num_fewshot=1)).num_new == 0


def test_one_model_at_a_time_is_in_memory(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    alive, before = weakref.WeakSet[Any](), list[int]()

    def load(version: TaggedVersion, base: ModelVersion) -> tuple[Any, None]:
        before.append(len(alive))
        model: Any = torch.nn.Identity()
        model.is_faulty = version.tag == "v1"
        alive.add(model)
        return model, None

    def score(self: Tasks, task: EvalTask, model: Any, tokenizer: Any) -> list[Score]:
        model.wrapper = functools.partial(print, model)  # a cycle, as with lm_eval's
        if not model.is_faulty:
            return well(self, task, model, tokenizer)
        try:
            raise ValueError("nan")
        except ValueError as exc:
            raise NumericError("acc is nan") from exc

    well = Tasks.score
    monkeypatch.setattr(Tasks, "score", score)
    monkeypatch.setattr(evaluation, "_load", load)
    done = evaluation.run(push=False)
    assert (before, done.num_new, [str(one) for one in done.failures]) == ([0, 0, 0], 2, ["acc is nan"])


def test_a_version_of_another_base_is_refused(evaluation: Evaluation, publish: Callable[..., None]) -> None:
    publish("v4", OTHER)
    sentence = rf"^me/adapter@v4 was made for {OTHER}, not for {BASE}: its scores would be wrong"
    with pytest.raises(ConfigError, match=sentence):
        evaluation.run(all_versions=False, tags=["v1", "v4"], base=BASE)
    assert evaluation.loaded == []
    done = evaluation.run(base=BASE)
    assert (evaluation.loaded, done.num_new) == (["v1", "v2", "v3"], 3)
    assert done.commit is not None
    (failure,) = done.failures
    assert str(failure).startswith("me/adapter@v4 was made for")
    # Without a base of the caller's, each version has its own.
    assert evaluation.run().records[-1].base_revision == OTHER.revision


def test_the_base_is_evaluated_once_if_that_is_asked_for(
    evaluation: Evaluation, publish: Callable[..., None], hub: LocalHub
) -> None:
    done = evaluation.run(with_base=True)
    assert evaluation.loaded == ["(base)", "v1", "v2", "v3"]
    assert [(one.tag, one.commit) for one in done.records[:1]] == [("(base)", BASE.revision)]
    publish("v4")
    assert evaluation.run(with_base=True).num_new == 1
    assert tags_on_main(hub) == ["(base)", "v1", "v2", "v3", "v4"]
    # On another base, its own score too.
    publish("v5", OTHER)
    assert [(one.tag, one.base_revision) for one in evaluation.run(with_base=True).records[5:]] == [
        ("(base)", OTHER.revision),
        ("v5", OTHER.revision),
    ]


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        pytest.param(None, r"v4 does not say which version of a base it was made for: give --base", id="unknown"),
        pytest.param(
            ModelVersion("mine", f"local-{'c' * 40}"),
            rf"v4 was made for org/base@local-{'c' * 40}, a base in a directory: give it with --base DIR",
            id="directory",
        ),
    ],
)
def test_a_base_that_cannot_be_found_is_asked_for(
    evaluation: Evaluation, publish: Callable[..., None], base: ModelVersion | None, sentence: str
) -> None:
    publish("v4", base)
    with pytest.raises(ConfigError, match=sentence):
        evaluation.run(all_versions=False)
    given = base or BASE
    assert evaluation.run(all_versions=False, base=given).records[-1].base_revision == given.revision


def test_a_swarm_that_fails_loses_no_result(evaluation: Evaluation, hub: LocalHub) -> None:
    evaluation.fails_at = {"v2": MissingBlocksError("no living server holds blocks 0:1")}
    done = evaluation.run()
    assert (evaluation.loaded, done.num_new, tags_on_main(hub)) == (["v1"], 1, ["v1"])
    assert [type(failure) for failure in done.failures] == [MissingBlocksError]
    evaluation.fails_at = {"v2": CheckpointError("v2 does not fit the model")}
    assert evaluation.run().num_new == 1
    assert evaluation.loaded == ["v1", "v3"]
    evaluation.fails_at = {}
    assert (evaluation.run().num_new, tags_on_main(hub)) == (1, ["v1", "v3", "v2"])


def test_without_any_result_nothing_is_pushed(evaluation: Evaluation, hub: LocalHub, tmp_path: Path) -> None:
    evaluation.fails_at = {tag: CheckpointError(f"{tag} does not fit the model") for tag in ("v1", "v2", "v3")}
    hub.forget()
    done = evaluation.run()
    assert (done.records, done.commit, len(done.failures)) == ([], None, 3)
    assert not any("/commit/" in request.path for request in hub.requests)
    # The base alone is a result, which is drawn and pushed.
    alone = evaluation.run(with_base=True)
    assert [one.tag for one in alone.records] == ["(base)"]
    assert tags_on_main(hub) == ["(base)"]
    assert (tmp_path / "results" / "results.png").read_bytes().startswith(b"\x89PNG")


def test_tags_that_are_not_adapters_are_named(evaluation: Evaluation, hub: LocalHub) -> None:
    repo = hub.store.find(REPO)
    assert repo is not None
    repo.tags["notes"] = hub.add(REPO, {"adapter_config.json": b"[]", "swarm.json": b"["})
    told: list[str] = []
    evaluation.run(tell=told.append)
    assert "me/adapter: tags without an adapter are left out: notes" in told
    with pytest.raises(CheckpointError, match=r"^me/adapter@notes is not an adapter"):
        evaluation.run(tags=["notes"], all_versions=False)


def test_a_missing_matplotlib_shows_before_the_work(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"^the package matplotlib is missing: install it"):
        evaluation.run()
    assert evaluation.loaded == []


def test_a_hub_that_refuses_the_push_leaves_everything_in_the_folder(
    evaluation: Evaluation, hub: LocalHub, tmp_path: Path
) -> None:
    hub.faults.routes["commit"] = [503]
    with pytest.raises(HubError, match=r"^push results to me/adapter: the Hub answered 503"):
        evaluation.run()
    assert len(read_results(tmp_path / "results")) == 3
    assert {"README.md", "results.png"} <= {path.name for path in (tmp_path / "results").iterdir()}
    hub.faults.routes.clear()
    assert evaluation.run().commit is not None
    assert evaluation.loaded == ["v1", "v2", "v3"]
    assert tags_on_main(hub) == ["v1", "v2", "v3"]


def test_a_push_in_between_is_kept(evaluation: Evaluation, hub: LocalHub, tmp_path: Path) -> None:
    evaluation.run(all_versions=False, tags=["v2"], push=False)
    evaluation.run(all_versions=False, tags=["v1"], folder=tmp_path / "another")
    mine = read_results(tmp_path / "results")
    hub.faults.routes["commit"] = [412]
    results = ResultsRepository(REPO, endpoint=hub.endpoint)
    assert results.push(mine, lambda records: b"png") is not None
    assert tags_on_main(hub) == ["v1", "v2"]
    assert results.push(mine, lambda records: b"png") is None


def test_a_repository_without_versions_or_without_that_one(evaluation: Evaluation, hub: LocalHub) -> None:
    hub.add("me/empty", {"README.md": b"# empty\n"})
    with pytest.raises(HubError, match=r"^me/empty has no versions: each is a git tag"):
        evaluation.run(repo_id="me/empty")
    with pytest.raises(HubError, match=r"^me/adapter has no version 'v9'; it has v1, v2, v3$"):
        evaluation.run(tags=["v9"], all_versions=False)
    with pytest.raises(HubError, match=r"^list the versions of me/none: no such repository"):
        evaluation.run(repo_id="me/none")
    hub.faults.routes["refs"] = [503]
    with pytest.raises(HubError, match=r"^list the versions of me/adapter: the Hub answered 503"):
        evaluation.run()


def test_strange_results_on_the_hub_are_refused_before_the_work(evaluation: Evaluation, hub: LocalHub) -> None:
    evaluation.run()
    hub.add(REPO, {RESULTS_FILE: b'{"tag": "v1"}\n'})
    with pytest.raises(CheckpointError, match=r"^line 1 of results.jsonl of me/adapter is not a result .*task"):
        evaluation.run()


def test_a_full_disk_leaves_what_was_there(evaluation: Evaluation, disk: dict[str, int], tmp_path: Path) -> None:
    evaluation.run(all_versions=False, tags=["v1"], push=False)
    before = {path.name: path.read_bytes() for path in (tmp_path / "results").iterdir()}

    disk[RESULTS_FILE] = 0
    with pytest.raises(OSError, match=r"No space left on device: .*results.jsonl"):
        evaluation.run()
    assert evaluation.loaded == ["v1"]  # seen before the work
    assert {path.name: path.read_bytes() for path in (tmp_path / "results").iterdir()} == before


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each file can still be written; others always."""
    left: dict[str, int] = {}
    make, opened = tempfile.mkstemp, os.fdopen
    full: set[int] = set()

    def mkstemp(**options: Any) -> tuple[int, str]:
        descriptor, path = make(**options)
        name = options["prefix"].strip(".-")
        if name in left:
            left[name] -= 1
            full.update({descriptor} if left[name] < 0 else ())
        return descriptor, path

    def fdopen(descriptor: int, *args: Any, **options: Any) -> Any:
        if descriptor not in full:
            return opened(descriptor, *args, **options)
        full.remove(descriptor)
        os.close(descriptor)
        return FullDisk()

    monkeypatch.setattr("swarm_plugins.kept_files.tempfile", SimpleNamespace(mkstemp=mkstemp))
    monkeypatch.setattr("swarm_plugins.kept_files.os", SimpleNamespace(fdopen=fdopen))
    return left


@pytest.mark.parametrize(
    ("name", "writes", "kept", "repeated"),
    [
        # Once before the work, once for v1.
        pytest.param(RESULTS_FILE, 2, ["v1"], ["v2", "v3"], id="after a result"),
        pytest.param("README.md", 0, ["v1", "v2", "v3"], [], id="card"),
        pytest.param("results.png", 0, ["v1", "v2", "v3"], [], id="plot"),
    ],
)
def test_a_disk_that_fills_up_loses_no_result(
    evaluation: Evaluation,
    disk: dict[str, int],
    tmp_path: Path,
    name: str,
    writes: int,
    kept: list[str],
    repeated: list[str],
) -> None:
    disk[name] = writes
    with pytest.raises(OSError, match=rf"No space left on device: .*{name}"):
        evaluation.run()
    assert [one.tag for one in read_results(tmp_path / "results")] == kept
    assert not (tmp_path / "results" / "results.png").exists()
    disk.clear()
    evaluation.loaded.clear()
    assert evaluation.run().commit is not None
    assert evaluation.loaded == repeated
    assert {"README.md", "results.png"} <= {path.name for path in (tmp_path / "results").iterdir()}


@pytest.mark.usefixtures("evaluation")
def test_the_command_says_in_one_sentence_that_the_disk_is_full(
    disk: dict[str, int], hub: LocalHub, task_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = SimpleNamespace(model=None, tokenizer=None)
    monkeypatch.setattr("swarm_plugins.talk.loading.load_model", lambda *place, **options: nothing)
    disk[RESULTS_FILE] = 2
    out = tmp_path / "out"
    command = ["eval", REPO, "--task", str(task_file), "--local", "--all-versions", "--endpoint", hub.endpoint]
    done = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert (done.exit_code, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last == f"swarm eval: No space left on device ({out / RESULTS_FILE}): free some space and try again"
    assert [one.tag for one in read_results(out)] == ["v1"]


class FullDisk(io.RawIOBase):
    """A file on a disk without space."""

    def write(self, content: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
