"""Checkpoints of runs as versions on a Hub, and merged into their base."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from huggingface_hub import HfApi
from tinker import types
from tinker_kit import NAME, client_at, datum, serving
from transformers import AutoModelForCausalLM

from swarm_plugins import find_adapters, load_adapter
from swarm_plugins.backbone import base_version
from swarm_plugins.errors import HubError
from swarm_plugins.hub import PushTarget, push_folder
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.merging import merge_adapter
from swarm_plugins.testing import save_tiny
from swarm_plugins.web.protocol.errors import ApiError
from swarm_plugins.web.tinker import publishing

# The SDK leaves connections to the collector of garbage.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
IDS = [8, 61, 7, 90, 12, 13, 99, 20]


def test_a_published_checkpoint_is_a_version_with_its_card(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_TOKEN", "local")
    monkeypatch.setattr(publishing, "_LEAVE_S", 25.0)
    directory = save_tiny("llama", tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with LocalHub() as hub:
        options = {"push_to": "me/runs", "endpoint": hub.endpoint}
        # The app waits for what is on its way to the Hub when it ends.
        with serving(model, tokenizer, tmp_path / "state", **options) as url, client_at(url) as client:
            training = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
            training.forward_backward([datum(IDS)], "cross_entropy").result()
            training.optim_step(types.AdamParams(learning_rate=0.05)).result()
            path = training.save_state("first").result().path
            expected = training.forward([datum(IDS)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
            with client_at(url, kind=tinker.RestClient) as rest:
                rest.publish_checkpoint_from_tinker_path(path).result()
        folder = tmp_path / "state" / "runs" / path.removeprefix("tinker://")
        assert publishing.version_of(folder) == "me/runs@v1"
        version = base_version(model)
        assert version is not None
        found = find_adapters(version, endpoint=hub.endpoint)
        assert [(one.repo_id, one.tag) for one in found] == [("me/runs", "v1")]
        api = HfApi(endpoint=hub.endpoint, token="local")
        assert set(api.list_repo_files("me/runs")) >= {"README.md", "swarm.json"}
        assert "optimizer.safetensors" not in api.list_repo_files("me/runs")
        # The command publishes the folder, too, with the same card.
        pushed = push_folder(folder, PushTarget(repo_id="me/other", endpoint=hub.endpoint), token="local")
        assert pushed.tag == "v1"
        loaded = load_adapter(AutoModelForCausalLM.from_pretrained(directory), "me/runs", endpoint=hub.endpoint).eval()
    merged = AutoModelForCausalLM.from_pretrained(merge_adapter(folder, tmp_path / "merged", base=directory)).eval()
    for one in (loaded, merged):
        logprobs = one(torch.tensor([IDS[:-1]])).logits[0].log_softmax(-1)
        torch.testing.assert_close(
            logprobs.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].detach(), torch.tensor(expected), rtol=0, atol=1e-4
        )


def test_a_folder_that_waits_or_is_on_its_way_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begins, ends = threading.Event(), threading.Event()

    def push(folder: Path, target: PushTarget, **more: Any) -> None:
        begins.set()
        ends.wait(60)
        raise HubError("gone")

    monkeypatch.setattr("swarm_plugins.hub.worker.push_folder", push)
    publisher, (first, second) = publishing.HubPublisher("me/runs"), (tmp_path / "a", tmp_path / "b")
    for folder in (first, second):
        folder.mkdir()
        publisher.publish(folder)
    assert begins.wait(60)
    assert publisher.has(first)
    assert publisher.has(second)
    publisher.withdraw(second)
    assert not publisher.has(second)
    ends.set()
    publisher.close()
    assert not publisher.has(first)


def test_a_checkpoint_is_not_published_in_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = publishing.HubPublisher("me/runs")
    monkeypatch.setattr(publisher._worker, "displaces", lambda *_: True)
    with pytest.raises(ApiError, match="publish this one again in a minute") as refusal:
        publisher.publish(tmp_path)
    assert refusal.value.status == 429
    assert not list(tmp_path.iterdir())
