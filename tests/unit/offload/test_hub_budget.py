"""A model on the Hub: what its headers tell is told before its weights are downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from offload_models import save_toy, tokens

from swarm_plugins import OffloadConfig, load_offloaded
from swarm_plugins.blocks import load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CapacityError
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.offload import quantize_checkpoint
from swarm_plugins.offload.plan.sizes import model_sizes

PLAIN, STORE = "org/moe", "org/moe-4bit"
TOO_FEW = OffloadConfig(fast_bytes=1000)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("models")
    save_toy("mixtral", path / "plain", max_shard_size="100KB")
    quantize_checkpoint(path / "plain", path / "store", expert_bits=4, other_bits=4, progress=False)
    return {PLAIN: path / "plain", STORE: path / "store"}


@pytest.fixture
def hub(directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with LocalHub() as hub:
        for name, directory in directories.items():
            hub.add(name, directory)
        options, open_checkpoint = {"endpoint": hub.endpoint, "cache_dir": tmp_path / "cache"}, Checkpoint.open
        # These count, whatever is given: none is this machine's own cache.
        monkeypatch.setattr(Checkpoint, "open", lambda *names, **given: open_checkpoint(*names, **{**given, **options}))
        hub.forget()
        yield hub


def fetched_files(hub: LocalHub, name: str, directories: dict[str, Path]) -> list[str]:
    """The files of weights that went out as a whole."""
    sizes = {path.name: path.stat().st_size for path in directories[name].glob("*.safetensors")}
    return sorted(file for file, size in sizes.items() if hub.bytes_served(name, file) >= size)


@pytest.mark.parametrize("name", [PLAIN, STORE])
def test_a_budget_that_is_too_small_is_refused_before_anything_is_downloaded(
    name: str, hub: LocalHub, directories: dict[str, Path]
) -> None:
    with pytest.raises(CapacityError, match=r"fast_bytes is 1000, but at least \d+ bytes are needed"):
        load_offloaded(name, TOO_FEW, device="cpu")
    with pytest.raises(CapacityError, match="fast_bytes is 1000"):
        load_span(Checkpoint.open(PLAIN), range(1), offload=TOO_FEW)
    assert fetched_files(hub, name, directories) == []


@pytest.mark.parametrize("name", [PLAIN, STORE])
def test_a_plan_downloads_no_weights(name: str, hub: LocalHub, directories: dict[str, Path]) -> None:
    assert model_sizes(Checkpoint.open(name), context_tokens=8).expert_bytes > 0
    assert fetched_files(hub, name, directories) == []


def test_a_span_of_a_store_downloads_the_experts_of_its_blocks(hub: LocalHub, directories: dict[str, Path]) -> None:
    span = load_span(Checkpoint.open(STORE), range(1, 2), offload=OffloadConfig(fast_bytes=60_000))
    span.close()
    assert fetched_files(hub, STORE, directories) == ["experts-00001.safetensors"]


@pytest.mark.parametrize("name", [PLAIN, STORE])
def test_a_budget_that_is_enough_gives_the_numbers_of_the_directory(
    name: str, hub: LocalHub, directories: dict[str, Path]
) -> None:
    few = OffloadConfig(fast_bytes=60_000)
    with torch.no_grad():
        found = load_offloaded(name, few, device="cpu")(tokens()).logits
        expected = load_offloaded(directories[name], few, device="cpu")(tokens()).logits
    assert torch.equal(found, expected)
    assert "experts-00000.safetensors" in fetched_files(hub, name, directories) or name == PLAIN
