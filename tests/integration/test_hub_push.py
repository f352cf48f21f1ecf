"""`swarm hub` and `swarm push` as processes: killed in the middle of a push, started again, misused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swarm_plugins.hub import Manifest, PushTarget
from swarm_plugins.local_hub import LocalHub

WAIT_S = 60.0
FILES = {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors", "swarm.json"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    save_file({"weight": torch.ones(64, 64)}, folder / "adapter_model.safetensors")
    Manifest(peft_type="LORA").write(folder)
    return folder


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    keep = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**keep, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **more}


def start(arguments: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "swarm_plugins", *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def swarm(arguments: list[str], env: dict[str, str]) -> tuple[int, str, str]:
    process = start(arguments, env)
    try:
        out, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize("stage", ["create_repo", "preupload", "lfs_put", "commit", "create_tag"])
def test_a_push_that_is_killed_leaves_the_whole_version_or_none(stage: str, folder: Path, tmp_path: Path) -> None:
    paths = {"create_repo": "/repos/create", "lfs_put": "/lfs/", "create_tag": "/tag/"}
    with LocalHub() as hub:
        PushTarget(repo_id="me/adapter").write(folder)
        hub.faults.delays_s[stage] = WAIT_S
        env = environment(tmp_path, HF_TOKEN="any", HF_ENDPOINT=hub.endpoint)
        process = start(["push", str(folder)], env)
        deadline = time.monotonic() + WAIT_S
        while not any(paths.get(stage, f"/{stage}/") in request.path for request in list(hub.requests)):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=WAIT_S)
        hub.faults.delays_s.clear()
        repo = hub.store.find("me/adapter")
        if repo is not None:
            assert repo.tags == {}
            head = repo.find("main")
            assert head is not None
            assert set(head.files) in ({".gitattributes"}, FILES)
        code, out, err = swarm(["push", str(folder)], env)
        assert code == 0, err
        assert "Published as me/adapter@v1" in out
        repo = hub.store.find("me/adapter")
        assert repo is not None
        tagged = repo.find("v1")
        assert tagged is not None
        assert set(tagged.files) == FILES


@contextlib.contextmanager
def hub_process(
    root: Path, env: dict[str, str], port: int = 0
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    process = start(["hub", "--dir", str(root), "--port", str(port)], env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("export "), process.communicate()
        yield process, dict(pair.split("=", 1) for pair in line.removeprefix("export ").split())
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def test_a_hub_of_ones_own_takes_pushes_and_keeps_them(folder: Path, tmp_path: Path) -> None:
    env = environment(tmp_path)
    script = "from huggingface_hub import HfApi; print([r.name for r in HfApi().list_repo_refs('me/adapter').tags])"
    for expected in ("v1", "v2"):
        with hub_process(tmp_path / "hub", env) as (process, exports):
            assert exports["HF_ENDPOINT"].startswith("http://127.0.0.1:")
            save_file({"weight": torch.full((8, 8), float(expected[1]))}, folder / "adapter_model.safetensors")
            code, out, err = swarm(["push", str(folder), "--repo", "me/adapter"], {**env, **exports})
            assert code == 0, err
            assert f"me/adapter@{expected}" in out
            found = subprocess.run(
                [sys.executable, "-c", script], env={**env, **exports}, capture_output=True, text=True, timeout=WAIT_S
            )
            assert expected in found.stdout, found.stderr
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0


def test_every_fault_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    with LocalHub(tokens={"good": "me"}) as hub:
        env = environment(tmp_path, HF_ENDPOINT=hub.endpoint, HF_TOKEN="good")
        repo = ["--repo", "me/adapter"]
        cases = [
            (1, [str(tmp_path / "none")], env, "is not a directory"),
            (1, [str(tmp_path)], env, "has no adapter_config.json"),
            (2, [str(folder)], env, "does not name a repository to publish to: give --repo USER/NAME"),
            (2, [str(folder), "--repo", "a/b/c"], env, "'a/b/c' cannot be the name of a repository"),
            (2, [str(folder), *repo, "--tag", "a b"], env, "'a b' cannot be the tag of a version"),
            (1, [str(folder), "--repo", "you/adapter"], env, "use a repository and a token of your own"),
            (1, [str(folder), *repo], {**env, "HF_TOKEN": "bad"}, "hf auth login"),
            (1, [str(folder), *repo], {**env, "HF_ENDPOINT": "http://127.0.0.1:9"}, "reached at http://127.0.0.1:9 ("),
            (1, [str(folder), *repo], {**env, "HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set; unset it"),
        ]
        for wanted, arguments, variables, sentence in cases:
            code, _, err = swarm(["push", *arguments], variables)
            assert code == wanted, (arguments, err)
            assert sentence in err
            assert "Traceback" not in err
            assert len(err.strip().splitlines()) == 1, err
        taken = hub.endpoint.rsplit(":", 1)[1]
        code, _, err = swarm(["hub", "--dir", str(tmp_path / "hub"), "--port", taken], env)
        assert code == 2
        assert f"port {taken} of 127.0.0.1 cannot be used" in err
