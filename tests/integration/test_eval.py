"""`swarm eval` on a local Hub: versions get results once, which live on the card of their repository."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import psutil
import pytest
from eval_kit import PLACES, publish_versions, write_task
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm, SwarmConfig, load_adapter
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.cli.main import app
from swarm_plugins.client import connect
from swarm_plugins.evaluation.evaluating import EvalJob, evaluate_versions
from swarm_plugins.evaluation.versions import TaggedVersion
from swarm_plugins.hub.results import RESULTS_FILE
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.talk.turns import load_tokenizer
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.versions import ModelVersion

REPO = "me/adapter"
WAIT_S = 120.0


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "base", num_layers=2)


@pytest.fixture
def hub(base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A Hub with three versions of an adapter."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "any")
    with LocalHub() as running:
        pushed = publish_versions(running, base_dir, tmp_path).pushed
        assert [version.tag for version in pushed] == ["v1", "v2", "v3"]
        yield running


def file_on_main(hub: LocalHub, name: str, repo_id: str = REPO) -> bytes:
    repo = hub.store.find(repo_id)
    assert repo is not None
    head = repo.find("main")
    assert head is not None
    return head.files[name].content


def test_three_versions_have_three_rows_and_a_second_run_adds_none(
    hub: LocalHub, base_dir: Path, tmp_path: Path
) -> None:
    loaded: list[str] = []
    job = EvalJob(
        repo_id=REPO,
        tasks=[str(write_task(tmp_path))],
        all_versions=True,
        base=Checkpoint.open(base_dir).version,
        folder=tmp_path / "results",
        push=True,
        endpoint=hub.endpoint,
    )
    with InProcessSwarm(base_dir) as swarm:

        def load(version: TaggedVersion, base: ModelVersion) -> tuple[Any, Any]:
            loaded.append(version.tag)
            model = AutoSwarmModelForCausalLM.from_pretrained(base_dir, connection=swarm.connection)
            adapted = load_adapter(model, version.repo_id, version.commit, endpoint=hub.endpoint)
            return adapted.eval(), load_tokenizer(str(base_dir), None)

        first = evaluate_versions(job, load)
        assert loaded == ["v1", "v2", "v3"]
        assert first.failures == []
        again = evaluate_versions(job, load)
        # Another machine, which has nothing but the repository.
        elsewhere = evaluate_versions(dataclasses.replace(job, folder=tmp_path / "elsewhere"), load)
    assert (first.num_new, again.num_new, elsewhere.num_new) == (3, 0, 0)
    assert (again.commit, elsewhere.commit) == (None, None)
    assert loaded == ["v1", "v2", "v3"]
    rows = [json.loads(line) for line in file_on_main(hub, RESULTS_FILE).splitlines()]
    assert [(row["tag"], row["metric"], row["num_samples"]) for row in rows] == [
        (tag, "acc", len(PLACES)) for tag in ("v1", "v2", "v3")
    ]
    assert {row["base_revision"] for row in rows} == {Checkpoint.open(base_dir).version.revision}
    assert all(row["stderr"] > 0 and row["software"]["lm_eval"] for row in rows)
    card = ModelCard(file_on_main(hub, "README.md").decode())
    assert "| v3 |" in card.text
    ours = [one for one in card.data.eval_results if one.source_name == "swarm eval"]
    assert [(one.dataset_name, one.metric_value) for one in ours] == [("capitals", rows[-1]["value"])]
    assert file_on_main(hub, "results.png").startswith(b"\x89PNG")


@pytest.mark.swarm
def test_the_command_with_a_server_of_its_own(hub: LocalHub, base_dir: Path, tmp_path: Path) -> None:
    task, out = write_task(tmp_path), tmp_path / "out"
    common = ["eval", REPO, "--task", str(task), "--out", str(out), "--endpoint", hub.endpoint]
    with LocalSwarm(base_dir, num_servers=1) as swarm:
        on_swarm = [*common, "--base", str(base_dir), "--initial-peers", swarm.initial_peers[0], "--all-versions"]
        done = CliRunner().invoke(app, [*on_swarm, "--push", "--json"])
        connect(swarm.initial_peers, SwarmConfig()).close()
        assert done.exit_code == 0, done.stderr
        assert "Running" not in done.stderr, "no progress bars in a pipe"
    told = json.loads(done.stdout)
    assert (told["repo"], told["new"], [one["tag"] for one in told["results"]]) == (REPO, 3, ["v1", "v2", "v3"])
    local = [*common, "--base", str(base_dir), "--local"]
    again = CliRunner().invoke(app, [*local, "--all-versions", "--push"])
    assert again.exit_code == 0, again.stderr
    assert "capitals acc" in again.stdout
    assert f"0 new results of 3, in {out}; nothing to push" in again.stderr
    # The same without a swarm: float32 rounding may change which of two near choices wins, not more.
    fresh = CliRunner().invoke(
        app, [*local, "--out", str(tmp_path / "fresh"), "--limit", "8", "--all-versions", "--json"]
    )
    values = {one["tag"]: one["value"] for one in json.loads(fresh.stdout)["results"] if one["limit"] == 8}
    assert values == pytest.approx({one["tag"]: one["value"] for one in told["results"]}, abs=1 / len(PLACES))
    bare = CliRunner().invoke(app, [*common, "--local"])
    assert (bare.exit_code, "give it with --base DIR" in bare.stderr) == (2, True)


def test_the_command_refuses_another_base(hub: LocalHub, base_dir: Path, tmp_path: Path) -> None:
    other = save_tiny("llama", tmp_path / "other", num_layers=2, seed=1)
    bases = [Checkpoint.open(one).version for one in (base_dir, other)]
    command = ["eval", REPO, "--task", str(write_task(tmp_path)), "--out", str(tmp_path / "out"), "--local"]
    done = CliRunner().invoke(app, [*command, "--base", str(other), "--endpoint", hub.endpoint])
    assert done.exit_code == 2
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(
        f"swarm eval: {REPO}@v3 was made for {bases[0]}, not for {bases[1]}: its scores would be wrong; give that base"
    )
    assert not (tmp_path / "out").exists()


def test_a_callback_evaluates_each_version_that_it_publishes(
    hub: LocalHub, base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    publisher = publish_versions(
        hub, base_dir, tmp_path / "run", 2, repo_id="me/measured", eval_tasks=[write_task(tmp_path)]
    )
    assert publisher.unevaluated == [], (tmp_path / "run/hub_adapters/evaluation/log.txt").read_text()
    rows = [json.loads(line) for line in file_on_main(hub, RESULTS_FILE, "me/measured").splitlines()]
    assert [row["tag"] for row in rows] == ["v1", "v2"]
    assert "| v2 |" in file_on_main(hub, "README.md", "me/measured").decode()


TRAINING = """
import sys, time
from pathlib import Path
from swarm_plugins.callbacks.evaluating import EvalWorker

if __name__ == "__main__":
    folder, repo_id, *options = sys.argv[1:]
    EvalWorker(repo_id, options, Path(folder)).submit("v1")
    time.sleep(600)
"""


@pytest.mark.swarm
def test_an_evaluation_ends_with_a_killed_training(hub: LocalHub, base_dir: Path, tmp_path: Path) -> None:
    task, out = write_task(tmp_path), tmp_path / "out"
    data = tmp_path / "capitals.jsonl"
    data.write_text(f"{data.read_text()}\n" * 2000)  # takes minutes
    options = ["--task", str(task), "--base", str(base_dir), "--endpoint", hub.endpoint]
    with LocalSwarm(base_dir, num_servers=1) as swarm:
        options += ["--initial-peers", swarm.initial_peers[0]]
        training = subprocess.Popen([sys.executable, "-c", TRAINING, str(out), REPO, *options])
        try:
            deadline = time.monotonic() + WAIT_S
            while not (out / "log.txt").exists() or "evaluating capitals" not in (out / "log.txt").read_text():
                assert training.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            started = psutil.Process(training.pid).children(recursive=True)
            assert len(started) > 1  # the command, and its daemon
        finally:
            training.kill()
            training.wait()
        _, alive = psutil.wait_procs(started, WAIT_S)
        for process in alive:
            process.kill()
    assert alive == []
    assert (out / "results.jsonl").read_text() == ""
