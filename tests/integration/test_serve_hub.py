"""`swarm serve` with a model and an adapter on a Hub."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from swarm_plugins.blocks.load import load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CapacityError, TransportError
from swarm_plugins.hub import download, fetch_adapter
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.local_swarm import LocalSwarm
from swarm_plugins.server.startup.preload import preload_adapter
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.transport.config import NodeConfig
from swarm_plugins.transport.node import SwarmNode

MODEL, ADAPTER = "alice/tiny", "alice/tiny-lora"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def hub(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with LocalHub() as hub:
        hub.add(MODEL, directory)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        # Byte ranges that have been downloaded are kept there for the next start.
        monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))
        hub.forget()
        yield hub


@pytest.mark.swarm
def test_only_the_bytes_of_the_span_are_downloaded(hub: LocalHub, directory: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "lora")
    hub.add(ADAPTER, tmp_path / "lora")
    with LocalSwarm(MODEL, spans=[(1, 2)], adapter=[f"{ADAPTER}@main"]) as swarm:
        assert swarm.servers[0].span == (1, 2)
        served = hub.bytes_served(MODEL, "model.safetensors")
    whole = (directory / "model.safetensors").stat().st_size
    block = sum(parameter.numel() for parameter in model.get_submodule("model.layers.1").parameters()) * 4
    # One of four blocks, the header, and gaps between tensors that are cheaper to read than to skip.
    assert block <= served < 0.6 * whole
    assert hub.bytes_served(ADAPTER, "adapter_model.safetensors") > 0


@pytest.mark.swarm
def test_blocks_that_another_commit_has_too_are_announced_under_it(
    hub: LocalHub, directory: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.save_pretrained(tmp_path / "model")
    one = hub.add(MODEL, tmp_path / "model")
    with torch.no_grad():
        model.get_submodule("model.layers.2").mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(tmp_path / "next")
    other = hub.add(MODEL, tmp_path / "next")

    async def found(peers: list[str], version: str) -> list[tuple[str, int, int]]:
        async with SwarmNode(NodeConfig(initial_peers=tuple(peers), host_maddrs=())) as node:
            infos = (await node.servers(version, 4)).values()
            return [(info.version, info.start, info.end) for info in infos]

    with LocalSwarm(MODEL, spans=[(0, 3)], revision=one, also_versions=["main"]) as swarm:
        assert asyncio.run(found(swarm.initial_peers, one)) == [(one, 0, 3)]
        assert asyncio.run(found(swarm.initial_peers, other)) == [(other, 0, 2)]


@pytest.mark.swarm
@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        pytest.param("alice/nothing", {}, "alice/nothing", id="no-such-repository"),
        pytest.param(MODEL, {"revision": "v9"}, "v9", id="no-such-revision"),
        pytest.param(MODEL, {"also_versions": "v8"}, "v8", id="no-such-other-version"),
        pytest.param(
            MODEL, {"adapter": "alice/none@v1"}, "load alice/none@v1: no such repository", id="no-such-adapter"
        ),
    ],
)
@pytest.mark.usefixtures("hub")
def test_what_is_not_there_is_one_sentence(model: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(TransportError, match=r"ended before it served") as caught:
        LocalSwarm(model, num_servers=1, **options).start()  # type: ignore[arg-type]
    last = str(caught.value).splitlines()[-1]
    assert last.startswith("swarm serve: ")
    assert words in last
    assert "Traceback" not in str(caught.value)


def test_hub_that_is_down_is_one_sentence(hub: LocalHub) -> None:
    hub.faults.is_down = True
    done = subprocess.run(
        [sys.executable, "-m", "swarm_plugins", "serve", MODEL],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("swarm serve: ")
    assert MODEL in last
    assert "Traceback" not in done.stderr


def test_weights_too_large_for_an_adapter_are_not_downloaded(
    hub: LocalHub, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "lora")
    hub.add(ADAPTER, tmp_path / "lora")
    hub.forget()
    monkeypatch.setitem(download._MAX_BYTES, "adapter_model.safetensors", 100)
    here = functools.partial(fetch_adapter, endpoint=hub.endpoint, cache_dir=tmp_path / "hf")
    monkeypatch.setattr("swarm_plugins.server.startup.preload.fetch_adapter", here)
    span = load_span(Checkpoint.open(str(directory)), range(1))
    with pytest.raises(CapacityError, match=r"adapter_model.safetensors of alice/tiny-lora has .* at most 100"):
        preload_adapter(ADAPTER, span)
    assert hub.bytes_served(ADAPTER, "adapter_model.safetensors") == 0
