"""States of accelerate hold what is trained, and load onto the same base only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from swarm_plugins import AutoSwarmModelForCausalLM, save_only_trained
from swarm_plugins.errors import CheckpointError
from swarm_plugins.testing.models import save_tiny, tiny_model


@pytest.fixture(autouse=True)
def _leaves_no_state() -> Iterator[None]:
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def prepared(base: Path, *others: nn.Module, rank: int = 4, **more: Any) -> tuple[Accelerator, Any]:
    """An accelerator with an adapter of its own, on a base in memory."""
    accelerator = Accelerator(cpu=True)
    save_only_trained(accelerator)
    loaded = AutoSwarmModelForCausalLM.from_pretrained(base, offload="none")
    settings = LoraConfig(r=rank, target_modules=["q_proj"], init_lora_weights=False, **more)
    model = get_peft_model(loaded, settings)
    accelerator.prepare(*others, model)
    return accelerator, model


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}


def test_a_state_holds_the_adapter_and_other_models_whole(tiny_mixtral: Path, tmp_path: Path) -> None:
    head = nn.Linear(2, 2)
    accelerator, model = prepared(tiny_mixtral, head)
    accelerator.save_state(str(tmp_path))
    assert load_file(tmp_path / "model.safetensors").keys() == head.state_dict().keys()
    assert load_file(tmp_path / "model_1.safetensors").keys() == trained(model).keys()
    before, bias = trained(model), head.bias.detach().clone()
    with torch.no_grad():
        for one in (*model.parameters(), *head.parameters()):
            if one.requires_grad:
                one.zero_()
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(before[name], one) for name, one in trained(model).items())
    assert torch.equal(head.bias, bias)


def test_of_another_model_with_tied_weights_a_state_has_one(tiny_mixtral: Path, tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4))
    tied[1].weight = tied[0].weight
    accelerator, _ = prepared(tiny_mixtral, tied)
    accelerator.save_state(str(tmp_path))
    before = tied[0].weight.detach().clone()
    with torch.no_grad():
        tied[0].weight.zero_()
    accelerator.load_state(str(tmp_path))
    assert torch.equal(tied[1].weight, before)


def test_trained_tokens_of_tied_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    config = tiny_model("llama", num_layers=1).config
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
    accelerator, model = prepared(tmp_path / "tied", trainable_token_indices=[5, 6])
    accelerator.save_state(str(tmp_path / "state"))
    before = trained(model)
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert all(torch.equal(before[name], one) for name, one in trained(model).items())


def test_a_state_of_another_base_or_adapter_changes_nothing(tiny_mixtral: Path, tmp_path: Path) -> None:
    accelerator, _ = prepared(tiny_mixtral)
    accelerator.save_state(str(tmp_path / "state"))
    other = save_tiny("mixtral", tmp_path / "other", seed=1)
    for changed, said in (
        ({"base": other}, "Load that version of the base model"),
        ({"base": tiny_mixtral, "rank": 8}, "build the same adapter"),
    ):
        again, model = prepared(**changed)  # type: ignore[arg-type]
        before = trained(model)
        with pytest.raises(CheckpointError, match=said):
            again.load_state(str(tmp_path / "state"))
        assert all(torch.equal(before[name], one) for name, one in trained(model).items())


def test_what_save_state_did_not_write_is_named(tiny_mixtral: Path, tmp_path: Path) -> None:
    accelerator, _ = prepared(tiny_mixtral)
    with pytest.raises(CheckpointError, match=r"swarm_base\.json cannot be read .* after save_only_trained"):
        accelerator.load_state(str(tmp_path))
    (tmp_path / "swarm_base.json").write_text("[null, null]")
    with pytest.raises(CheckpointError, match="holds 2 models, but 1 are prepared"):
        accelerator.load_state(str(tmp_path))
    (tmp_path / "swarm_base.json").write_text("[null]")
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read .*safe_serialization=True"):
        accelerator.load_state(str(tmp_path))
