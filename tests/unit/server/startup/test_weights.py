"""As what blocks are announced: those of a quantized store are its base's, in few bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.offload import OffloadConfig, quantize_checkpoint
from swarm_plugins.offload.store.manifest import MANIFEST_FILE
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.startup.capacity import blocks_that_fit
from swarm_plugins.server.startup.weights import hosted_weights
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.weights.widths import Width

FEW = OffloadConfig(fast_bytes=60_000)
FOUR_BITS = OffloadConfig(fast_bytes=60_000, expert_bits=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("models") / "tiny", num_layers=2)


@pytest.mark.parametrize(
    ("config", "quantization"),
    [
        pytest.param(ServeConfig(model="tiny"), "none", id="as-it-is"),
        pytest.param(ServeConfig(model="tiny", quantization="int8"), "int8", id="quantized-while-loading"),
        pytest.param(ServeConfig(model="tiny", offload=FEW), "none", id="offloaded"),
        pytest.param(ServeConfig(model="tiny", offload=FOUR_BITS), "experts-int4", id="offloaded-in-4-bits"),
        # On its way there: bitsandbytes' 4 bits.
        pytest.param(ServeConfig(model="tiny", offload=FOUR_BITS, device="cuda"), "experts-nf4", id="to-a-device"),
    ],
)
def test_a_model_is_announced_by_its_content(config: ServeConfig, quantization: str, base: Path) -> None:
    checkpoint = Checkpoint.open(base)
    assert hosted_weights(checkpoint, config) == (checkpoint.version, quantization)


@pytest.mark.parametrize(
    ("expert_bits", "other_bits", "quantization"),
    [
        pytest.param(4, 8, "experts-int4+others-int8", id="both"),
        pytest.param(3, 16, "experts-int3", id="experts"),
        pytest.param("nf4", "nf4", "experts-nf4+others-nf4", id="nf4"),
        pytest.param(16, 4, "experts-16bit+others-int4", id="others"),
        pytest.param(16, 16, "experts-16bit", id="halves"),
    ],
)
def test_a_store_is_announced_as_its_base_in_few_bits(
    expert_bits: Width, other_bits: Width, quantization: str, base: Path, tmp_path: Path
) -> None:
    quantize_checkpoint(base, tmp_path / "q", expert_bits=expert_bits, other_bits=other_bits, progress=False)
    version, found = hosted_weights(Checkpoint.open(tmp_path / "q"), ServeConfig(model="q", offload=FEW))
    assert (version, found) == (Checkpoint.open(base).version, quantization)
    assert version.name == "tiny"


def test_a_store_that_does_not_say_whose_it_is_is_not_announced(base: Path, tmp_path: Path) -> None:
    quantize_checkpoint(base, tmp_path / "q", expert_bits=4, progress=False)
    (tmp_path / "q" / MANIFEST_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"run swarm quantize again"):
        hosted_weights(Checkpoint.open(tmp_path / "q"), ServeConfig(model="q", offload=FEW))


def test_a_published_store_is_taken_at_its_word_and_that_is_said(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(base, tmp_path / "q", expert_bits=4, progress=False)
    with LocalHub() as hub:
        commit = hub.add("mallory/tiny-4bit", tmp_path / "q")
        checkpoint = Checkpoint.open("mallory/tiny-4bit", endpoint=hub.endpoint, cache_dir=tmp_path / "cache")
        version, _ = hosted_weights(checkpoint, ServeConfig(model="mallory/tiny-4bit", offload=FEW))
    assert version == Checkpoint.open(base).version
    assert f"mallory/tiny-4bit@{commit} claims to be made from {version}" in caplog.text


def test_experts_of_a_store_take_no_room_of_blocks(base: Path, tmp_path: Path) -> None:
    quantize_checkpoint(base, tmp_path / "q", expert_bits=8, progress=False)
    config = ServeConfig(model="q", offload=FEW, kv_bytes=1, activation_bytes=0)
    checkpoint = Checkpoint.open(tmp_path / "q")
    rest = sum(info.num_bytes for name, info in checkpoint.tensors.items() if not name.startswith("experts."))
    # A little above the budget for experts and one of two blocks; nine tenths of what is free are used.
    assert blocks_that_fit(checkpoint, config, available_bytes=int((60_000 + rest * 0.6) / 0.9)) == 1
