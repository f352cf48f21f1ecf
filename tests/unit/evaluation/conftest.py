"""A local Hub with three versions of an adapter, whose scores are made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from evaluation_kit import BASE, REPO, Evaluation, write_task
from safetensors.torch import save_file

from swarm_plugins.evaluation.scoring import Tasks
from swarm_plugins.evaluation.tasks import EvalTask
from swarm_plugins.hub import AdapterFacts, Manifest, PushTarget, card_text, push_folder
from swarm_plugins.hub.results import Score
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.versions import ModelVersion


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "any")
    with LocalHub() as running:
        yield running


@pytest.fixture
def publish(hub: LocalHub, tmp_path: Path) -> Callable[..., None]:
    """Publishes a version of an adapter for a base."""

    def push(tag: str, base: ModelVersion | None = BASE, repo_id: str = REPO) -> None:
        folder = tmp_path / f"version-{tag}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
        save_file({"weight": torch.full((2, 2), float(len(tag)))}, folder / "adapter_model.safetensors")
        revision = None if base is None else base.revision
        known = Manifest(
            base_name="org/base", base_revision=revision, peft_type="LORA", metrics={"loss": 0.5}, event=tag
        )
        known.write(folder)
        (folder / "README.md").write_text(card_text(AdapterFacts(repo_id=repo_id, base_model="org/base"), known))
        push_folder(folder, PushTarget(repo_id=repo_id, tag=tag, endpoint=hub.endpoint))

    return push


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    return write_task(tmp_path)


@pytest.fixture
def evaluation(
    hub: LocalHub, publish: Callable[..., None], task_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Evaluation:
    def score(self: Tasks, task: EvalTask, model: Any, tokenizer: Any) -> list[Score]:
        measured = {"metric": "acc", "value": 0.25 * len(task.name), "stderr": 0.1, "higher_is_better": True}
        setting = msgspec.structs.asdict(self.setting(task))
        return [Score(**setting, **measured, num_samples=self.settings.limit or 8)]

    monkeypatch.setattr(Tasks, "score", score)
    for tag in ("v1", "v2", "v3"):
        publish(tag)
    return Evaluation(hub, task_file, tmp_path)
