"""What is published, when, and what is left on disk when it cannot be."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig
from torch import nn
from transformers import AutoModelForCausalLM

from swarm_plugins import load_adapter
from swarm_plugins.backbone import base_version
from swarm_plugins.callbacks import saving
from swarm_plugins.callbacks.publishing import Publishing
from swarm_plugins.errors import ConfigError
from swarm_plugins.hub import Manifest, PushTarget, RetryPlan, open_adapter
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.versions import ModelVersion

Adapted = Callable[..., PeftModel]
FAST = RetryPlan(attempts=2, first_pause_s=0.01, attempt_s=20.0)


def publishing(hub: LocalHub, **options: Any) -> Publishing:
    return Publishing("me/adapter", endpoint=hub.endpoint, token="token", retries=FAST, **options)


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"), "default", id="lora"),
        pytest.param(LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"), "mine", id="named"),
        pytest.param(LoraConfig(target_modules=["q_proj"]), "default", id="no-task"),
        pytest.param(LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "default", id="head"),
        pytest.param(PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "default", id="prefix"),
    ],
)
def test_what_is_published_gives_the_same_outputs_when_it_is_loaded(
    config: Any, name: str, hub: LocalHub, adapted: Adapted, base_dir: Path, tokens: torch.Tensor, tmp_path: Path
) -> None:
    model = adapted(config, name)
    publisher = publishing(hub)
    publisher.begin(model, tmp_path)
    publisher.publish("end", 5, {"val_loss": torch.tensor(1.5), "bad": float("nan"), "text": "x"})
    publisher.finish()
    assert [version.tag for version in publisher.pushed] == ["v1"]
    assert publisher.unpushed == []
    fresh = AutoModelForCausalLM.from_pretrained(base_dir)
    loaded = load_adapter(fresh, "me/adapter", endpoint=hub.endpoint, cache_dir=tmp_path / "cache").eval()
    with torch.no_grad():
        difference = (loaded(input_ids=tokens).logits - model(input_ids=tokens).logits).abs().max()
    # The same tensors on the same kernels.
    assert difference == 0
    manifest = Manifest.read(publisher.pushed[0].folder)
    assert manifest is not None
    assert (manifest.step, manifest.event, manifest.metrics) == (5, "end", {"val_loss": 1.5})
    assert manifest.base == base_version(model)


def test_the_config_names_the_base_on_the_hub_and_its_commit(
    hub: LocalHub, adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted()
    monkeypatch.setattr(saving, "base_version", lambda _: ModelVersion("org/base", "a" * 40))
    publisher = publishing(hub)
    publisher.begin(model, tmp_path)
    publisher.publish("end", 1, {})
    publisher.finish()
    folder = publisher.pushed[0].folder
    written = json.loads((folder / "adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["revision"]) == ("org/base", "a" * 40)
    assert "base_model: org/base" in (folder / "README.md").read_text()


def test_a_base_in_a_directory_does_not_tell_where_the_directory_is(
    hub: LocalHub, adapted: Adapted, tmp_path: Path, base_dir: Path
) -> None:
    publisher = publishing(hub)
    publisher.begin(adapted(), tmp_path)
    publisher.publish("end", 1, {})
    publisher.finish()
    for name in ("adapter_config.json", "README.md", "swarm.json"):
        assert str(base_dir.parent) not in (publisher.pushed[0].folder / name).read_text()


def test_the_same_tensors_are_published_once(hub: LocalHub, adapted: Adapted, tmp_path: Path) -> None:
    model = adapted()
    publisher = publishing(hub)
    publisher.begin(model, tmp_path)
    for event in ("best", "save", "end"):
        publisher.publish(event, 3, {})
    change(model)
    publisher.publish("end", 4, {})
    publisher.finish()
    assert [version.folder.name for version in publisher.pushed] == ["step-00000003-best", "step-00000004-end"]
    assert [path.name for path in (tmp_path / "hub_adapters").iterdir()] == ["step-00000004-end"]
    kept = PushTarget.read(tmp_path / "hub_adapters" / "step-00000004-end")
    assert kept is not None
    assert kept.pushed_as == "v2", "what stays says that it need not be published"


@pytest.mark.parametrize(("mode", "values", "expected"), [("min", [3, 2, 2.5, 1], 3), ("max", [3, 2, 2.5, 4], 2)])
def test_best_means_better_than_ever_before(
    mode: Any, values: list[float], expected: int, hub: LocalHub, adapted: Adapted, tmp_path: Path
) -> None:
    model = adapted()
    publisher = publishing(hub, on=["best"])
    publisher.begin(model, tmp_path)
    for step, value in enumerate(values, 1):
        change(model)
        publisher.publish_if_best("metric", mode, step, {"metric": value})
        publisher.publish_if_best(None, mode, step, {"metric": -value})
        publisher.publish_if_best("other", mode, step, {"metric": value})
    publisher.finish()
    assert len(publisher.pushed) == expected


def test_when_the_hub_is_down_the_versions_stay_and_can_be_pushed_later(
    hub: LocalHub, adapted: Adapted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.faults.is_down = True
    publisher = publishing(hub)
    publisher.begin(adapted(), tmp_path)
    publisher.publish("end", 1, {})
    publisher.finish()
    (folder,) = publisher.unpushed
    assert folder == tmp_path / "hub_adapters" / "step-00000001-end"
    assert f"swarm push {folder} --endpoint {hub.endpoint}" in caplog.text
    target = PushTarget.read(folder)
    assert target is not None
    assert target.pushed_as is None
    assert open_adapter(folder).base is not None


def test_a_full_disk_does_not_stop_the_training(
    hub: LocalHub, adapted: Adapted, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted()
    publisher = publishing(hub)
    publisher.begin(model, tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PeftModel, "save_pretrained", full)
        publisher.publish("save", 1, {})
    assert "No space left on device" in caplog.text
    assert list((tmp_path / "hub_adapters").iterdir()) == [], "nothing half-written is left"
    publisher.publish("end", 2, {})
    publisher.finish()
    assert [version.tag for version in publisher.pushed] == ["v1"]


def test_two_runs_in_one_folder_do_not_overwrite_each_other(hub: LocalHub, adapted: Adapted, tmp_path: Path) -> None:
    hub.faults.is_down = True
    folders = []
    for _ in range(2):
        publisher = publishing(hub)
        publisher.begin(adapted(), tmp_path)
        publisher.publish("end", 1, {})
        publisher.finish()
        folders += publisher.unpushed
    assert [folder.name for folder in folders] == ["step-00000001-end", "step-00000001-end-2"]


def test_an_interruption_keeps_what_was_trained(
    hub: LocalHub, adapted: Adapted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted()
    publisher = publishing(hub)
    publisher.begin(model, tmp_path)
    publisher.publish("save", 1, {})
    change(model)
    publisher.interrupt(2, {})
    assert [version.tag for version in publisher.pushed] == ["v1"]
    (folder,) = publisher.unpushed
    assert folder.name == "step-00000002-interrupted"
    assert f"swarm push {folder} --endpoint {hub.endpoint}" in caplog.text
    publisher.interrupt(3, {})
    assert len(publisher.unpushed) == 1


def test_nothing_to_train_is_said_before_training(hub: LocalHub, adapted: Adapted, tmp_path: Path) -> None:
    publisher = publishing(hub)
    with pytest.raises(ConfigError, match=r"Linear has no adapter to publish: it holds no model made by PEFT; wrap"):
        publisher.begin(nn.Linear(1, 1), tmp_path)
    model = adapted()
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"its PEFT model has no trainable parameters"):
        publisher.begin(model, tmp_path)


def test_versions_are_written_at_home(
    hub: LocalHub, adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    publisher = publishing(hub, folder="~/adapters")
    publisher.begin(adapted(), tmp_path)
    publisher.publish("end", 1, {})
    publisher.finish()
    assert publisher.pushed[0].folder.parent == tmp_path / "home" / "adapters"


def test_an_unknown_base_is_said(
    hub: LocalHub, adapted: Adapted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted()
    config = model.get_base_model().config
    config._name_or_path = config.name_or_path = ""
    publisher = publishing(hub)
    with caplog.at_level(logging.WARNING):
        publisher.begin(model, tmp_path)
    assert "unknown base of me/adapter" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": ["never"]}, r"on=\['never'\] must be a list of some of save, best, end"),
        ({"on": "save"}, r"on='save' must be a list"),
        ({"on": []}, r"on=\[\] must be a list"),
        ({"mode": "least"}, r"mode='least' must be 'min' or 'max'"),
        ({"finish_s": -1}, r"finish_s=-1 must be at least 0"),
        ({"eval_s": 0}, r"eval_s=0 must be above 0"),
        ({"base_model": "a/b/c"}, r"'a/b/c' cannot be the name of a repository"),
        ({"repo_id": "me/my adapter"}, r"'me/my adapter' cannot be the name of a repository"),
    ],
)
def test_wrong_settings_are_named_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Publishing(**{"repo_id": "me/adapter", **options})


def test_a_run_that_an_error_has_ended_is_closed_by_the_next(
    hub: LocalHub, adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, publisher = adapted(LoraConfig(target_modules=["q_proj"])), publishing(hub)
    publisher.begin(model, tmp_path)
    closed: list[float] = []
    assert publisher._worker is not None
    monkeypatch.setattr(publisher._worker, "close", lambda timeout_s: closed.append(timeout_s) or [])
    publisher.begin(model, tmp_path)
    assert closed == [0.0]
    publisher.finish()
