"""Loading: HF's own class, only the client's share of the checkpoint, errors before any data is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig
from type_models import save_type

from swarm_plugins.backbone import (
    AutoSwarmModel,
    AutoSwarmModelForCausalLM,
    AutoSwarmModelForSequenceClassification,
)
from swarm_plugins.backbone.version import base_blocks
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.loading import class_for_task
from swarm_plugins.errors import CheckpointError, ConfigError, MissingBlocksError, UnsupportedError
from swarm_plugins.offload import quantize_checkpoint
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny, tiny_model

IDS = torch.tensor([[5, 17, 99, 23]])


@pytest.fixture(autouse=True)
def _no_peers_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_INITIAL_PEERS", raising=False)


def test_the_class_is_hf_s_own(remote, local, directory: Path) -> None:
    assert type(remote) is type(local)
    assert remote.model.layers[0].swarm_stack.version == Checkpoint.open(directory).version
    assert remote.name_or_path == remote.config._name_or_path == local.config._name_or_path == str(directory)
    assert not remote.training


@torch.no_grad()
def test_types_of_tokens_go_into_the_embeddings_here(tmp_path: Path) -> None:
    directory = save_type("gpt2", tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(directory).eval()
    types = torch.arange(IDS.numel()).view(IDS.shape) % 3
    with InProcessSwarm(directory) as swarm:
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        found = model(IDS, token_type_ids=types).logits
        settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "token_type_ids": types}
        assert torch.equal(model.generate(IDS, **settings), plain.generate(IDS, **settings))
    torch.testing.assert_close(found, plain(IDS, token_type_ids=types).logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, plain(IDS).logits, atol=1e-2)


@torch.no_grad()
def test_the_default_device_does_not_matter(local, directory: Path) -> None:
    # As in configure_model of a Trainer on a GPU, whose device is the default there.
    with torch.device("meta"), InProcessSwarm(directory) as swarm:
        found = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)(IDS).logits
    torch.testing.assert_close(found, local(IDS).logits, atol=1e-5, rtol=1e-5)


def test_pefts_config_names_the_base_wherever_home_is(
    swarm: InProcessSwarm, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(directory.parent))
    remote = AutoSwarmModelForCausalLM.from_pretrained(f"~/{directory.name}", connection=swarm.connection)
    assert len(base_blocks(remote)) == remote.config.num_hidden_layers
    wrapped = get_peft_model(remote, LoraConfig(r=2, target_modules=["q_proj"]))
    assert wrapped.peft_config["default"].base_model_name_or_path == remote.config._name_or_path == str(directory)
    wrapped.save_pretrained(str(tmp_path))
    assert LoraConfig.from_pretrained(str(tmp_path)).base_model_name_or_path == str(directory)


@pytest.mark.parametrize("max_shard_size", ["5GB", "60KB"], ids=["one-file", "shards"])
def test_only_the_client_s_share_is_read(
    max_shard_size: str, tmp_path: Path, read_bytes: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_tiny("mixtral", tmp_path, max_shard_size=max_shard_size)
    with InProcessSwarm(directory) as swarm:
        capsys.readouterr()
        read_bytes.clear()
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        assert "Loading weights" not in capsys.readouterr().err, "bars are for terminals"
    client_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    assert sum(read_bytes) == client_bytes
    assert client_bytes < model.num_parameters() * 4 / 5


@torch.no_grad()
def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    local = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with InProcessSwarm(tmp_path) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(tmp_path, connection=swarm.connection)
        assert remote.lm_head.weight is remote.model.embed_tokens.weight
        # Same kernels in the same order on both sides up to the attention of a session.
        torch.testing.assert_close(remote(IDS).logits, local(IDS).logits, atol=1e-5, rtol=1e-5)


def test_dtype_is_that_of_local_weights_and_stand_ins(swarm: InProcessSwarm, directory: Path) -> None:
    model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.dtype == torch.bfloat16


def test_generation_config_of_the_checkpoint_is_used_wherever_blocks_run(tmp_path: Path) -> None:
    directory = save_tiny("llama", tmp_path)
    GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=[2, 5]).save_pretrained(directory)
    with InProcessSwarm(directory) as swarm:
        for place in ({"connection": swarm.connection}, {"offload": "none"}):
            model = AutoSwarmModelForCausalLM.from_pretrained(directory, **place, eos_token_id=7)
            assert model.generation_config.max_new_tokens == 3
            assert model.generation_config.eos_token_id == [2, 5]
            assert model.config.eos_token_id == 7


def test_settings_of_the_head_can_be_given(swarm: InProcessSwarm, directory: Path) -> None:
    model = AutoSwarmModelForSequenceClassification.from_pretrained(
        directory, connection=swarm.connection, num_labels=5, id2label={i: f"class {i}" for i in range(5)}
    )
    assert model.num_labels == 5
    assert model.config.id2label[4] == "class 4"
    assert model.score.weight.requires_grad


def test_an_unknown_argument_is_named(swarm: InProcessSwarm, directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown argument 'num_lables'.*MixtralConfig; .*num_labels"):
        AutoSwarmModelForSequenceClassification.from_pretrained(directory, connection=swarm.connection, num_lables=5)


def test_settings_that_servers_would_not_know_of_are_refused(swarm: InProcessSwarm, directory: Path) -> None:
    with pytest.raises(ConfigError, match="'num_experts_per_tok' cannot be changed here: blocks run as the"):
        AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, num_experts_per_tok=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device_map": "auto"}, "'device_map' is not taken here: blocks are on servers, and device= says where"),
        ({"load_in_8bit": True}, "'load_in_8bit' is not taken here: each server chooses the width of its blocks"),
        ({"trust_remote_code": True}, "code out of a repository is never run"),
    ],
)
def test_what_transformers_would_take_is_answered(
    swarm: InProcessSwarm, directory: Path, arguments: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device_map": "auto"}, "'device_map' is not taken here: device= says where the model runs"),
        ({"load_in_8bit": True}, "'load_in_8bit' is not taken here: experts are kept in few bits by offload="),
    ],
)
def test_on_this_machine_the_answer_is_another(directory: Path, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AutoSwarmModelForCausalLM.from_pretrained(directory, offload="none", **arguments)


def test_no_peers_is_found_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no swarm to join"):
        AutoSwarmModelForCausalLM.from_pretrained(tmp_path / "missing")


def test_a_quantized_store_is_refused_with_the_model_to_give(
    swarm: InProcessSwarm, directory: Path, tmp_path: Path
) -> None:
    quantize_checkpoint(directory, tmp_path / "store", expert_bits=4, progress=False)
    version = Checkpoint.open(directory).version
    with pytest.raises(ConfigError, match=f"announce its blocks as blocks of '{version}'; load that model"):
        AutoSwarmModelForCausalLM.from_pretrained(tmp_path / "store", connection=swarm.connection)


def test_a_directory_that_does_not_exist_is_named(swarm: InProcessSwarm, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, CheckpointError), match="missing"):
        AutoSwarmModelForCausalLM.from_pretrained(tmp_path / "missing", connection=swarm.connection)


def test_blocks_that_nobody_serves_are_named_at_loading(directory: Path) -> None:
    with (
        InProcessSwarm(directory, spans=[(0, 2), (3, 4)]) as swarm,
        pytest.raises(MissingBlocksError, match=r"blocks? 2:3"),
    ):
        AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)


def test_a_swarm_of_another_version_is_as_good_as_none(swarm: InProcessSwarm, tmp_path: Path) -> None:
    other = save_tiny("mixtral", tmp_path, seed=3)
    with pytest.raises(MissingBlocksError, match="0:4"):
        AutoSwarmModelForCausalLM.from_pretrained(other, connection=swarm.connection)


def test_an_architecture_without_a_head_of_the_kind_is_refused() -> None:
    config = AutoConfig.for_model("clip_vision_model")
    with pytest.raises(UnsupportedError, match="no causal language model for model_type 'clip_vision_model'"):
        class_for_task(config, "causal language model", MODEL_FOR_CAUSAL_LM_MAPPING)


@pytest.mark.parametrize("auto", [AutoSwarmModel, AutoSwarmModelForCausalLM, AutoSwarmModelForSequenceClassification])
def test_the_auto_classes_are_not_instantiated(auto: type) -> None:
    with pytest.raises(TypeError, match=rf"call {auto.__name__}\.from_pretrained"):
        auto()
