"""Local blocks: what is read, who is asked, what is refused, and a failed step that is tried again."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PreTrainedModel, StaticCache

from swarm_plugins import SwarmConfig
from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.errors import CheckpointError, ConfigError, SwarmError, UnsupportedError
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny

IDS = torch.tensor([[5, 17, 99, 23]])


@pytest.fixture
def model(swarm: InProcessSwarm, directory: Path) -> PreTrainedModel:
    return AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, local_blocks=(1, 1))


def test_the_client_s_settings_name_them_and_an_argument_overrides(directory: Path) -> None:
    with InProcessSwarm(directory, spans=[(1, 4)], config=SwarmConfig(local_blocks=(1, 0))) as swarm:
        # Nobody serves block 0.
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        assert model.model.layers[1].swarm_stack.blocks == range(1, 4)
        other = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, local_blocks=(2, 1))
        assert other.model.layers[2].swarm_stack.blocks == range(2, 3)


def test_only_the_local_parts_are_read(swarm: InProcessSwarm, directory: Path, read_bytes: list[int]) -> None:
    read_bytes.clear()
    model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, local_blocks=(1, 0))
    kept = model.state_dict()
    assert {name.split(".")[2] for name in kept if ".layers." in name} == {"0"}
    assert sum(read_bytes) == sum(tensor.nbytes for tensor in kept.values())


@torch.no_grad()
def test_servers_are_asked_once_and_only_for_the_middle(
    model: PreTrainedModel, swarm: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[range] = []

    def noting(run: Any) -> Any:
        def noted(inputs: Any, *args: Any) -> Any:
            asked.append(inputs[0].blocks if isinstance(inputs, Sequence) else inputs.blocks)
            return run(inputs, *args)

        return noted

    for service in swarm.services.values():
        for method in ("forward", "step"):
            monkeypatch.setattr(service.runner, method, noting(getattr(service.runner, method)))
    model(IDS, use_cache=False)
    model.generate(IDS, max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert asked == [range(1, 2), range(2, 3)] * 3


@pytest.mark.parametrize("local", [(4, 0), (2, 2), (0, 9)])
def test_nothing_left_to_the_swarm_is_refused(swarm: InProcessSwarm, directory: Path, local: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"covers all 4 blocks of .*: leave at least one to the swarm, or load the"):
        AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, local_blocks=local)


def test_a_missing_local_weight_is_an_error(tmp_path: Path) -> None:
    directory = save_tiny("llama", tmp_path)
    file = directory / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({key: value for key, value in load_file(file).items() if key != name}, file, {"format": "pt"})
    with (
        InProcessSwarm(directory, spans=[(1, 4)]) as swarm,
        pytest.raises(CheckpointError, match=rf"lacks 1 tensors, such as {name}"),
    ):
        AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, local_blocks=(1, 0))


def test_weights_that_are_here_may_be_read(model: PreTrainedModel) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0], init_lora_weights="pissa")
    with pytest.raises(UnsupportedError, match="reads base weights"):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"))
    tuned = get_peft_model(model, config)
    assert [name for name, tensor in tuned.named_parameters() if tensor.requires_grad]


@torch.no_grad()
def test_a_copy_works_and_a_pickled_model_keeps_its_local_weights(
    model: PreTrainedModel, local: PreTrainedModel
) -> None:
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(IDS).logits, local(IDS).logits)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again.model.layers[3].input_layernorm.weight, local.model.layers[3].input_layernorm.weight)


@torch.no_grad()
def test_a_failed_step_can_be_tried_again(
    model: PreTrainedModel, local: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DynamicCache(config=model.config)
    model(IDS, past_key_values=cache)
    remote = model.model.layers[1].swarm_stack.remote

    def failing(*_: Any) -> None:
        raise SwarmError("no server")

    with monkeypatch.context() as patched:
        patched.setattr(remote, "step", failing)
        with pytest.raises(SwarmError, match="no server"):
            model(IDS[:, :1], past_key_values=cache)
        with pytest.raises(SwarmError, match="no server"):  # though layers of a fixed size forget nothing
            model(IDS, past_key_values=StaticCache(config=model.config, max_cache_len=8))
    got = model(IDS[:, :1], past_key_values=cache).logits
    want = local(torch.cat([IDS, IDS[:, :1]], dim=1)).logits[:, -1:]
    torch.testing.assert_close(got, want)
    cache.layers[0].crop(-1)
    with pytest.raises(UnsupportedError, match=r"5 tokens of the local blocks and 6 .*start with a new cache"):
        model(IDS[:, :1], past_key_values=cache)
