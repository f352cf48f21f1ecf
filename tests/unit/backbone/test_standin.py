"""Stand-ins look like the real modules, weigh nothing, and stay so through everything that is done to models."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.backbone.standin import (
    RemoteWeight,
    StandIn,
    stand_in_class,
    structure_version,
    turn_into_stand_ins,
)
from swarm_plugins.errors import CheckpointError, MissingBlocksError, UnsupportedError
from swarm_plugins.testing.in_process import InProcessSwarm

IDS = torch.tensor([[5, 17, 99, 23]])
CLIENT_TENSORS = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


def storage_bytes(model: nn.Module) -> int:
    """Bytes that a model's parameters and buffers really take."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in (*model.parameters(), *model.buffers())}
    return sum(storage.nbytes() for storage in storages.values())


def block_bytes(model: PreTrainedModel) -> int:
    return storage_bytes(model.model.layers)


def num_block_tensors(model: PreTrainedModel) -> int:
    return len(list(model.model.layers.parameters())) + len(list(model.model.layers.buffers()))


@pytest.fixture
def linear() -> nn.Module:
    module = nn.Sequential(nn.Linear(300, 200), nn.LayerNorm(200))
    turn_into_stand_ins(module, "cpu")
    return module


def test_stand_ins_are_instances_of_the_original_classes(linear: nn.Module) -> None:
    assert isinstance(linear[0], nn.Linear)
    assert isinstance(linear[0], StandIn)
    assert type(linear[0]).__name__ == "RemoteLinear"
    assert linear[0].in_features == 300
    assert "Linear(in_features=300, out_features=200, bias=True)" in repr(linear)


def test_the_class_is_made_once() -> None:
    assert stand_in_class(nn.Linear) is stand_in_class(nn.Linear)


def test_a_new_one_is_refused(linear: nn.Module) -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"RemoteLinear cannot be made here, .* leave convolutions out .* use_mtp out of generate",
    ):
        type(linear[0])(3, 4)


def test_parameters_are_hollow_and_frozen(linear: nn.Module) -> None:
    assert all(isinstance(one, RemoteWeight) and not one.requires_grad for one in linear.parameters())


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        pytest.param(lambda m: m.to(torch.bfloat16), torch.bfloat16, id="to-bfloat16"),
        pytest.param(lambda m: m.half(), torch.float16, id="half"),
        pytest.param(lambda m: m.double(), torch.float64, id="double"),
        pytest.param(lambda m: m.to("cpu").float(), torch.float32, id="cpu-float"),
        pytest.param(lambda m: m.train().eval().requires_grad_(False), torch.float32, id="modes"),
    ],
)
def test_casts_do_not_fill_in_weights(remote: PreTrainedModel, cast, dtype: torch.dtype) -> None:
    remote = cast(remote)
    assert {parameter.dtype for parameter in remote.parameters()} == {dtype}
    assert block_bytes(remote) == num_block_tensors(remote) * dtype.itemsize


def test_counts_equal_those_of_the_real_model(remote: PreTrainedModel, local: PreTrainedModel) -> None:
    assert remote.num_parameters() == local.num_parameters()
    assert [n for n, _ in remote.named_parameters()] == [n for n, _ in local.named_parameters()]
    assert [p.shape for p in remote.parameters()] == [p.shape for p in local.parameters()]
    assert [n for n, _ in remote.named_modules()] == [n for n, _ in local.named_modules()]


def test_only_the_client_s_tensors_take_memory(remote: PreTrainedModel, local: PreTrainedModel) -> None:
    client = sum(local.get_parameter(name).numel() * 4 for name in CLIENT_TENSORS)
    rotary = storage_bytes(local.model.rotary_emb)
    assert storage_bytes(remote) <= client + rotary + 4 * num_block_tensors(remote)


def test_printing_shows_the_tree(remote: PreTrainedModel) -> None:
    text = str(remote)
    assert text.startswith("MixtralForCausalLM(")
    assert "(0-3): 4 x RemoteMixtralDecoderLayer(" in text
    assert "(q_proj): RemoteLinear(in_features=32, out_features=32, bias=False)" in text


def test_state_dict_holds_the_client_s_tensors_and_loads_strictly(remote: PreTrainedModel) -> None:
    state = remote.state_dict()
    assert list(state) == CLIENT_TENSORS
    changed = {name: torch.full_like(tensor, 0.25) for name, tensor in state.items()}
    assert remote.load_state_dict(changed, strict=True).missing_keys == []
    assert remote.model.norm.weight.eq(0.25).all()


def test_weights_for_remote_blocks_are_not_taken_in_silence(remote: PreTrainedModel, local: PreTrainedModel) -> None:
    with pytest.raises(RuntimeError, match=r"Unexpected key.*model\.layers\.0\.self_attn\.q_proj\.weight"):
        remote.load_state_dict(local.state_dict(), strict=True)
    unexpected = remote.load_state_dict(local.state_dict(), strict=False).unexpected_keys
    assert sorted(unexpected) == sorted(set(local.state_dict()) - set(CLIENT_TENSORS))


def test_saved_state_is_small_and_loads_back(remote: PreTrainedModel) -> None:
    stream = io.BytesIO()
    torch.save(remote.state_dict(), stream)
    client_bytes = sum(tensor.numel() * 4 for tensor in remote.state_dict().values())
    # Beside the tensors: torch's own archive, aligned to 64 bytes, with a few names.
    assert stream.tell() < client_bytes + 8192
    stream.seek(0)
    assert list(torch.load(stream, weights_only=True)) == CLIENT_TENSORS


def test_save_pretrained_writes_the_client_s_weights(remote: PreTrainedModel, swarm, tmp_path: Path) -> None:
    for save in (remote.save_pretrained, remote.model.save_pretrained, remote.push_to_hub):
        with pytest.raises(UnsupportedError, match="the blocks of this model are on servers, so save_pretrained"):
            save(str(tmp_path / "whole"))
    twin = copy.deepcopy(remote)
    assert twin.save_pretrained.args[0] is twin
    remote.save_pretrained(tmp_path, True, remote.state_dict())
    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(CLIENT_TENSORS)
    # It is no checkpoint to serve or to load from: the blocks are not in it.
    with pytest.raises((CheckpointError, MissingBlocksError), match=tmp_path.name):
        AutoSwarmModelForCausalLM.from_pretrained(tmp_path, connection=swarm.connection)


def test_an_adapter_of_transformers_own_is_saved_alone(
    remote: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = copy.deepcopy(remote)
    remote.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    remote.save_pretrained(tmp_path)
    assert all("lora_" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    twin.load_adapter(tmp_path)
    torch.testing.assert_close(twin(IDS).logits, remote(IDS).logits)
    monkeypatch.setattr(PreTrainedModel, "push_to_hub", lambda self, repo_id: (self, repo_id))
    assert remote.push_to_hub("me/adapter") == (remote, "me/adapter")


@torch.no_grad()
def test_a_deep_copy_is_independent_and_works(remote: PreTrainedModel, local: PreTrainedModel) -> None:
    twin = copy.deepcopy(remote)
    assert type(twin.model.layers[0]) is type(remote.model.layers[0])
    assert twin.model.layers[0].swarm_stack is twin.model.layers[3].swarm_stack
    assert twin.model.layers[0].swarm_stack is not remote.model.layers[0].swarm_stack
    assert list(twin.model.layers[0].swarm_stack.layers) == list(twin.model.layers)
    assert block_bytes(twin) == 4 * num_block_tensors(twin)
    twin.lm_head.weight.zero_()
    torch.testing.assert_close(remote(IDS).logits, local(IDS).logits, atol=1e-5, rtol=1e-5)
    assert twin(IDS).logits.eq(0).all()


def test_a_deep_copy_of_one_block_weighs_nothing(remote: PreTrainedModel) -> None:
    twin = copy.deepcopy(remote.model.layers[1])
    assert storage_bytes(twin) == 4 * len([*twin.parameters(), *twin.buffers()])


def test_a_pickled_copy_is_small_and_drops_the_live_connection(remote: PreTrainedModel) -> None:
    data = pickle.dumps(remote)
    client_bytes = sum(tensor.numel() * 4 for tensor in remote.state_dict().values())
    # Beside the tensors: names, config and the module tree.
    assert len(data) < client_bytes + 40_000
    twin = pickle.loads(data)
    assert type(twin.model.layers[0]) is type(remote.model.layers[0])
    assert block_bytes(twin) == 4 * num_block_tensors(twin)
    torch.testing.assert_close(twin.lm_head.weight, remote.lm_head.weight)
    with pytest.raises(UnsupportedError, match="has lost its connection; load the model again"):
        twin(IDS)


@torch.no_grad()
def test_a_pickled_copy_works_with_a_connection(
    remote: PreTrainedModel, local: PreTrainedModel, swarm: InProcessSwarm
) -> None:
    twin = pickle.loads(pickle.dumps(remote))
    twin.model.layers[0].swarm_stack.connection = swarm.connection
    torch.testing.assert_close(twin(IDS).logits, local(IDS).logits, atol=1e-5, rtol=1e-5)


def test_putting_a_module_in_changes_the_structure_version(linear: nn.Module) -> None:
    before = structure_version()
    turned = nn.Linear(2, 2)
    turn_into_stand_ins(turned, "cpu")
    linear[0].extra = turned
    assert structure_version() > before


def test_parameters_of_the_optimizer_stay_the_same_objects(remote: PreTrainedModel) -> None:
    remote.requires_grad_(False)
    optimizer = torch.optim.AdamW([*remote.parameters()], lr=0.1)
    remote.lm_head.weight.requires_grad_(True)
    before = remote.lm_head.weight.detach().clone()
    remote(IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert not torch.equal(remote.lm_head.weight, before)
    assert block_bytes(remote) == 4 * num_block_tensors(remote)
