"""What cannot work on remote blocks is refused before the first step, by name and with the cure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    BOFTConfig,
    FourierFTConfig,
    IA3Config,
    LNTuningConfig,
    LoftQConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from peft.tuners.lora import EvaConfig
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from torch import nn
from transformers import PreTrainedModel

from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.backbone.adapter_reader import AdapterReader
from swarm_plugins.backbone.standin import RemoteWeight, turn_into_stand_ins
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny

# Half of these configurations PEFT itself has its doubts about.
pytestmark = pytest.mark.filterwarnings(r"ignore::UserWarning:peft\..*")
IDS = torch.tensor([[5, 17, 99, 23]])
TARGETS = ["q_proj", "v_proj"]
WORKS = r"remote blocks support LoRA .*, IA3, prompt tuning, p-tuning, prefix tuning"


def lora(**options: object) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": TARGETS, **options})


OTHER_KINDS: dict[str, Callable[[], PeftConfig]] = {
    "BOFT": lambda: BOFTConfig(target_modules=TARGETS, boft_block_size=4),
    "FOURIERFT": lambda: FourierFTConfig(target_modules=TARGETS, n_frequency=4),
    "LN_TUNING": lambda: LNTuningConfig(target_modules=["input_layernorm"]),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_of_adapters(remote: PreTrainedModel, kind: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{kind} cannot work on remote blocks: .*; {WORKS}"):
        get_peft_model(remote, OTHER_KINDS[kind]())


@pytest.mark.parametrize(
    ("init", "options"),
    [
        ("pissa_niter_4", {}),
        ("olora", {}),
        ("loftq", {"loftq_config": LoftQConfig()}),
        ("eva", {"eva_config": EvaConfig()}),
        ("corda", {"corda_config": CordaConfig()}),
        ("lora_ga", {"lora_ga_config": LoraGAConfig()}),
        ("mica", {}),
    ],
)
def test_initialisations_that_read_base_weights(remote: PreTrainedModel, init: str, options: dict) -> None:
    with pytest.raises(UnsupportedError, match=rf"init_lora_weights='{init}' reads base weights.* use .*=True"):
        get_peft_model(remote, lora(init_lora_weights=init, **options))


@pytest.mark.parametrize("init", ["gaussian", "orthogonal"])
def test_initialisations_that_read_nothing_work(remote: PreTrainedModel, init: str) -> None:
    model = get_peft_model(remote, lora(init_lora_weights=init))
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("modules_to_save", ["o_proj"]),
        ("modules_to_save", ["mlp.gate"]),
        ("trainable_token_indices", {"o_proj": [1]}),
    ],
)
def test_base_modules_of_blocks_trained_as_a_whole(remote: PreTrainedModel, option: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=rf"{option} names .*layers\.0\..* name only local modules"):
        get_peft_model(remote, lora(**{option: value}))


def test_every_way_to_inject_is_watched(remote: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedError, match="pissa"):
        inject_adapter_in_model(lora(init_lora_weights="pissa"), remote)
    with pytest.raises(UnsupportedError, match="layer_replication"):
        remote.add_adapter(lora(layer_replication=[(0, 2), (1, 4)]))
    model = get_peft_model(remote, lora())
    with pytest.raises(UnsupportedError, match="olora"):
        model.add_adapter("second", lora(init_lora_weights="olora"))


def test_a_refused_adapter_leaves_the_model_as_it_was(remote: PreTrainedModel) -> None:
    before = remote(IDS).logits
    with pytest.raises(UnsupportedError, match=r"layer_replication=.* cannot work on remote blocks: .* leave it out"):
        get_peft_model(remote, lora(layer_replication=[(0, 2), (1, 4)]))
    assert torch.equal(remote(IDS).logits, before)
    assert get_peft_model(remote, lora()).get_nb_trainable_parameters()[0] > 0


def test_llama_adapter(tmp_path: Path) -> None:
    directory = save_tiny("llama", tmp_path)
    with InProcessSwarm(directory) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        config = AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")
        with pytest.raises(UnsupportedError, match=r"'self_attn'.* cannot be replaced by .*AdaptedAttention"):
            get_peft_model(remote, config)


@pytest.mark.parametrize(
    "config",
    [
        lora(target_modules=["lm_head"], init_lora_weights="pissa"),
        lora(target_modules=["embed_tokens"], use_dora=True),
        VeraConfig(target_modules=["lm_head"]),
        LNTuningConfig(target_modules=["model.norm"]),
        TrainableTokensConfig(token_indices=[5, 17]),
        lora(modules_to_save=["lm_head"]),
    ],
    ids=["pissa", "dora", "vera", "ln-tuning", "tokens", "modules-to-save"],
)
def test_everything_works_on_the_modules_that_are_here(remote: PreTrainedModel, config: PeftConfig) -> None:
    model = get_peft_model(remote, config)
    model(input_ids=IDS, labels=IDS).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained
    assert all(parameter.grad is not None for parameter in trained)


@pytest.mark.parametrize(
    "config",
    [
        lora(),
        IA3Config(target_modules=TARGETS, feedforward_modules=[]),
        lora(target_modules=[], target_parameters=["experts.down_proj"]),
    ],
    ids=["lora", "ia3", "experts"],
)
def test_merging(remote: PreTrainedModel, config: PeftConfig) -> None:
    model = get_peft_model(remote, config)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(UnsupportedError, match=r"on servers\. Merging.* keep the adapter unmerged"):
            merge(safe_merge=True)


def test_a_base_weight_set_trainable(remote: PreTrainedModel) -> None:
    model = get_peft_model(remote, lora())
    weight = remote.get_submodule("model.layers.2.self_attn.o_proj").weight
    weight.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"'self_attn.o_proj.weight' in remote block 2 is trainable.* Freeze it"):
        model(input_ids=IDS)
    with torch.no_grad():
        model(input_ids=IDS)
    weight.requires_grad_(False)
    model(input_ids=IDS)


def test_biases_set_trainable(tmp_path: Path) -> None:
    directory = save_tiny("qwen2_moe", tmp_path)
    with InProcessSwarm(directory) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        model = get_peft_model(remote, lora(bias="all"))
        with pytest.raises(UnsupportedError, match=r"bias' in remote block 0 is trainable but would get no gradient"):
            model(input_ids=IDS)


def test_a_tensor_in_the_wrong_place(remote: PreTrainedModel) -> None:
    block = remote.get_submodule("model.layers.1")
    with pytest.raises(UnsupportedError, match="cannot replace the parameter 'weight' of a remote block"):
        block.self_attn.q_proj.weight = nn.Parameter(torch.zeros(32, 32))
    with pytest.raises(UnsupportedError, match=r"'mlp' in a remote block cannot be replaced by .*Identity"):
        block.mlp = nn.Identity()


def test_adapters_on_transposed_linear_layers() -> None:
    block = nn.Module()
    block.proj = nn.Linear(4, 4)
    turn_into_stand_ins(block, "cpu")
    wrapped = get_peft_model_of(block)
    wrapped.fan_in_fan_out = True
    with pytest.raises(UnsupportedError, match=r"'proj' .*fan_in_fan_out.* adapt linear layers"):
        AdapterReader([block]).select(0, range(1), 1)


def get_peft_model_of(block: nn.Module) -> nn.Module:
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["proj"]), block)
    return block.proj


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight + 1,
        lambda weight: weight.data.clone(),
        lambda weight: torch.linalg.svd(weight),
        lambda weight: weight.copy_(torch.zeros(weight.shape)),
        lambda weight: weight.tolist(),
        lambda weight: setattr(weight, "data", torch.zeros(weight.shape)),
    ],
    ids=["add", "clone", "svd", "copy", "list", "set"],
)
def test_values_of_weights_cannot_be_used(remote: PreTrainedModel, use: Callable[[nn.Parameter], object]) -> None:
    weight = remote.get_submodule("model.layers.1.self_attn.q_proj").weight
    assert isinstance(weight, RemoteWeight)
    with pytest.raises(UnsupportedError, match=r"read or written here \(.*\); it is on servers"):
        use(weight)


def test_an_adapter_made_with_eva_can_be_loaded(
    remote: PreTrainedModel, local: PreTrainedModel, tmp_path: Path
) -> None:
    model = get_peft_model(remote, lora(init_lora_weights="gaussian"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    expected = model(input_ids=IDS).logits
    model.peft_config["default"].init_lora_weights = "eva"
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(model.unload(), tmp_path)
    assert torch.equal(loaded(input_ids=IDS).logits, expected)
