"""A version is published whole or not at all, through the real client, whatever goes wrong on the way."""

from __future__ import annotations

import json
import logging
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from evaluation_kit import RECORD
from typer.testing import CliRunner

from swarm_plugins.cli.main import app
from swarm_plugins.errors import CheckpointError, ConfigError, HubError
from swarm_plugins.hub import Manifest, PushTarget, RetryPlan, push_folder
from swarm_plugins.hub.folder import files_to_push, push_command
from swarm_plugins.hub.push import hub_to_push_to
from swarm_plugins.hub.results import format_results
from swarm_plugins.hub.results_push import ResultsRepository
from swarm_plugins.local_hub import LocalHub

TOKEN = "token-of-alice"
FAST = RetryPlan(attempts=3, first_pause_s=0.01, attempt_s=20.0)
FILES = {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors", "swarm.json"}
MakeFolder = Callable[..., Path]


def tags(hub: LocalHub, repo_id: str = "alice/adapter") -> dict[str, str]:
    repo = hub.store.find(repo_id)
    return {} if repo is None else dict(repo.tags)


def test_versions_are_whole_commits_with_tags(hub: LocalHub, target: PushTarget, make_folder: MakeFolder) -> None:
    first = push_folder(make_folder(1), target, token=TOKEN, retries=FAST)
    second = push_folder(make_folder(2), target, token=TOKEN, retries=FAST)
    assert (first.tag, second.tag, first.repo_id) == ("v1", "v2", "alice/adapter")
    repo = hub.store.find("alice/adapter")
    assert repo is not None
    assert repo.tags == {"v1": first.commit, "v2": second.commit}
    assert set(repo.commits[second.commit].files) == FILES
    assert repo.commits[second.commit].parent == first.commit


def test_what_was_pushed_is_noted_and_stays_on_disk(target: PushTarget, make_folder: MakeFolder) -> None:
    folder = make_folder()
    push_folder(folder, target, token=TOKEN, retries=FAST)
    noted = PushTarget.read(folder)
    assert noted is not None
    assert noted.pushed_as == "v1"
    assert push_folder(folder, noted, token=TOKEN, retries=FAST).tag == "v1", "the same version is not published twice"


@pytest.mark.parametrize(
    ("route", "fault"),
    [
        ("create_repo", "cut"),
        ("create_repo", "lost"),
        ("refs", 503),
        ("validate_yaml", 500),
        ("preupload", 429),
        ("lfs_put", "cut"),
        ("commit", 412),
        ("commit", "cut"),
        ("commit", "lost"),
        ("create_tag", 500),
        ("create_tag", "lost"),
    ],
)
def test_a_fault_that_passes_costs_nothing(
    route: str, fault: int | str, hub: LocalHub, target: PushTarget, make_folder: MakeFolder
) -> None:
    hub.faults.routes[route] = [fault]
    pushed = push_folder(make_folder(), target, token=TOKEN, retries=FAST)
    assert tags(hub) == {"v1": pushed.commit}
    repo = hub.store.find("alice/adapter")
    assert repo is not None
    assert len(repo.history("main")) == 2, "the first commit of the repository, and one for the version"


@pytest.mark.parametrize("route", ["create_repo", "commit", "create_tag"])
def test_a_fault_that_stays_leaves_no_tag(
    route: str, hub: LocalHub, target: PushTarget, make_folder: MakeFolder
) -> None:
    hub.faults.routes[route] = [500] * FAST.attempts
    folder = make_folder()
    with pytest.raises(HubError, match=r"push to alice/adapter: the Hub answered 500") as caught:
        push_folder(folder, target, token=TOKEN, retries=FAST)
    assert caught.value.is_passing
    assert tags(hub) == {}
    assert push_folder(folder, target, token=TOKEN, retries=FAST).tag == "v1"


def test_somebody_who_pushes_in_between_every_time_is_named(
    hub: LocalHub, target: PushTarget, make_folder: MakeFolder
) -> None:
    hub.faults.routes["commit"] = [412] * FAST.attempts
    with pytest.raises(HubError, match=r"another push came in between"):
        push_folder(make_folder(), target, token=TOKEN, retries=FAST)
    assert tags(hub) == {}


@pytest.mark.parametrize(
    ("repo", "token", "message"),
    [
        pytest.param("alice/adapter", False, r"no valid token.*hf auth login.*HF_TOKEN", id="no-token"),
        pytest.param("alice/adapter", "other", r"no valid token.*hf auth login", id="wrong-token"),
        pytest.param("bob/adapter", TOKEN, r"not allowed.*use a repository and a token of your own", id="taken"),
        pytest.param("alice/theirs.git", TOKEN, r"alice/theirs\.git", id="refused-name"),
    ],
)
def test_a_refusal_is_not_tried_again(
    repo: str, token: str | bool, message: str, hub: LocalHub, make_folder: MakeFolder
) -> None:
    hub.store.create("bob/adapter")
    folder = make_folder()
    with pytest.raises((HubError, ConfigError), match=message):
        push_folder(folder, PushTarget(repo_id=repo, endpoint=hub.endpoint), token=token, retries=FAST)
    assert sum(request.path == "/api/repos/create" for request in hub.requests) <= 1


def test_a_tag_that_is_taken_by_another_run_is_passed_over(
    hub: LocalHub, target: PushTarget, make_folder: MakeFolder
) -> None:
    first = push_folder(make_folder(1), target, token=TOKEN, retries=FAST)
    hub.faults.routes["create_tag"] = [409]
    second = push_folder(make_folder(2), target, token=TOKEN, retries=FAST)
    assert tags(hub) == {"v1": first.commit, "v2": second.commit}


def test_a_tag_that_was_asked_for_and_is_taken_is_refused(
    hub: LocalHub, target: PushTarget, make_folder: MakeFolder
) -> None:
    wanted = msgspec.structs.replace(target, tag="1.0")
    folder = make_folder(1)
    first = push_folder(folder, wanted, token=TOKEN, retries=FAST)

    def check_refusal(folder: Path) -> None:
        repo = hub.store.find("alice/adapter")
        assert repo is not None
        before = dict(repo.branches)
        with pytest.raises(HubError, match=r"the tag '1.0' is taken by commit .*choose another"):
            push_folder(folder, wanted, token=TOKEN, retries=FAST)
        assert (repo.branches, repo.tags) == (before, {"1.0": first.commit}), "nothing of it is published"

    check_refusal(make_folder(2))
    (make_folder(3) / "README.md").rename(folder / "README.md")
    check_refusal(folder)
    hub.add("alice/adapter", {"other.txt": b"main has moved"})
    check_refusal(folder)


def test_the_same_version_may_be_pushed_again_under_its_tag(
    hub: LocalHub, target: PushTarget, make_folder: MakeFolder
) -> None:
    folder, wanted = make_folder(), msgspec.structs.replace(target, tag="1.0")
    first = push_folder(folder, wanted, token=TOKEN, retries=FAST)
    assert push_folder(folder, wanted, token=TOKEN, retries=FAST).commit == first.commit


def make_model(folder: Path, *weights: str, **others: str) -> Path:
    """Writes what looks like a whole model, with an index if there are several files."""
    folder.mkdir()
    index = {"model.safetensors.index.json": json.dumps({"weight_map": {name: name for name in weights}})}
    files = {"config.json": "{}", "README.md": "# Mine", **(index if len(weights) > 1 else {}), **others}
    for name, text in {**files, **{name: f"{name} of {folder}" for name in weights}}.items():
        (folder / name).write_text(text)
    return folder


WHOLE, SHARDS = ("model.safetensors",), ("model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors")


@pytest.mark.parametrize(
    ("first", "second"), [(WHOLE, SHARDS), (SHARDS, WHOLE), (SHARDS, ("a.safetensors", "b.safetensors"))]
)
def test_a_version_has_no_files_of_the_one_before(
    first: tuple[str, ...], second: tuple[str, ...], hub: LocalHub, target: PushTarget, make_folder: MakeFolder,
    tmp_path: Path,
) -> None:  # fmt: skip
    push_folder(make_folder(), target, token=TOKEN, retries=FAST)
    hub.add("alice/adapter", {"results.jsonl": b"", "LICENSE": b"mine"})
    push_folder(make_model(tmp_path / "first", *first, **{"tokenizer.json": "{}"}), target, token=TOKEN, retries=FAST)
    folder = make_model(tmp_path / "second", *second)
    pushed = push_folder(folder, target, token=TOKEN, retries=FAST)
    repo = hub.store.find("alice/adapter")
    assert repo is not None
    theirs = {".gitattributes", "results.jsonl", "LICENSE", "tokenizer.json"}
    assert set(repo.commits[pushed.commit].files) == theirs | {path.name for path in folder.iterdir()} - {"push.json"}


def test_an_adapter_without_manifest_has_not_the_one_before(
    hub: LocalHub, target: PushTarget, make_folder: MakeFolder
) -> None:
    push_folder(make_folder(1), target, token=TOKEN, retries=FAST)
    hub.add("alice/adapter", {"tokenizer.json": b"a Trainer pushes it with the adapter"})
    pushed = push_folder(make_folder(2, manifest=False), target, token=TOKEN, retries=FAST)
    repo = hub.store.find("alice/adapter")
    assert repo is not None
    assert set(repo.commits[pushed.commit].files) == {*FILES, "tokenizer.json"} - {"swarm.json"}


def test_a_whole_model_is_pushed_with_all_that_a_merge_writes(tmp_path: Path) -> None:
    more = dict.fromkeys(("LICENSE.txt", "processor_config.json", "tekken.json", "tokenizer.json"), "x")
    folder = make_model(tmp_path / "model", *SHARDS, **more)
    written = {path.name for path in folder.iterdir()}
    (folder / "optimizer.pt").write_text("x")
    assert {path.name for path in files_to_push(folder)} == written


@pytest.mark.parametrize(
    ("named", "found", "message"),
    [
        (["a.safetensors", "b.safetensors"], ["a.safetensors"], "lacks b.safetensors"),
        (["../secret.safetensors"], [], r"lacks ../secret.safetensors"),
        (["notes.txt"], ["notes.txt"], "lacks notes.txt"),
        (["a.safetensors"], ["a.safetensors", *WHOLE], "has, besides the model's weights, model.safetensors"),
        (["a.safetensors"], ["a.safetensors", SHARDS[0]], "has, besides the model's weights, model-00001-of-000002"),
    ],
)
def test_weights_are_those_that_the_index_names(
    named: list[str], found: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "secret.safetensors").write_text("secret")
    index = json.dumps({"weight_map": dict(enumerate(named))})
    folder = make_model(tmp_path / "model", *found, **{"model.safetensors.index.json": index})
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=rf"{message}.*: save the model once more"):
        files_to_push(folder)


@pytest.mark.parametrize("metadata", ["pipeline_tag: [text-generation]", "model-index: [{name: n, results: 5}]"])
def test_a_card_that_cannot_take_the_results_is_published_without(
    metadata: str, hub: LocalHub, target: PushTarget, make_folder: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    push_folder(make_folder(1), target, token=TOKEN, retries=FAST)
    hub.add("alice/adapter", {"results.jsonl": format_results([RECORD])})
    folder = make_folder(2)
    (folder / "README.md").write_text(f"---\n{metadata}\n---\n")
    with caplog.at_level(logging.WARNING):
        assert push_folder(folder, target, token=TOKEN, retries=FAST).tag == "v2"
    assert "the card of alice/adapter is published without results: the card (README.md)" in caplog.text
    with pytest.raises(CheckpointError, match=r"the card \(README.md\) of alice/adapter cannot be understood"):
        ResultsRepository("alice/adapter", endpoint=hub.endpoint).read()  # before anything is measured


def test_a_private_repository_is_made_private(hub: LocalHub, target: PushTarget, make_folder: MakeFolder) -> None:
    push_folder(make_folder(), msgspec.structs.replace(target, private=True), token=TOKEN, retries=FAST)
    repo = hub.store.find("alice/adapter")
    assert repo is not None
    assert repo.private


def test_a_hub_that_does_not_answer_is_left_after_a_while(
    hub: LocalHub, target: PushTarget, make_folder: MakeFolder
) -> None:
    hub.faults.delays_s["create_repo"] = 60.0
    folder = make_folder()
    started = time.monotonic()
    with pytest.raises(HubError, match=r"no answer from the Hub within 0 s"):
        push_folder(folder, target, token=TOKEN, retries=RetryPlan(attempts=1, attempt_s=0.2))
    assert time.monotonic() - started < 55, "it waited for the answer"


def test_a_stop_ends_the_tries(hub: LocalHub, target: PushTarget, make_folder: MakeFolder) -> None:
    hub.faults.is_down = True
    stop = threading.Event()
    stop.set()
    with pytest.raises(HubError, match=rf"cannot be reached at {hub.endpoint} "):
        push_folder(make_folder(), target, token=TOKEN, retries=RetryPlan(first_pause_s=60), stop=stop)


def test_only_adapters_in_safetensors_are_pushed(target: PushTarget, make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder()
    (folder / "notes.txt").write_text("private")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"has no adapter_model.safetensors.*only safetensors"):
        push_folder(folder, target, token=TOKEN, retries=FAST)
    with pytest.raises(CheckpointError, match=r"is not a directory"):
        push_folder(tmp_path / "none", target, token=TOKEN, retries=FAST)


def test_other_files_of_the_folder_stay_at_home(hub: LocalHub, target: PushTarget, make_folder: MakeFolder) -> None:
    folder = make_folder()
    (folder / "optimizer.pt").write_bytes(b"x")
    target.write(folder)
    pushed = push_folder(folder, target, token=TOKEN, retries=FAST)
    repo = hub.store.find("alice/adapter")
    assert repo is not None
    assert set(repo.commits[pushed.commit].files) == FILES


@pytest.mark.parametrize(
    ("named", "is_published"),
    [("/home/alice/base", False), ("~/base", False), ("models/base", False), ("org/base", True), ("base", True)],
)
def test_the_path_of_a_base_in_a_directory_stays_at_home(
    named: str, is_published: bool, hub: LocalHub, target: PushTarget, make_folder: MakeFolder, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "base").mkdir(parents=True)
    folder = make_folder(base=named, manifest=False)
    # Of a copy in a directory, too, the id on the Hub may be known.
    Manifest(base_name="base", base_revision=f"local-{'c' * 40}").write(folder)
    pushed = push_folder(folder, target, token=TOKEN, retries=FAST)
    repo = hub.store.find("alice/adapter")
    assert repo is not None
    content = repo.commits[pushed.commit].files["adapter_config.json"].content
    assert isinstance(content, bytes)
    kept = json.loads((folder / "adapter_config.json").read_bytes())
    assert kept["base_model_name_or_path"] == named, "merging looks for the base there"
    assert json.loads(content) == {**kept, "base_model_name_or_path": named if is_published else None}


def test_the_library_does_not_advise_what_is_done_on_purpose(
    target: PushTarget, make_folder: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        push_folder(make_folder(), target, token=TOKEN, retries=FAST)
    assert "Falling back" not in caplog.text


def test_a_damaged_note_of_the_target_is_refused(make_folder: MakeFolder) -> None:
    folder = make_folder()
    (folder / "push.json").write_text("{")
    with pytest.raises(ConfigError, match=r"push.json cannot be read.*give --repo"):
        PushTarget.read(folder)


def swarm_push(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["push", *map(str, words)])
    assert "Traceback" not in result.output
    return result.exit_code, result.output


def test_the_command_sends_no_token_to_a_hub_that_the_folder_alone_names(
    hub: LocalHub, make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = make_folder()
    PushTarget(repo_id="alice/adapter", endpoint=f"{hub.endpoint}/").write(folder)
    for words in ([folder], [folder, "--repo", "alice/mine"]):
        code, output = swarm_push(*words)
        assert (code, hub.requests) == (2, [])
        assert f"say which one gets the files and your token, with --endpoint {hub.endpoint}/ or " in output
    code, output = swarm_push(folder, "--endpoint", hub.endpoint)
    assert (code, tags(hub).keys()) == (0, {"v1"})
    assert f"Publishing {folder} to alice/adapter at {hub.endpoint} ..." in output


def test_an_address_that_cannot_be_read_is_named(make_folder: MakeFolder) -> None:
    code, output = swarm_push(make_folder(), "--repo", "alice/adapter", "--endpoint", "http://[::1")
    assert (code, output.count("\n")) == (1, 2)
    assert "push to alice/adapter: the Hub's address cannot be read (Invalid port: ':1'); correct it" in output


@pytest.mark.parametrize("named", [None, "http://127.0.0.1:8", "http://127.0.0.1:8/"])
def test_the_hub_in_use_may_be_named_by_the_folder(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:8")
    target = PushTarget(repo_id="alice/adapter", endpoint=named)
    assert hub_to_push_to(target, None) == "http://127.0.0.1:8"
    assert hub_to_push_to(target, "http://127.0.0.1:9/") == "http://127.0.0.1:9"


@pytest.mark.parametrize("place", ["/a/b", "/a b/c", "/data/R&D/s", "/tmp/(x)/s", "/tmp/it's/s"])
def test_the_command_can_be_pasted(place: str) -> None:
    # Unlike shlex.split, it ends words at & and parentheses, as a shell does.
    words = shlex.shlex(push_command(Path(place), "http://[::1]:8/a&b"), posix=True, punctuation_chars=True)
    assert list(words) == ["swarm", "push", place, "--endpoint", "http://[::1]:8/a&b"]
    assert "--endpoint" not in push_command(Path(place), None)
