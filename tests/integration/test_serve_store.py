"""`swarm serve` of a quantized store: blocks of the model that it was made from, in few bits, and announced as that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from programs import Programs
from tuning_kit import assert_trained_alike

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm, OffloadConfig, SwarmConfig, load_offloaded
from swarm_plugins.backbone import served_blocks
from swarm_plugins.client import connect
from swarm_plugins.offload import quantize_checkpoint
from swarm_plugins.testing.models import save_tiny, tiny_model
from swarm_plugins.weights.widths import Width

IDS = torch.arange(5, 15)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny("mixtral", tmp_path_factory.mktemp("models") / "tiny-mixtral")
    # Embeddings that a store, which has them in 16 bits, does not round.
    tiny_model("mixtral").bfloat16().float().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def store(base: Path) -> Path:
    path = base.with_name("store")
    quantize_checkpoint(base, path, expert_bits=4, other_bits=8, progress=False)
    return path


@pytest.mark.swarm
@pytest.mark.parametrize(
    ("bits", "announced"),
    [((4, 8), "experts-int4+others-int8"), (("2dq", "3dq"), "experts-2dq+others-3dq")],
    ids=["int", "dq"],
)
def test_a_chain_over_a_store_gives_the_numbers_of_the_store_loaded_here(
    base: Path, tmp_path: Path, bits: tuple[Width, Width], announced: str
) -> None:
    store = tmp_path / "store"
    quantize_checkpoint(base, store, expert_bits=bits[0], other_bits=bits[1], progress=False)
    here = load_offloaded(store, OffloadConfig(fast_bytes=100_000), device="cpu")
    with (
        LocalSwarm(store, num_servers=2, offload="fast=60KB,prefetch=on", kv_bytes="16MB") as swarm,
        connect(swarm.initial_peers, SwarmConfig()) as connection,
    ):
        remote = AutoSwarmModelForCausalLM.from_pretrained(base, connection=connection)
        assert [(one.start, one.end, one.quantization) for one in served_blocks(remote)] == [
            (0, 2, announced),
            (2, 4, announced),
        ]
        with torch.no_grad():
            found, expected = remote(IDS).logits, here(IDS).logits
        # Logits of about one; few-bit products round activations to 16 bits.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        arguments = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(remote.generate(IDS, **arguments), here.generate(IDS, **arguments))
        assert_trained_alike(remote, here, IDS, rtol=1e-3, atol=1e-5)


def test_a_store_without_a_budget_is_refused_with_the_option_to_give(store: Path, programs: Programs) -> None:
    command = [sys.executable, "-m", "swarm_plugins", "serve", str(store)]
    ended = programs.run(command, timeout=120)
    assert ended.returncode == 2
    said = " ".join(ended.stderr.split())
    assert said.startswith("swarm serve: ")
    assert "set how much memory they may take with --offload fast" in said
    assert "Traceback" not in said
