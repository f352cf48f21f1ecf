"""The card of a distilled model, and its folder on a Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from transformers import AutoModelForCausalLM

from swarm_plugins import make_student
from swarm_plugins.errors import ConfigError
from swarm_plugins.hub import AdapterFacts, Manifest, card_text, save_student, student_card_text
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.testing.models import tiny_model

RECORD: dict[str, Any] = {
    "teacher": "org/teacher",
    "teacher_revision": "a" * 40,
    "kept_layers": [0, 2, 3],
    "stop_step": 400,
    "distilled_steps": 300,
    "alpha": 0.5,
    "temperature": 2.0,
    "schedule": "linear",
}
ROWS = (
    "| teacher | org/teacher |",
    f"| teacher version | {'a' * 40} |",
    "| layers kept | 0, 2, 3 |",
    "| distillation stops at step | 400 |",
    "| steps with distillation | 300 |",
    "| alpha | 0.5 |",
    "| temperature | 2.0 |",
    "| schedule | linear |",
)


def test_the_card_names_teacher_version_stop_and_settings() -> None:
    card = ModelCard(student_card_text("me/student", RECORD, metrics={"val_loss": 1.5}, is_on_hub=True))
    for row in (*ROWS, "| val_loss | 1.5 |"):
        assert row in card.text
    data = card.data.to_dict()
    assert data["base_model"] == "org/teacher"
    assert "mixture-of-students" in data["tags"]
    assert card.data.eval_results is not None


def test_the_card_of_a_distilled_adapter_has_the_same_rows() -> None:
    text = card_text(AdapterFacts(repo_id="me/mine", distillation=RECORD), Manifest())
    assert all(row in text for row in ROWS)
    assert "teacher" not in card_text(AdapterFacts(repo_id="me/mine"), Manifest())


def test_a_student_comes_back_from_a_hub(tmp_path: Path) -> None:
    student = make_student(tiny_model("llama"), depth=2)
    student.config.distillation = {**student.config.distillation, **RECORD}
    folder = save_student(student, tmp_path / "student", repo_id="me/student")
    with LocalHub(tokens={"token": "me"}) as hub:
        api = HfApi(endpoint=hub.endpoint, token="token")
        api.create_repo("me/student")
        for path in folder.iterdir():
            # As an open file: huggingface_hub sends bytes and paths by Xet, which only huggingface.co has.
            with path.open("rb") as stream:
                api.upload_file(path_or_fileobj=stream, path_in_repo=path.name, repo_id="me/student")
        loaded = api.snapshot_download("me/student", cache_dir=tmp_path / "cache")
    assert "| teacher | org/teacher |" in (Path(loaded) / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(loaded)
    assert model.config.distillation["stop_step"] == 400
    assert torch.equal(model.lm_head.weight, student.lm_head.weight)


def test_a_teacher_in_a_directory_is_not_named_as_if_it_were_on_the_hub(tmp_path: Path) -> None:
    student = make_student(tiny_model("llama"), depth=2)
    student.config.distillation = {**RECORD, "teacher": "teacher", "teacher_revision": f"local-{'b' * 40}"}
    card = ModelCard.load(save_student(student, tmp_path / "student") / "README.md")
    assert "base_model" not in card.data.to_dict()
    assert f"| teacher version | local-{'b' * 40} |" in card.text


def test_weights_that_a_strategy_has_gathered_are_written(tmp_path: Path) -> None:
    student = make_student(tiny_model("llama"), depth=1)
    whole = {name: tensor + 1 for name, tensor in student.state_dict().items()}
    loaded = AutoModelForCausalLM.from_pretrained(save_student(student, tmp_path / "student", state_dict=whole))
    assert torch.equal(loaded.lm_head.weight, student.lm_head.weight + 1)


def test_a_model_that_was_not_distilled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.distillation of LlamaForCausalLM is None.*make_student"):
        save_student(tiny_model("llama"), tmp_path / "student")
