"""Evaluations with made-up scores, of versions that hold no model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm_plugins.errors import SwarmError
from swarm_plugins.evaluation.evaluating import EvalJob, Evaluated, evaluate_versions
from swarm_plugins.evaluation.versions import TaggedVersion
from swarm_plugins.hub import EvalRecord, RetryPlan
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.versions import ModelVersion

REPO, BASE, OTHER = "me/adapter", ModelVersion("org/base", "a" * 40), ModelVersion("org/base", "b" * 40)
RECORD = EvalRecord(
    tag="v1",
    commit="1" * 40,
    base="org/base",
    base_revision="a" * 40,
    task="capitals",
    task_digest="d" * 64,
    metric="acc",
    value=0.625,
    stderr=0.125,
    num_samples=16,
    higher_is_better=True,
    software={"lm_eval": "0.4.13"},
)
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: data.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: 0
doc_to_choice: ["yes", "no"]
"""


def write_task(folder: Path, name: str = "honest") -> Path:
    (folder / "data.jsonl").write_text(json.dumps({"question": "is it?"}))
    file = folder / f"{name}.yaml"
    file.write_text(TASK.format(name=name))
    return file


class Evaluation:
    """Evaluates versions with made-up scores, and notes which it loads."""

    def __init__(self, hub: LocalHub, task: Path, folder: Path) -> None:
        self.loaded: list[str] = []
        self.fails_at: dict[str, SwarmError] = {}
        self._settings = {
            "repo_id": REPO,
            "tasks": [str(task)],
            "all_versions": True,
            "folder": folder / "results",
            "push": True,
            "endpoint": hub.endpoint,
            "retries": RetryPlan(attempts=1),
        }

    def run(self, tell: Callable[[str], None] = print, **changes: Any) -> Evaluated:
        return evaluate_versions(EvalJob(**(self._settings | changes)), self._load, tell=tell)

    def _load(self, version: TaggedVersion, base: ModelVersion) -> tuple[Any, Any]:
        if version.tag in self.fails_at:
            raise self.fails_at[version.tag]
        self.loaded.append(version.tag)
        return None, None
