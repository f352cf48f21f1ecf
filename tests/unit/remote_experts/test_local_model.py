"""An ordinary model here with experts at holders: PEFT, copies, saving, and what is refused with its reason."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from holders_kit import Held, serving
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, MixtralForCausalLM, PreTrainedModel

from swarm_plugins import load_remote_experts
from swarm_plugins.client import SwarmConnection
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.remote_experts.module import turn_into_remote

TOKENS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def connection(mixtral: Path) -> Iterator[SwarmConnection]:
    with serving(mixtral, {"a": Held(range(2)), "b": Held(range(2, 4))}) as holders:
        yield holders.connection


@pytest.fixture
def model(mixtral: Path, connection: SwarmConnection) -> PreTrainedModel:
    return load_remote_experts(mixtral, connection=connection)


def test_the_class_is_hf_s_and_no_expert_has_storage(model: PreTrainedModel) -> None:
    assert isinstance(model, MixtralForCausalLM)
    assert model.config._experts_implementation == "swarm_remote"
    sizes = [p.untyped_storage().nbytes() for name, p in model.named_parameters() if ".experts." in name]
    assert sizes == [4] * 4
    assert not any(".experts." in name for name in model.state_dict())


def test_lora_beside_the_experts_trains_as_in_the_local_model(model: PreTrainedModel, mixtral: Path) -> None:
    local = AutoModelForCausalLM.from_pretrained(mixtral, experts_implementation="grouped_mm")
    grads = []
    for base in (model, local):
        torch.manual_seed(0)
        adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"))
        adapted.train()
        adapted(input_ids=TOKENS, labels=TOKENS).loss.backward()
        grads.append({name: p.grad for name, p in adapted.named_parameters() if p.requires_grad})
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)


def test_an_overflow_of_the_loss_scaler_leaves_out_the_step(model: PreTrainedModel) -> None:
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    with torch.autocast("cpu", torch.float16):
        loss = tuned(input_ids=TOKENS).logits.float().square().mean()
        (loss * math.inf).backward()
    gradients = [one.grad for one in tuned.parameters() if one.requires_grad]
    assert gradients
    assert not all(one.isfinite().all() for one in gradients if one is not None)


def test_an_adapter_is_saved_and_loaded_and_a_copy_shares_the_holders(model: PreTrainedModel, tmp_path: Path) -> None:
    expected = model(TOKENS).logits
    assert torch.equal(copy.deepcopy(model)(TOKENS).logits, expected)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path)
    assert isinstance(PeftModel.from_pretrained(adapted.unload(), tmp_path), PeftModel)


@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj"])
def test_adapters_on_remote_experts_are_refused(model: PreTrainedModel, parameter: str) -> None:
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], target_parameters=[f"experts.{parameter}"]))
    with pytest.raises(UnsupportedError, match=r"remote experts .* at other peers, frozen\. Adapters on them"):
        adapted(TOKENS)


def test_training_or_saving_remote_experts_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="a model with remote experts is not saved as a whole"):
        model.save_pretrained(tmp_path)
    model.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"gate_up_proj of remote experts .* is to be trained"):
        model(TOKENS)


def test_the_activation_of_remote_experts_is_frozen_and_training_it_is_refused(mixtral: Path) -> None:
    experts = AutoModelForCausalLM.from_pretrained(mixtral).model.layers[0].mlp.experts
    outline = copy.deepcopy(experts)
    experts.act_fn = torch.nn.PReLU()
    turn_into_remote(experts, outline, torch.device("cpu"), 0, None)
    assert not experts.act_fn.weight.requires_grad
    experts.act_fn.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"activation of remote experts .* gets no gradient: freeze it"):
        experts(torch.zeros(1, 32), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2))


def test_an_empty_batch_costs_no_message(model: PreTrainedModel) -> None:
    experts = model.model.layers[0].mlp.experts
    nothing = experts(torch.zeros(0, 32), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert nothing.shape == (0, 32)


def test_without_an_address_the_error_says_what_to_give(mixtral: Path) -> None:
    with pytest.raises(ConfigError, match=r"no address of a swarm: give initial_peers=\[ADDRESS\]"):
        load_remote_experts(mixtral)
