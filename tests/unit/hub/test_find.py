"""Adapters are found by their base, and by the version of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm_plugins.errors import ConfigError, HubError
from swarm_plugins.hub import EvalRecord, PushTarget, find_adapters, push_folder
from swarm_plugins.hub.results import RESULTS_FILE, format_results
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.versions import ModelVersion

TOKEN = "token-of-alice"
OLD, NEW, LOCAL = "a" * 40, "b" * 40, f"local-{'c' * 40}"
MakeFolder = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


def push(hub: LocalHub, folder: Path, repo_id: str = "alice/adapter", tag: str | None = None) -> None:
    push_folder(folder, PushTarget(repo_id=repo_id, endpoint=hub.endpoint, tag=tag), token=TOKEN)


def found(hub: LocalHub, *args: str | ModelVersion) -> list[tuple[str, str | None]]:
    return [(one.repo_id, one.tag) for one in find_adapters(*args, endpoint=hub.endpoint)]  # type: ignore[arg-type]


def test_the_newest_version_that_fits_is_found(hub: LocalHub, make_folder: MakeFolder) -> None:
    push(hub, make_folder(1, revision=OLD))
    push(hub, make_folder(2, revision=NEW))
    push(hub, make_folder(3, revision=OLD), "alice/older")
    push(hub, make_folder(4, base="org/other"), "alice/other")
    assert found(hub, "org/base") == [("alice/adapter", "v2"), ("alice/older", "v1")]
    assert found(hub, "org/base", OLD) == [("alice/adapter", "v1"), ("alice/older", "v1")]
    assert found(hub, "org/base", NEW) == [("alice/adapter", "v2")]
    assert found(hub, "org/base", "d" * 40) == []
    assert found(hub, ModelVersion("org/base", NEW)) == [("alice/adapter", "v2")]
    (one,) = find_adapters("org/base", NEW, endpoint=hub.endpoint)
    assert one.base == ModelVersion("org/base", NEW)
    assert (one.peft_type, one.metrics) == ("LORA", {"val_loss": 0.0})


def test_adapters_are_found_by_task_tags_and_method(hub: LocalHub) -> None:
    for name, task, tags, method in (
        ("bob/sorter", "text-classification", "[law, german]", "LORA"),
        ("bob/prompts", "text-classification", "[law]", "PROMPT_TUNING"),
        ("bob/writer", "text-generation", "[german]", "LORA"),
    ):
        card = f"---\nbase_model: org/base\nbase_model_relation: adapter\npipeline_tag: {task}\ntags: {tags}\n---\n"
        config = {"peft_type": method, "base_model_name_or_path": "org/base", "revision": OLD}
        hub.add(name, {"README.md": card.encode(), "adapter_config.json": json.dumps(config).encode()})

    def names(**wanted: Any) -> list[str]:
        return sorted(one.repo_id for one in find_adapters("org/base", endpoint=hub.endpoint, **wanted))

    assert names(task="text-classification") == ["bob/prompts", "bob/sorter"]
    assert names(tags=["german"]) == ["bob/sorter", "bob/writer"]
    assert names(tags=["german", "law"]) == ["bob/sorter"]
    assert names(peft_type="PROMPT_TUNING") == ["bob/prompts"]
    assert names(task="text-generation", tags=["law"]) == []


def test_a_branch_of_the_base_is_looked_up(hub: LocalHub, make_folder: MakeFolder) -> None:
    sha = hub.add("org/base", {"config.json": b"{}"})
    push(hub, make_folder(1, revision=sha))
    push(hub, make_folder(2, revision=NEW))
    assert found(hub, "org/base", "main") == [("alice/adapter", "v1")]
    assert found(hub, ModelVersion("org/base", NEW), "main") == [("alice/adapter", "v1")]
    with pytest.raises(HubError, match=r"look up org/base@none: no such revision"):
        find_adapters("org/base", "none", endpoint=hub.endpoint)


def test_a_base_in_a_directory_is_found_by_its_content(hub: LocalHub, make_folder: MakeFolder) -> None:
    push(hub, make_folder(1, base="copy", revision=LOCAL))
    assert found(hub, ModelVersion("renamed", LOCAL)) == [("alice/adapter", "v1")]
    assert found(hub, "copy") == []


def test_adapters_of_other_tools_are_found_by_pefts_config(hub: LocalHub) -> None:
    card = b"---\nbase_model: org/base\nbase_model_relation: adapter\n---\n"
    config = {"peft_type": "IA3", "base_model_name_or_path": "org/base", "revision": OLD}
    hub.add("bob/theirs", {"README.md": card, "adapter_config.json": json.dumps(config).encode()})
    (one,) = find_adapters("org/base", OLD, endpoint=hub.endpoint)
    assert (one.repo_id, one.tag, one.peft_type) == ("bob/theirs", None, "IA3")


def test_what_cannot_be_understood_is_left_out(hub: LocalHub, caplog: pytest.LogCaptureFixture) -> None:
    card = b"---\nbase_model: org/base\nbase_model_relation: adapter\n---\n"
    hub.add("bob/broken", {"README.md": card, "swarm.json": b"{"})
    hub.add("bob/empty", {"README.md": card})
    with caplog.at_level(logging.WARNING):
        assert found(hub, "org/base") == []
    assert "bob/broken" in caplog.text


def add_open_and(hub: LocalHub, name: str, **options: bool) -> None:
    """Two adapters, which look the same in the list."""
    card = b"---\nbase_model: org/base\nbase_model_relation: adapter\n---\n"
    for repo_id, access in (("a/open", {}), (name, options)):
        config = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "revision": OLD}
        hub.add(repo_id, {"README.md": card, "adapter_config.json": json.dumps(config).encode()}, **access)


def test_an_adapter_that_may_not_be_read_is_left_out(hub: LocalHub, caplog: pytest.LogCaptureFixture) -> None:
    add_open_and(hub, "b/gated", gated=True)
    with caplog.at_level(logging.WARNING):
        assert found(hub, "org/base") == [("a/open", None)]
    assert "b/gated is left out: read swarm.json of b/gated: the repository is gated" in caplog.text


@pytest.mark.parametrize("status", [401, 403, 404])
def test_an_adapter_that_was_deleted_or_closed_since_it_was_listed_is_left_out(
    hub: LocalHub, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    add_open_and(hub, "b/closed")
    hub.faults.routes["refs"] = ["ok", status]
    with caplog.at_level(logging.WARNING):
        assert found(hub, "org/base") == [("a/open", None)]
    assert "b/closed is left out: list the versions of b/closed: no" in caplog.text


def test_a_hub_that_fails_is_not_taken_for_one_without_adapters(hub: LocalHub) -> None:
    add_open_and(hub, "b/other")
    hub.faults.routes["refs"] = [503]
    with pytest.raises(HubError, match=r"the Hub answered 503"):
        find_adapters("org/base", endpoint=hub.endpoint)


@pytest.mark.parametrize("name", ["swarm.json", "adapter_config.json"])
def test_a_strangers_huge_file_is_not_downloaded(hub: LocalHub, caplog: pytest.LogCaptureFixture, name: str) -> None:
    card = b"---\nbase_model: org/base\nbase_model_relation: adapter\n---\n"
    hub.add("bob/huge", {"README.md": card, name: b" " * ((1 << 20) + 1)})
    hub.forget()
    with caplog.at_level(logging.WARNING):
        assert found(hub, "org/base") == []
    assert f"{name} of bob/huge has 1048577 bytes; an adapter's has at most 1048576" in caplog.text
    assert hub.bytes_served("bob/huge", name) == 0


def test_an_impossible_base_and_a_hub_that_refuses_are_named(hub: LocalHub) -> None:
    with pytest.raises(ConfigError, match=r"cannot be the name of a repository"):
        find_adapters("/no/such/dir", endpoint=hub.endpoint)
    hub.faults.routes["list_models"] = [403]
    with pytest.raises(HubError, match=r"list adapters of org/base: not allowed"):
        find_adapters("org/base", endpoint=hub.endpoint)


def record(hub: LocalHub, repo_id: str, tag: str, value: float, **changes: Any) -> EvalRecord:
    repo = hub.store.find(repo_id)
    assert repo is not None
    known = {
        "tag": tag,
        "commit": repo.tags[tag],
        "base": "org/base",
        "base_revision": OLD,
        "task": "capitals",
        "task_digest": "d" * 64,
        "metric": "acc",
        "value": value,
        "num_samples": 8,
        "higher_is_better": True,
    }
    return EvalRecord(**(known | changes))


def add_results(hub: LocalHub, repo_id: str, *records: EvalRecord) -> None:
    hub.add(repo_id, {RESULTS_FILE: format_results(records)})


def test_adapters_are_sorted_by_what_was_measured(hub: LocalHub, make_folder: MakeFolder) -> None:
    for number, name in enumerate(("low", "high", "none", "middle")):
        push(hub, make_folder(number, revision=OLD), f"alice/{name}")
    push(hub, make_folder(4, revision=OLD), "alice/low")
    for name, tag, value in (("low", "v2", 0.2), ("high", "v1", 0.9), ("middle", "v1", 0.5)):
        repo_id = f"alice/{name}"
        loss = record(hub, repo_id, tag, 1 - value, metric="loss", higher_is_better=False)
        # The version before does not count.
        before = [record(hub, repo_id, "v1", 1.0)] if tag == "v2" else []
        add_results(hub, repo_id, *before, record(hub, repo_id, tag, value), loss)

    def names(sort_by: str, **mode: Any) -> list[str]:
        found = find_adapters("org/base", OLD, sort_by=sort_by, endpoint=hub.endpoint, **mode)
        return [one.repo_id.removeprefix("alice/") for one in found]

    assert names("acc") == names("capitals/acc") == names("loss") == ["high", "middle", "low", "none"]
    assert names("acc", mode="min") == ["low", "middle", "high", "none"]
    # The training run's: 2.0 less the number of the folder.
    assert names("val_loss") == ["low", "middle", "none", "high"]
    with pytest.raises(
        ConfigError,
        match=r"^sort_by='f1': none of the 4 adapters has it; they have capitals/acc, capitals/loss, val_loss$",
    ):
        names("f1")
    with pytest.raises(ConfigError, match=r"mode='best' must be 'min' or 'max'"):
        names("acc", mode="best")
    assert find_adapters("org/nothing", sort_by="acc", endpoint=hub.endpoint) == []


def test_tags_of_any_form_are_versions(hub: LocalHub, make_folder: MakeFolder) -> None:
    push(hub, make_folder(1, revision=OLD), tag="1.9")
    push(hub, make_folder(2, revision=OLD), tag="1.10")
    add_results(hub, "alice/adapter", *(record(hub, "alice/adapter", tag, 0.5) for tag in ("1.9", "1.10")))
    (one,) = find_adapters("org/base", OLD, sort_by="acc", endpoint=hub.endpoint)
    assert (one.tag, [result.tag for result in one.results]) == ("1.10", ["1.10"])


def test_adapters_are_compared_by_one_setting_of_one_task(hub: LocalHub, make_folder: MakeFolder) -> None:
    for number, name in enumerate(("full", "best", "few")):
        push(hub, make_folder(number, revision=OLD), f"alice/{name}")

    def publish(name: str, *changes: dict[str, Any]) -> None:
        add_results(hub, f"alice/{name}", *(record(hub, f"alice/{name}", "v1", **change) for change in changes))

    def names(sort_by: str, **mode: Any) -> list[str]:
        found = find_adapters("org/base", OLD, sort_by=sort_by, endpoint=hub.endpoint, **mode)
        return [one.repo_id.removeprefix("alice/") for one in found]

    publish("full", {"value": 0.5}, {"value": 0.1, "limit": 8})
    publish("few", {"value": 1.0, "limit": 8})
    publish("best", {"value": 0.6})
    # The whole label of the results without --limit; the adapter that has only others comes last.
    assert names("capitals/acc") == ["best", "full", "few"]
    assert names("capitals (first 8)/acc") == ["few", "full", "best"]
    with pytest.raises(
        ConfigError,
        match=r"^sort_by='acc' fits results that cannot be compared: capitals \(first 8\)/acc, capitals/acc; give one$",
    ):
        names("acc")
    # The task has changed: the same label, but other questions.
    publish("best", {"value": 0.6, "task_digest": "e" * 64})
    with pytest.raises(ConfigError, match=r"compared: capitals \(ddddddd\)/acc, capitals \(eeeeeee\)/acc; give one$"):
        names("capitals/acc")
    assert names("capitals (eeeeeee)/acc")[0] == "best"
    assert names("capitals (ddddddd)/acc")[0] == "full"


@pytest.mark.parametrize("directions", [(True, False), (True, None), (None, None)])
def test_the_mode_is_asked_for_if_results_do_not_agree_on_it(
    hub: LocalHub, make_folder: MakeFolder, directions: tuple[bool | None, bool | None]
) -> None:
    for number, higher in enumerate(directions):
        push(hub, make_folder(number, revision=OLD), f"alice/{number}")
        repo_id = f"alice/{number}"
        add_results(hub, repo_id, record(hub, repo_id, "v1", number / 2, higher_is_better=higher))
    with pytest.raises(
        ConfigError, match=r"^sort_by='acc': the results do not agree .*: give mode='min' or mode='max'"
    ):
        find_adapters("org/base", OLD, sort_by="acc", endpoint=hub.endpoint)
    found = find_adapters("org/base", OLD, sort_by="acc", mode="max", endpoint=hub.endpoint)
    assert [one.repo_id for one in found] == ["alice/1", "alice/0"]


def test_a_result_is_not_compared_with_a_metric_of_a_training(hub: LocalHub, make_folder: MakeFolder) -> None:
    for number, name in enumerate(("trained", "measured")):
        push(hub, make_folder(number, revision=OLD), f"alice/{name}")  # a val_loss of 2.0 and of 1.0
    result = record(hub, "alice/measured", "v1", 9.0, metric="val_loss", higher_is_better=False)
    add_results(hub, "alice/measured", result)
    found = find_adapters("org/base", OLD, sort_by="val_loss", endpoint=hub.endpoint)
    assert [one.repo_id for one in found] == ["alice/measured", "alice/trained"]


def test_results_that_cannot_be_understood_are_left_out(
    hub: LocalHub, make_folder: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    push(hub, make_folder(1, revision=OLD))
    hub.add("alice/adapter", {RESULTS_FILE: b"{"})
    with caplog.at_level(logging.WARNING):
        (one,) = find_adapters("org/base", OLD, endpoint=hub.endpoint)
    assert one.results == ()
    assert "results.jsonl of alice/adapter is left out: line 1" in caplog.text


def test_a_new_version_keeps_the_results_on_the_card(
    hub: LocalHub, make_folder: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    push(hub, make_folder(1, revision=OLD))
    add_results(hub, "alice/adapter", record(hub, "alice/adapter", "v1", 0.625))
    push(hub, make_folder(2, revision=OLD))

    def card() -> str:
        repo = hub.store.find("alice/adapter")
        assert repo is not None
        head = repo.find("main")
        assert head is not None
        content = head.files["README.md"].content
        assert isinstance(content, bytes)
        return content.decode()

    assert "| v1 | 0.625 |" in card()
    hub.add("alice/adapter", {RESULTS_FILE: b"{"})
    with caplog.at_level(logging.WARNING):
        push(hub, make_folder(3, revision=OLD))
    assert "| v1 |" not in card()
    assert "the card of alice/adapter is published without results: line 1" in caplog.text
