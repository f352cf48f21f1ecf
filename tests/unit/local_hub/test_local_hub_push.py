"""The local Hub's write side, through huggingface_hub itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError

from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.local_hub import LocalHub

REPO = "alice/repo"
# What a slow Hub is given to answer, and a client to ask.
ANSWER_S, ASKED_S = 60.0, 20.0


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LocalHub]:
    with LocalHub(tmp_path / "hub") as running:
        yield running


@pytest.fixture
def api(hub: LocalHub) -> HfApi:
    api = HfApi(endpoint=hub.endpoint, token="any")
    api.create_repo(REPO)
    return api


def status(error: pytest.ExceptionInfo[HfHubHTTPError]) -> int:
    return int(error.value.response.status_code)


def commit(api: HfApi, folder: Path, *, parent: str | None = None, content: bytes = b"x" * 1000) -> str:
    (folder / "big.safetensors").write_bytes(content)
    with (folder / "big.safetensors").open("rb") as stream:
        additions = [CommitOperationAdd("big.safetensors", stream), CommitOperationAdd("small.txt", content[:3])]
        return str(api.create_commit(REPO, additions, commit_message="one", parent_commit=parent).oid)


def test_what_was_pushed_is_there_after_a_new_start(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    sha = commit(api, tmp_path)
    api.create_tag(REPO, tag="v1", revision=sha)
    api.create_branch(REPO, branch="a/b", revision="v1")
    hub.close()
    with LocalHub(tmp_path / "hub") as again:
        fresh = HfApi(endpoint=again.endpoint)
        refs = fresh.list_repo_refs(REPO)
        assert {ref.name: ref.target_commit for ref in refs.tags} == {"v1": sha}
        assert {ref.name for ref in refs.branches} == {"main", "a/b"}
        path = fresh.hf_hub_download(REPO, "big.safetensors", revision="v1", cache_dir=tmp_path / "cache")
        assert Path(path).read_bytes() == b"x" * 1000
        assert [one.title for one in fresh.list_repo_commits(REPO)] == ["one", "initial commit"]


def test_a_parent_that_has_moved_is_refused(api: HfApi, tmp_path: Path) -> None:
    first = commit(api, tmp_path)
    commit(api, tmp_path, parent=first, content=b"y" * 1000)
    with pytest.raises(HfHubHTTPError) as error:
        commit(api, tmp_path, parent=first, content=b"z" * 1000)
    assert status(error) == 412


def test_a_pull_request_is_refused_and_nothing_is_pushed(hub: LocalHub, api: HfApi) -> None:
    files = [CommitOperationAdd("small.txt", b"text")]
    with pytest.raises(HfHubHTTPError, match="this Hub has no pull requests: push to a branch") as error:
        api.create_commit(REPO, files, commit_message="one", create_pr=True)
    assert status(error) == 501
    assert not api.file_exists(REPO, "small.txt")


def test_files_can_be_deleted(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    commit(api, tmp_path)
    api.create_commit(REPO, [CommitOperationDelete("small.txt")], commit_message="less")
    assert api.list_repo_files(REPO) == [".gitattributes", "big.safetensors"]


def test_the_same_content_is_neither_uploaded_nor_committed_twice(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    first = commit(api, tmp_path)
    hub.forget()
    assert commit(api, tmp_path) == first
    assert not [request for request in hub.requests if request.method == "PUT" or "/commit/" in request.path]


def test_names_are_taken_once(api: HfApi, tmp_path: Path) -> None:
    api.create_tag(REPO, tag="t")
    with pytest.raises(HfHubHTTPError) as error:
        api.create_tag(REPO, tag="t")
    assert status(error) == 409
    with pytest.raises(HfHubHTTPError) as error:
        api.create_repo(REPO)
    assert status(error) == 409
    api.create_repo(REPO, exist_ok=True)
    api.delete_tag(REPO, tag="t")
    api.create_tag(REPO, tag="t")


@pytest.mark.parametrize("metadata", ["tags: [", "1: 2", f"a: {'[' * 500}"], ids=["open", "number", "deep"])
def test_a_broken_card_is_refused(api: HfApi, metadata: str) -> None:
    broken = CommitOperationAdd("README.md", f"---\n{metadata}\n---\n".encode())
    with pytest.raises(ValueError, match=r"Invalid metadata in README.md"):
        api.create_commit(REPO, [broken], commit_message="card")


def test_only_owners_of_a_token_write() -> None:
    with LocalHub(tokens={"a": "alice"}) as hub:
        for token, repo, expected in ((False, REPO, 401), ("wrong", REPO, 401), ("a", "bob/repo", 403)):
            with pytest.raises(HfHubHTTPError) as error:
                HfApi(endpoint=hub.endpoint, token=token).create_repo(repo)
            assert status(error) == expected
        api = HfApi(endpoint=hub.endpoint, token="a")
        assert api.create_repo("short").repo_id == "alice/short"
        assert api.whoami()["name"] == "alice"
        hub.store.create("bob/repo")
        with pytest.raises(HfHubHTTPError) as error:
            api.create_tag("bob/repo", tag="t")
        assert status(error) == 403


def test_models_are_found_by_the_tags_of_their_cards(hub: LocalHub) -> None:
    card = b"---\nbase_model: org/base\nbase_model_relation: adapter\nlibrary_name: peft\ntags: [mine]\n---\n"
    hub.add("alice/one", {"README.md": card})
    hub.add("alice/two", {"README.md": b"no card"})
    api = HfApi(endpoint=hub.endpoint)
    assert [one.id for one in api.list_models(filter=["base_model:adapter:org/base", "mine"])] == ["alice/one"]
    assert [one.id for one in api.list_models(filter="peft")] == ["alice/one"]
    assert [one.id for one in api.list_models(author="alice", limit=1)] == ["alice/one"]
    assert list(api.list_models(filter="other")) == []


@pytest.mark.parametrize("metadata", ["1: 2", "base_model: 5", f"a: {'[' * 500}{']' * 500}"])
def test_a_card_that_cannot_be_understood_hides_no_other(hub: LocalHub, metadata: str) -> None:
    hub.add("alice/odd", {"README.md": f"---\n{metadata}\n---\n".encode()})
    hub.add("alice/two", {"README.md": b"no card"})
    assert [one.id for one in HfApi(endpoint=hub.endpoint).list_models()] == ["alice/odd", "alice/two"]


def test_a_fault_of_the_hub_is_an_answer(hub: LocalHub) -> None:
    answer = httpx2.get(f"{hub.endpoint}/api/models?limit=\u4f60")
    assert (answer.status_code, answer.headers["X-Error-Message"][:38]) == (
        500,
        "ValueError: invalid literal for int() ",
    )


@pytest.mark.parametrize(("fault", "is_there"), [("cut", False), ("lost", True)])
def test_a_commit_is_there_as_a_whole_or_not_at_all(
    fault: str, is_there: bool, hub: LocalHub, api: HfApi, tmp_path: Path
) -> None:
    before = api.model_info(REPO).sha
    hub.faults.routes["commit"] = [fault]
    with pytest.raises(httpx2.RemoteProtocolError):
        commit(api, tmp_path)
    after = api.model_info(REPO)
    assert (after.sha != before) == is_there
    names = {sibling.rfilename for sibling in after.siblings or ()}
    assert names == {".gitattributes"} | ({"big.safetensors", "small.txt"} if is_there else set())


def test_a_disk_that_cannot_be_written_leaves_the_store_as_it_was(
    hub: LocalHub, api: HfApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    repo = hub.store.find(REPO)
    assert repo is not None
    before = dict(repo.branches)
    monkeypatch.setattr("swarm_plugins.local_hub.repositories.write_whole", full)
    with pytest.raises(OSError, match=r"No space left"):
        hub.store.commit(repo, {".gitattributes": None})
    assert repo.branches == before


def test_a_damaged_folder_and_a_taken_port_are_named(hub: LocalHub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"port \d+ of 127.0.0.1 cannot be used"):
        LocalHub(port=int(hub.endpoint.rsplit(":", 1)[1])).start()
    (tmp_path / "other" / "repos").mkdir(parents=True)
    (tmp_path / "other" / "repos" / "a.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"a.json cannot be read as a repository"):
        LocalHub(tmp_path / "other")


def test_closing_does_not_wait_for_slow_answers(hub: LocalHub, api: HfApi) -> None:
    hub.faults.delays_s["refs"] = ANSWER_S
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            api.list_repo_refs(REPO)
        except httpx2.HTTPError as exc:
            errors.append(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + ASKED_S
    while not any("/refs" in request.path for request in list(hub.requests)):
        assert time.monotonic() < deadline
        thread.join(0.01)
    hub.close()
    thread.join(ANSWER_S / 2)
    assert not thread.is_alive()
    assert len(errors) == 1
