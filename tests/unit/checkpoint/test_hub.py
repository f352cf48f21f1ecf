"""The Hub: only what is needed is downloaded, once, and every refusal is a sentence.

Against a real server on this machine; the product code is what talks to the real Hub.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import snapshot_download

from swarm_plugins.checkpoint import Checkpoint, block_tensors, client_tensors, range_cache, ranges
from swarm_plugins.checkpoint import hub as hub_module
from swarm_plugins.checkpoint import source as source_module
from swarm_plugins.checkpoint.files import Piece
from swarm_plugins.checkpoint.hub import HubFiles
from swarm_plugins.checkpoint.ranges import Sink
from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.sizes import format_bytes
from swarm_plugins.versions import ModelVersion

REPO = "alice/tiny"
LAYERS = "model.layers"
# What a header costs at most: the first request asks for so many bytes.
HEADER_BYTES = 4096


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_FIRST_WAIT_S", 0.001)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def opened(hub: LocalHub, cache: Path, **options: str) -> Checkpoint:
    return Checkpoint.open(REPO, endpoint=hub.endpoint, cache_dir=cache, **options)


def assert_equal(read: dict[str, torch.Tensor], directory: Path, names: list[str]) -> None:
    expected = Checkpoint.open(directory).read(names)
    assert list(read) == names
    assert all(torch.equal(read[name], expected[name]) for name in names)


def shard_bytes(hub: LocalHub, directory: Path) -> int:
    return sum(hub.bytes_served(REPO, path.name) for path in directory.glob("*.safetensors"))


def test_config_and_version_are_those_of_the_commit(hub: LocalHub, sharded: Path, cache: Path) -> None:
    sha = hub.add(REPO, sharded)
    checkpoint = opened(hub, cache)
    assert str(checkpoint.version) == f"{REPO}@{sha}"
    assert (checkpoint.name, checkpoint.directory) == (REPO, None)
    assert (checkpoint.config._name_or_path, checkpoint.config._commit_hash) == (REPO, sha)
    assert checkpoint.config.num_hidden_layers == 4
    assert shard_bytes(hub, sharded) == 0


@pytest.mark.parametrize("share", ["client", "span"])
@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_the_tensors_asked_for_are_all_that_is_downloaded(
    layout: str, share: str, hub: LocalHub, cache: Path, request: pytest.FixtureRequest
) -> None:
    directory: Path = request.getfixturevalue(layout)
    hub.add(REPO, directory)
    checkpoint = opened(hub, cache)
    is_client = share == "client"
    names = client_tensors(checkpoint, LAYERS) if is_client else block_tensors(checkpoint, LAYERS, range(1, 2))
    assert_equal(checkpoint.read(names), directory, names)
    needed = sum(checkpoint.tensors[name].num_bytes for name in names)
    files = {checkpoint.tensors[name].file for name in names}
    # Neighbors closer than a few KB are fetched along.
    assert needed <= shard_bytes(hub, directory) <= needed + len(files) * (HEADER_BYTES + ranges._GAP_BYTES)
    assert all(hub.bytes_served(REPO, p.name) == 0 for p in directory.glob("*.safetensors") if p.name not in files)


def test_a_user_without_a_home_has_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("SWARM_PLUGINS_CACHE", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"swarm_plugins-{os.getuid()}"
    assert range_cache.default_cache() == own
    own.chmod(0o777)
    with pytest.raises(ConfigError, match=rf"^others can write to {own}: set SWARM_PLUGINS_CACHE"):
        range_cache.default_cache()
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", "~/cache")
    with pytest.raises(ConfigError, match=r"^'~/cache' is in a home directory that is not known here"):
        range_cache.default_cache()


def test_nothing_is_downloaded_twice(hub: LocalHub, sharded: Path, cache: Path) -> None:
    hub.add(REPO, sharded)
    checkpoint = opened(hub, cache)
    names = block_tensors(checkpoint, LAYERS, range(0, 2))
    checkpoint.read(names)
    hub.forget()
    again = opened(hub, cache)
    assert_equal(again.read(names), sharded, names)
    assert shard_bytes(hub, sharded) == 0
    assert not list(cache.rglob(".[0-9]*"))


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_a_first_download_says_how_much_of_the_checkpoint_it_is(
    layout: str,
    hub: LocalHub,
    cache: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory: Path = request.getfixturevalue(layout)
    hub.add(REPO, directory)
    local = Checkpoint.open(directory)
    names = client_tensors(local, LAYERS)
    share, whole = (
        format_bytes(sum(local.tensors[name].num_bytes for name in some)) for some in (names, local.tensors)
    )

    def shown() -> str:
        opened(hub, cache).read(names, what="embeddings and head")
        return capsys.readouterr().err

    opened(hub, cache).read(names[:1])
    assert "fetching" not in shown(), "the output is not a terminal"
    shutil.rmtree(cache)
    monkeypatch.setattr(source_module, "_FETCH_BYTES", 1)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    first = shown()
    assert f"{REPO}: fetching {share} of {whole}, embeddings and head\n" in first.replace("\r", "\n")
    assert f"Fetching {REPO}: 100%" in first
    assert shown() == "", "a bar for what is here is for larger files"


def test_a_damaged_copy_is_downloaded_again(hub: LocalHub, single: Path, cache: Path) -> None:
    hub.add(REPO, single)
    names = ["model.norm.weight"]
    opened(hub, cache).read(names)
    (kept,) = [path for path in cache.rglob("model.safetensors/*-*") if not path.name.startswith("head")]
    kept.write_bytes(b"short")
    assert_equal(opened(hub, cache).read(names), single, names)


def test_a_full_disk_costs_the_copy_and_not_the_run(
    hub: LocalHub, single: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add(REPO, single)
    checkpoint = opened(hub, cache)
    usage = shutil.disk_usage(cache)
    monkeypatch.setattr(range_cache.shutil, "disk_usage", lambda _: usage._replace(free=10))
    names = list(checkpoint.tensors)
    assert_equal(checkpoint.read(names), single, names)
    levels = [record.levelno for record in caplog.records if "only 10 bytes are free" in record.message]
    assert levels == [logging.WARNING]


def test_a_shard_in_the_cache_is_not_downloaded(hub: LocalHub, sharded: Path, cache: Path) -> None:
    hub.add(REPO, sharded)
    snapshot_download(REPO, endpoint=hub.endpoint, cache_dir=cache)
    hub.forget()
    checkpoint = opened(hub, cache)
    names = list(checkpoint.tensors)
    assert_equal(checkpoint.read(names), sharded, names)
    assert shard_bytes(hub, sharded) == 0


def test_a_revision_is_resolved_to_its_commit(hub: LocalHub, single: Path, cache: Path) -> None:
    first = hub.add(REPO, single)
    config = (single / "config.json").read_bytes()
    second = hub.add(REPO, {"config.json": config.replace(b'"rope_theta": 10000.0', b'"rope_theta": 20000.0')})
    repo = hub.store.find(REPO)
    assert repo is not None
    repo.tags["v/1"] = first
    assert first != second
    for revision, sha in [("main", second), ("v/1", first), (first, first)]:
        assert opened(hub, cache, revision=revision).version.revision == sha


def test_broken_connections_are_resumed_where_they_broke(hub: LocalHub, single: Path, cache: Path) -> None:
    hub.add(REPO, single)
    checkpoint = opened(hub, cache)
    names = list(checkpoint.tensors)
    hub.forget()
    hub.faults.cut_after_bytes = [50_000, 0, 30_000]
    hub.faults.statuses = [503]
    assert_equal(checkpoint.read(names), single, names)
    whole = sum(checkpoint.tensors[name].num_bytes for name in names)
    # What was under way when a connection broke may be lost, at most the 64 KB that the server writes at once.
    assert hub.bytes_served(REPO, "model.safetensors") <= whole + 2 * (64 << 10)
    assert len({request.range for request in hub.requests if request.path.startswith("/cdn")}) >= 3


def test_what_arrived_before_a_failure_is_kept_and_other_parts_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = ModelVersion(REPO, "0" * 40)
    files = HubFiles(version, ["weights"], asked="main", token=False, cache_dir=tmp_path, endpoint=None)
    far = 1 << 20
    pieces = [Piece(start, memoryview(bytearray(8))) for start in (0, far, 2 * far)]
    has_arrived, has_begun, has_ended = (threading.Event() for _ in range(3))

    def fetch(url: str, headers: object, start: int, end: int, sink: Sink, *, label: str) -> None:
        if start == 0:
            sink(0, b"complete")
            has_arrived.set()
        elif start == far:
            assert has_arrived.wait(60)
            assert has_begun.wait(60)
            raise CheckpointError("the line broke")
        else:
            has_begun.set()
            try:
                while not has_ended.wait(0.001):
                    sink(start, b"")
            finally:
                has_ended.set()

    monkeypatch.setattr(hub_module, "fetch_range", fetch)
    with pytest.raises(CheckpointError, match="the line broke"):
        files.read("weights", pieces, lambda _: None)
    assert has_ended.is_set()
    assert files.to_fetch("weights", [(piece.start, piece.end) for piece in pieces]) == 16
    again = Piece(0, memoryview(bytearray(8)))
    files.read("weights", [again], lambda _: None)
    assert bytes(again.buffer) == b"complete"


@pytest.mark.parametrize("faults", [{"statuses": [500] * 9}, {"cut_after_bytes": [0] * 9}], ids=["status", "broken"])
def test_retries_have_an_end(faults: dict[str, list[int]], hub: LocalHub, single: Path, cache: Path) -> None:
    hub.add(REPO, single)
    checkpoint = opened(hub, cache)
    names = list(checkpoint.tensors)
    for fault, values in faults.items():
        setattr(hub.faults, fault, values)
    with pytest.raises(CheckpointError, match=r"could not be downloaded, 5 attempts in a row brought nothing"):
        checkpoint.read(names)


def test_a_trickle_is_given_up(hub: LocalHub, single: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, single)
    checkpoint = opened(hub, cache)
    names = list(checkpoint.tensors)
    monkeypatch.setattr(ranges, "_GRACE_S", -1000.0)
    hub.faults.cut_after_bytes = [10] * 50
    with pytest.raises(CheckpointError, match=r"check the connection and try again"):
        checkpoint.read(names)


def test_a_server_without_ranges_is_refused(hub: LocalHub, single: Path, cache: Path) -> None:
    hub.add(REPO, single)
    hub.faults.ignore_ranges = True
    with pytest.raises(CheckpointError, match=r"ignores byte ranges \(status 200.*'hf download'"):
        opened(hub, cache)


@pytest.mark.parametrize("size", [0, 600, -100])
def test_a_truncated_shard_on_the_hub_is_named(size: int, hub: LocalHub, single: Path, cache: Path) -> None:
    files = {path.name: path.read_bytes() for path in single.iterdir()}
    hub.add(REPO, {**files, "model.safetensors": files["model.safetensors"][:size]})
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*(truncated|not a safetensors file)"):
        opened(hub, cache)


def test_a_shard_missing_on_the_hub_is_named(hub: LocalHub, sharded: Path, cache: Path) -> None:
    hub.add(REPO, {path.name: path.read_bytes() for path in sharded.iterdir() if "00002-of" not in path.name})
    checkpoint = opened(hub, cache)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00008\.safetensors: no such file .*is incomplete"):
        checkpoint.read(block_tensors(checkpoint, LAYERS, range(0, 4)))


@pytest.mark.parametrize(
    ("name", "options", "kind", "message"),
    [
        (
            "alice/none",
            {},
            CheckpointError,
            r"load alice/none@main: no such repository.*no directory 'alice/none' here",
        ),
        (REPO, {"revision": "v9"}, CheckpointError, r"load alice/tiny@v9: no such revision .*give a branch"),
        (REPO, {"revision": "0" * 40}, CheckpointError, r"load alice/tiny@0000.*: no such revision"),
        ("bob/private", {"token": False}, CheckpointError, r"or a private one .*hf auth login"),
        (
            "bob/gated",
            {"token": False},
            CheckpointError,
            r"the repository is gated .*ask for access.*hf auth login",
        ),
        ("two words", {}, ConfigError, r"'two words' is neither a directory here nor a repository id"),
    ],
    ids=["unknown-repo", "unknown-tag", "unknown-commit", "private", "gated", "no-id"],
)
def test_what_the_hub_refuses_is_said(
    name: str,
    options: dict[str, str | bool],
    kind: type[Exception],
    message: str,
    hub: LocalHub,
    single: Path,
    cache: Path,
) -> None:
    hub.add(REPO, single)
    hub.add("bob/private", single, private=True)
    hub.add("bob/gated", single, gated=True)
    with pytest.raises(kind, match=message):
        Checkpoint.open(name, endpoint=hub.endpoint, cache_dir=cache, **options)


def test_a_token_opens_a_gated_repository_and_stays_on_the_hub(hub: LocalHub, single: Path, cache: Path) -> None:
    hub.add(REPO, single, gated=True)
    checkpoint = opened(hub, cache, token="hf_secret")
    names = ["model.norm.weight"]
    assert_equal(checkpoint.read(names), single, names)
    by_host = {request.path.startswith("/cdn"): request.authorization for request in hub.requests}
    assert by_host == {False: "Bearer hf_secret", True: None}


def test_without_the_hub_the_cache_serves(
    hub: LocalHub, sharded: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sha = hub.add(REPO, sharded)
    snapshot_download(REPO, endpoint=hub.endpoint, cache_dir=cache)
    endpoint = hub.endpoint
    hub.close()
    checkpoint = Checkpoint.open(REPO, endpoint=endpoint, cache_dir=cache)
    assert str(checkpoint.version) == f"{REPO}@{sha}"
    names = list(checkpoint.tensors)
    assert_equal(checkpoint.read(names), sharded, names)
    assert "the Hub cannot be reached" in caplog.text


def test_without_hub_and_cache_the_cure_is_named(hub: LocalHub, cache: Path) -> None:
    endpoint = hub.endpoint
    hub.close()
    with pytest.raises(CheckpointError, match=r"Hub cannot be reached .*neither a directory 'alice/tiny' .*connection"):
        Checkpoint.open(REPO, endpoint=endpoint, cache_dir=cache)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_HUB_OFFLINE=1 does when huggingface_hub is imported."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_offline_mode_asks_nobody_and_reads_what_was_read_before(
    layout: str, hub: LocalHub, cache: Path, request: pytest.FixtureRequest
) -> None:
    directory: Path = request.getfixturevalue(layout)
    sha = hub.add(REPO, directory)
    online = opened(hub, cache)
    span = block_tensors(online, LAYERS, range(0, 1))
    online.read(span)
    hub.forget()
    request.getfixturevalue("offline")
    checkpoint = opened(hub, cache)
    assert checkpoint.version.revision == sha
    assert_equal(checkpoint.read(span), directory, span)
    with pytest.raises(CheckpointError, match=r"not in the cache and HF_HUB_OFFLINE is set: unset it.*'hf download"):
        checkpoint.read(block_tensors(checkpoint, LAYERS, range(3, 4)))
    assert hub.requests == []


@pytest.mark.usefixtures("offline")
def test_offline_without_a_cache_is_said(cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"HF_HUB_OFFLINE is set.*nor alice/tiny@main in the cache"):
        Checkpoint.open(REPO, cache_dir=cache)


def test_a_full_disk_is_said(hub: LocalHub, single: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, single)

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub_module, "hf_hub_download", full)
    with pytest.raises(CheckpointError, match=r"read alice/tiny@.*: the disk is full.*HF_HOME or cache_dir"):
        opened(hub, cache)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_file_too_large_for_what_it_is_is_not_downloaded(
    hub: LocalHub, sharded: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "padded"))
    with (folder / name).open("a") as file:
        file.write(" " * 100_000)  # still JSON
    hub.add(REPO, folder)
    monkeypatch.setattr(hub_module, "_MAX_SMALL_BYTES", 50_000)
    with pytest.raises(CheckpointError, match=rf"{name} has \d+ bytes, and is not a file of weights"):
        opened(hub, cache)
    assert hub.bytes_served(REPO, name) == 0


@pytest.mark.slow
def test_the_address_comes_from_the_environment(hub: LocalHub, single: Path, tmp_path: Path) -> None:
    sha = hub.add(REPO, single)
    code = (
        "from swarm_plugins.checkpoint import Checkpoint\n"
        f"checkpoint = Checkpoint.open({REPO!r})\n"
        "print(checkpoint.version, len(checkpoint.read(checkpoint.tensors)))\n"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "SWARM_PLUGINS_CACHE": str(tmp_path / "swarm"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == [f"{REPO}@{sha}", "39"], done.stderr
