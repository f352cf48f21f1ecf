"""PR-MoE on real servers, and trained there: the local model's tokens, losses and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm
from swarm_plugins.models import PRMoEForCausalLM
from swarm_plugins.testing.models import save_tiny

pytestmark = pytest.mark.swarm
IDS = torch.tensor([[5, 17, 99, 23, 64, 9, 88, 41], [31, 64, 9, 88, 12, 101, 7, 55]])
# Servers multiply twice where PEFT adds to a weight first.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """The model of transformers, and the same on two servers; one of them has a dense block."""
    directory: Path = save_tiny("prmoe", tmp_path_factory.mktemp("prmoe"))
    with LocalSwarm(directory, num_servers=2) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, initial_peers=swarm.initial_peers)
        yield AutoModelForCausalLM.from_pretrained(directory).eval(), remote
        remote.model.layers[0].swarm_stack.remote.connection.close()


def test_text_and_gradients_of_adapters(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    texts, losses, gradients = [], [], []
    for model in models:
        assert isinstance(model, PRMoEForCausalLM)
        texts.append(model.generate(IDS, max_new_tokens=8, do_sample=False).tolist())
        torch.manual_seed(0)
        tuned = get_peft_model(model, targets())
        with torch.no_grad():
            for name, parameter in tuned.named_parameters():
                if ".lora_B" in name:
                    parameter.normal_(std=0.1)
        # Routers are frozen, so that the loss is the language model's alone.
        output = tuned.train()(input_ids=IDS, labels=IDS)
        output.loss.backward()
        losses.append(float(output.loss.detach()))
        gradients.append({name: one.grad for name, one in tuned.named_parameters() if one.requires_grad})
    assert texts[0] == texts[1]
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert worst(gradient, gradients[1][name]) < TOLERANCE, name


def targets() -> LoraConfig:
    """Attention, the residual branch, and experts."""
    return LoraConfig(
        r=4,
        target_modules=["q_proj", "residual_mlp.up_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        task_type="CAUSAL_LM",
    )


def worst(found: Tensor, expected: Tensor) -> float:
    assert expected.abs().max() > 0
    return float((found - expected).abs().max())
