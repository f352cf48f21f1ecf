"""The card of a distilled model, and its folder on a Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from transformers import AutoModelForCausalLM

from swarm_plugins import make_student
from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.hub import (
    AdapterFacts,
    Manifest,
    PushTarget,
    card_text,
    push_folder,
    save_student,
    student_card_text,
)
from swarm_plugins.hub.folder import files_to_push
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


@pytest.mark.parametrize(("family", "is_ours"), [("prmoe", True), ("llama", False)])
def test_the_card_imports_the_package_only_for_a_class_of_it(family: str, is_ours: bool, tmp_path: Path) -> None:
    folder = save_student(make_student(tiny_model(family), depth=2), tmp_path / "student")
    assert ("import swarm_plugins" in (folder / "README.md").read_text()) is is_ours


def test_the_card_of_a_distilled_adapter_has_the_same_rows() -> None:
    text = card_text(AdapterFacts(repo_id="me/mine", distillation=RECORD), Manifest())
    assert all(row in text for row in ROWS)
    assert "teacher" not in card_text(AdapterFacts(repo_id="me/mine"), Manifest())


def test_a_student_is_pushed_with_a_tag_and_comes_back(tmp_path: Path, hub: LocalHub) -> None:
    student = make_student(tiny_model("llama"), depth=2)
    student.config.distillation = {**student.config.distillation, **RECORD}
    folder = save_student(student, tmp_path / "student", repo_id="alice/student")
    (folder / "trainer_state.json").write_text("{}")
    target = PushTarget.read(folder)
    assert target is not None
    pushed = push_folder(folder, msgspec.structs.replace(target, endpoint=hub.endpoint), token="token-of-alice")
    assert (pushed.repo_id, pushed.tag) == ("alice/student", "v1")
    api = HfApi(endpoint=hub.endpoint)
    [found] = api.list_models(filter=f"swarm-teacher:{'a' * 40}")
    assert found.id == "alice/student"
    loaded = Path(api.snapshot_download("alice/student", revision="v1", cache_dir=tmp_path / "cache"))
    files = {"README.md", "config.json", "generation_config.json", "model.safetensors", ".gitattributes"}
    assert {path.name for path in loaded.iterdir()} == files
    model = AutoModelForCausalLM.from_pretrained(loaded)
    assert model.config.distillation["stop_step"] == 400
    assert torch.equal(model.lm_head.weight, student.lm_head.weight)


def test_a_student_is_saved_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = save_student(make_student(tiny_model("llama"), depth=1), "~/student")
    assert (folder, (folder / "README.md").exists()) == (tmp_path / "home" / "student", True)


def test_a_model_in_parts_is_pushed_whole_or_not_at_all(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert set(shards) < set(files_to_push(tmp_path))
    shards[1].rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=rf"lacks {shards[1].name}: save the model once more"):
        files_to_push(tmp_path)
    (tmp_path / "kept").rename(shards[1])
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"has, besides the model's weights, model.safetensors"):
        files_to_push(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json cannot be understood"):
        files_to_push(tmp_path)


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
