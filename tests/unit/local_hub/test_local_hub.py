"""The local Hub: huggingface_hub itself reads from it, and it counts what went out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from swarm_plugins.errors import ConfigError
from swarm_plugins.local_hub import HubRequest, LocalHub

REPO = "alice/tiny"
FILES = {"config.json": b"{}", "model.safetensors": bytes(200_000), "sub/notes.txt": b"notes"}


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with LocalHub() as running:
        running.add(REPO, FILES)
        yield running


def test_a_snapshot_has_every_file(hub: LocalHub, tmp_path: Path) -> None:
    root = Path(snapshot_download(REPO, endpoint=hub.endpoint, cache_dir=tmp_path))
    assert {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()} == FILES
    assert hub.bytes_served(REPO) == sum(map(len, FILES.values()))
    assert hub.bytes_served(REPO, "model.safetensors") == 200_000


def test_a_directory_is_served_as_it_is(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.txt").write_bytes(b"content")
    sha = hub.add("bob/other", tmp_path / "source")
    path = hf_hub_download("bob/other", "a.txt", endpoint=hub.endpoint, cache_dir=tmp_path / "cache", revision=sha)
    assert Path(path).read_bytes() == b"content"


def test_commits_branches_and_tags_are_listed(hub: LocalHub) -> None:
    api = HfApi(endpoint=hub.endpoint)
    first = api.model_info(REPO).sha
    second = hub.add(REPO, {"config.json": b"[]"}, branch="dev")
    repo = hub.store.find(REPO)
    assert repo is not None
    assert first is not None
    repo.tags["v1"] = first
    refs = api.list_repo_refs(REPO)
    assert {ref.name: ref.target_commit for ref in refs.branches} == {"main": first, "dev": second}
    assert {ref.name: ref.target_commit for ref in refs.tags} == {"v1": first}
    assert api.model_info(REPO, revision="v1").sha == first
    assert [commit.sha for commit in repo.history("main")] == [first]


def test_the_tree_tells_large_files(hub: LocalHub) -> None:
    tree = {entry.path: entry for entry in HfApi(endpoint=hub.endpoint).list_repo_tree(REPO, recursive=True)}
    assert tree.keys() == {*FILES, "sub"}
    assert tree["model.safetensors"].lfs.size == 200_000
    assert tree["config.json"].lfs is None


def test_the_tree_of_a_folder_ends_at_its_folders(hub: LocalHub) -> None:
    api = HfApi(endpoint=hub.endpoint)
    hub.add(REPO, {"sub/deep/er.txt": b"er"})

    def paths(folder: str | None) -> list[str]:
        return [entry.path for entry in api.list_repo_tree(REPO, folder)]

    assert paths(None) == ["sub", "config.json", "model.safetensors"]
    assert paths("sub") == ["sub/deep", "sub/notes.txt"]
    with pytest.raises(RemoteEntryNotFoundError):
        paths("su")


def test_models_are_listed(hub: LocalHub) -> None:
    hub.add("bob/secret", FILES, private=True)
    assert [model.id for model in HfApi(endpoint=hub.endpoint).list_models()] == [REPO]


def test_a_later_commit_keeps_and_deletes_files(hub: LocalHub) -> None:
    repo = hub.store.find(REPO)
    assert repo is not None
    sha = hub.store.commit(repo, {"config.json": None})
    assert set(repo.commits[sha].files) == {"model.safetensors", "sub/notes.txt"}
    assert len(repo.history("main")) == 2


def test_the_same_content_has_the_same_commit() -> None:
    first, second = LocalHub(), LocalHub()
    assert first.add(REPO, FILES) == second.add("other/name", FILES)
    assert first.add(REPO, FILES) != second.add("more", {**FILES, "config.json": b"[]"})


@pytest.mark.parametrize(
    ("repo", "file", "revision", "kind"),
    [
        ("alice/none", "config.json", None, RepositoryNotFoundError),
        (REPO, "none.json", None, RemoteEntryNotFoundError),
        (REPO, "config.json", "none", RevisionNotFoundError),
        ("bob/gated", "config.json", None, GatedRepoError),
        ("bob/private", "config.json", None, RepositoryNotFoundError),
    ],
)
def test_errors_are_those_of_the_real_hub(
    repo: str, file: str, revision: str | None, kind: type[Exception], hub: LocalHub, tmp_path: Path
) -> None:
    hub.add("bob/gated", FILES, gated=True)
    hub.add("bob/private", FILES, private=True)
    with pytest.raises(kind):
        hf_hub_download(repo, file, revision=revision, endpoint=hub.endpoint, cache_dir=tmp_path, token=False)


def test_only_the_last_requests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.local_hub.state._MAX_REQUESTS", 2)
    hub = LocalHub()
    for path in ("/1", "/2", "/3"):
        hub.record(HubRequest("GET", path, None, None))
    assert [request.path for request in hub.requests] == ["/2", "/3"]


def test_closing_ends_connections_and_threads() -> None:
    before = threading.active_count()
    with LocalHub() as hub:
        hub.add(REPO, FILES)
        HfApi(endpoint=hub.endpoint).model_info(REPO)
        assert threading.active_count() > before
    hub.close()
    assert threading.active_count() == before
    with pytest.raises(ConfigError, match=r"the local Hub is not running"):
        _ = hub.endpoint
