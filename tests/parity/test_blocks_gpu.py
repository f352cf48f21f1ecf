"""Servers whose blocks are on a GPU, with a client on the CPU; transformers on the CPU says what is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lies_kit import finish_checks, verifier_of
from peft import LoraConfig, get_peft_model
from published_models import WAYS, check_gradients, save_mxfp4, save_published
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.client import SwarmConfig
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.verification import Quarantine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
IDS = torch.tensor([[7, 17, 99, 23, 5], [31, 64, 9, 88, 2]])
# Other kernels than on a CPU.
CLOSE = {"atol": 2e-4, "rtol": 2e-4}
FAMILIES = ("llama", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


class Served:
    """A toy locally and on two servers."""

    def __init__(self, directory: Path, twin: Path, swarm: InProcessSwarm) -> None:
        self.directory = directory
        self.local = AutoModelForCausalLM.from_pretrained(twin, experts_implementation="eager").eval()
        self.swarm = swarm
        self.remote = self.load()

    def load(self) -> PreTrainedModel:
        """Loads the remote model anew."""
        return AutoSwarmModelForCausalLM.from_pretrained(
            self.directory, connection=self.swarm.connection, dtype=torch.float32
        )


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = save_tiny(request.param, tmp_path_factory.mktemp(request.param))
    with InProcessSwarm(directory, device="cuda") as swarm:
        yield Served(directory, directory, swarm)


def generate(model: PreTrainedModel, **options: int) -> torch.Tensor:
    mask = torch.ones_like(IDS)
    found: torch.Tensor = model.generate(
        IDS, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None, **options
    )
    return found


@torch.no_grad()
def test_logits_and_tokens_are_those_of_the_local_model(served: Served) -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    found, expected = (model(IDS, attention_mask=mask).logits for model in (served.remote, served.local))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], **CLOSE)
    assert torch.equal(generate(served.remote), generate(served.local))
    assert torch.equal(generate(served.remote, num_beams=3), generate(served.local, num_beams=3))


def test_gradients_of_adapters_are_those_of_the_local_model(served: Served) -> None:
    gradients = []
    for model in (served.load(), AutoModelForCausalLM.from_pretrained(served.directory)):
        torch.manual_seed(0)
        tuned = get_peft_model(model, LoraConfig(target_modules=["o_proj"], init_lora_weights=False))
        tuned(IDS, labels=IDS).loss.backward()
        gradients.append({name: one.grad for name, one in tuned.named_parameters() if one.requires_grad})
    torch.testing.assert_close(*gradients, **CLOSE)


@torch.no_grad()
def test_a_server_on_a_cpu_takes_over_from_one_on_a_gpu(served: Served) -> None:
    with InProcessSwarm(served.directory, device="cuda") as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(served.directory, connection=swarm.connection)
        generate(remote)
        swarm.device = "cpu"
        swarm.add(2, range(2, 4))
        swarm.kill(swarm.peers[1])
        assert torch.equal(generate(remote), generate(served.local))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_quantized_blocks_are_near_the_full_ones_and_pass_gradients(family: str, kind: str, tmp_path: Path) -> None:
    directory = save_tiny(family, tmp_path / family)
    with InProcessSwarm(directory, device="cuda", quantization=kind) as swarm:
        served = Served(directory, directory, swarm)
        embedded = [
            model.get_input_embeddings()(IDS).detach().requires_grad_() for model in (served.remote, served.local)
        ]
        logits = [
            model(inputs_embeds=states).logits
            for model, states in zip((served.remote, served.local), embedded, strict=True)
        ]
        error = float((logits[0] - logits[1]).detach().norm() / logits[1].detach().norm())
        assert error < (0.05 if kind == "int8" else 0.5)
        for found in logits:
            found.square().mean().backward()
        assert embedded[0].grad is not None
        assert bool(embedded[0].grad.isfinite().all())
        assert float(embedded[0].grad.abs().max()) > 0
        assert torch.equal(generate(served.remote), generate(served.load()))


@pytest.mark.parametrize("way", [*WAYS, "mxfp4"])
def test_published_formats_give_the_numbers_of_the_widened_weights(way: str, tmp_path: Path) -> None:
    packed, twin = save_mxfp4(tmp_path) if way == "mxfp4" else save_published(way, "llama", tmp_path)
    with InProcessSwarm(packed, device="cuda", dtype=torch.float32) as swarm:
        served = Served(packed, twin, swarm)
        with torch.no_grad():
            torch.testing.assert_close(served.remote(IDS).logits, served.local(IDS).logits, **CLOSE)
        check_gradients(served.remote, served.local, IDS, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    directory = save_tiny("mixtral", tmp_path / "mixtral")
    with InProcessSwarm(directory, device="cuda", dtype=dtype) as swarm:
        served = Served(directory, directory, swarm)
        found, expected = served.remote(IDS).logits, served.local(IDS).logits
        assert float((found - expected).norm() / expected.norm()) < 0.05
        assert generate(served.remote).shape == (2, 13)


@pytest.mark.parametrize("kind", ["none", "int8", "nf4"])
def test_honest_servers_on_a_gpu_are_not_caught(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))
    directory = save_tiny("llama", tmp_path / "llama")
    config = SwarmConfig(verify="on", micro_batches=1)
    with InProcessSwarm(directory, device="cuda", quantization=kind, config=config) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        verifier_of(remote).checker.chance = lambda: 0.0
        with torch.no_grad():
            remote(IDS)
            generate(remote)
        finish_checks(remote)
        assert set(verifier_of(remote).checker.checked) == set(swarm.peers)
    assert not Quarantine(tmp_path / "cache" / "quarantine").peers()
    assert "failed (failure" not in caplog.text
