"""Adapters are downloaded by version: known files only, safetensors only, of bounded size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from swarm_plugins.errors import CapacityError, CheckpointError, ConfigError, HubError
from swarm_plugins.hub import PushTarget, fetch_adapter, open_adapter, push_folder
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.versions import ModelVersion

MakeFolder = Callable[..., Path]
CONFIG = b'{"peft_type": "LORA"}'


def test_latest_is_the_newest_version_and_not_the_newest_commit(
    hub: LocalHub, target: PushTarget, make_folder: MakeFolder, tmp_path: Path
) -> None:
    folders = [make_folder(seed) for seed in (1, 2)]
    commits = [push_folder(folder, target, token="token-of-alice").commit for folder in folders]
    # What a push that broke off before its tag leaves behind.
    hub.add("alice/adapter", {"adapter_model.safetensors": b"half a version"})
    adapter = fetch_adapter("alice/adapter", endpoint=hub.endpoint, cache_dir=tmp_path / "cache")
    assert adapter.label == "alice/adapter@v2"
    assert adapter.base == ModelVersion("org/base", "a" * 40)
    weights = (adapter.folder / "adapter_model.safetensors").read_bytes()
    assert weights == (folders[1] / "adapter_model.safetensors").read_bytes()
    for version in ("v1", commits[0]):
        adapter = fetch_adapter("alice/adapter", version, endpoint=hub.endpoint, cache_dir=tmp_path / "cache")
        weights = (adapter.folder / "adapter_model.safetensors").read_bytes()
        assert weights == (folders[0] / "adapter_model.safetensors").read_bytes()


def test_a_repository_without_versions_gives_its_main_branch(hub: LocalHub, tmp_path: Path) -> None:
    hub.add("bob/plain", {"adapter_config.json": CONFIG, "adapter_model.safetensors": b"x", "run.py": b"evil"})
    adapter = fetch_adapter("bob/plain", endpoint=hub.endpoint, cache_dir=tmp_path)
    assert (adapter.label, adapter.base) == ("bob/plain@main", None)
    assert sorted(path.name for path in adapter.folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_version_in_the_cache_serves_while_the_hub_is_down(
    hub: LocalHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sha = hub.add("bob/plain", {"adapter_config.json": CONFIG, "adapter_model.safetensors": b"x"})
    folder = fetch_adapter("bob/plain", "main", endpoint=hub.endpoint, cache_dir=tmp_path).folder
    hub.faults.is_down = True
    with pytest.raises(HubError, match=r"load bob/plain@other: ") as caught:
        fetch_adapter("bob/plain", "other", endpoint=hub.endpoint, cache_dir=tmp_path)
    assert (caught.value.kind, caught.value.is_passing) == ("unreachable", True)
    assert fetch_adapter("bob/plain", sha, endpoint=hub.endpoint, cache_dir=tmp_path).folder == folder
    assert f"bob/plain@{sha} is taken from the cache" in caplog.text


def test_versions_in_the_cache_are_found_by_name_while_the_hub_is_down(
    hub: LocalHub, target: PushTarget, make_folder: MakeFolder, tmp_path: Path
) -> None:
    for seed in (1, 2):
        push_folder(make_folder(seed), target, token="token-of-alice")

    def fetched(version: str) -> tuple[Path, str]:
        found = fetch_adapter("alice/adapter", version, endpoint=hub.endpoint, cache_dir=tmp_path / "cache")
        return found.folder, found.label

    by_name = {version: fetched(version) for version in ("v1", "v2")}
    hub.faults.is_down = True
    assert {version: fetched(version) for version in by_name} == by_name
    assert fetched("latest") == by_name["v2"]


def test_pickled_weights_are_refused_before_anything_is_downloaded(hub: LocalHub, tmp_path: Path) -> None:
    hub.add("bob/pickled", {"adapter_config.json": CONFIG, "adapter_model.bin": b"x"})
    with pytest.raises(CheckpointError, match=r"adapter_model.bin would run code when it is read, and is refused"):
        fetch_adapter("bob/pickled", endpoint=hub.endpoint, cache_dir=tmp_path)
    hub.add("bob/model", {"config.json": b"{}", "model.safetensors": b"x"})
    with pytest.raises(CheckpointError, match=r"has no adapter_config.json: it is not an adapter"):
        fetch_adapter("bob/model", endpoint=hub.endpoint, cache_dir=tmp_path)
    assert hub.bytes_served("bob/pickled") == hub.bytes_served("bob/model") == 0


def test_a_file_larger_than_any_adapter_is_not_downloaded(hub: LocalHub, tmp_path: Path) -> None:
    files = {"adapter_config.json": bytes(2 << 20), "adapter_model.safetensors": b"x"}
    hub.add("bob/huge", files)
    with pytest.raises(CapacityError, match=r"adapter_config.json of bob/huge has 2097152 bytes; .* at most 1048576"):
        fetch_adapter("bob/huge", endpoint=hub.endpoint, cache_dir=tmp_path)
    assert hub.bytes_served("bob/huge") == 0


@pytest.mark.parametrize(
    ("repo", "version", "kind", "message"),
    [
        (
            "alice/none",
            "latest",
            HubError,
            r"load alice/none@latest: no such repository, or a private one .*a token that may read",
        ),
        ("bob/plain", "v7", HubError, r"load bob/plain@v7: no such version; the repository has v1, beta, main"),
        ("a/b/c", "latest", ConfigError, r"cannot be the name of a repository"),
    ],
)
def test_what_is_not_there_is_named(
    repo: str, version: str, kind: type[Exception], message: str, hub: LocalHub, tmp_path: Path
) -> None:
    hub.add("bob/plain", {"adapter_config.json": CONFIG, "adapter_model.safetensors": b"x"})
    for tag in ("beta", "v1"):
        HfApi(endpoint=hub.endpoint, token="token-of-bob").create_tag("bob/plain", tag=tag)
    with pytest.raises(kind, match=message):
        fetch_adapter(repo, version, endpoint=hub.endpoint, cache_dir=tmp_path)


def test_a_folder_is_an_adapter_too(make_folder: MakeFolder, tmp_path: Path) -> None:
    assert open_adapter(make_folder(1)).base == ModelVersion("org/base", "a" * 40)
    assert open_adapter(make_folder(2, manifest=False)).base == ModelVersion("org/base", "a" * 40)
    with pytest.raises(ConfigError, match=r"is not a directory"):
        open_adapter(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"has no adapter_config.json"):
        open_adapter(tmp_path)
