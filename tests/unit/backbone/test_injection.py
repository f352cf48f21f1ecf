"""LoRA without targets finds good ones in every family, also where PEFT has none or loses them."""

from __future__ import annotations

import peft.utils.transformers_weight_conversion as weight_conversion
import pytest
from peft import LoraConfig, get_peft_model
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

from swarm_plugins.backbone.injection import add_lora_defaults, keep_unset_targets, watch_injection
from swarm_plugins.testing.models import tiny_model

ATTENTION = {"q_proj", "v_proj"}
LATENT = {"q_b_proj", "kv_b_proj"}
FAMILIES = {
    "llama": ATTENTION,
    "mixtral": ATTENTION,
    "qwen2_moe": ATTENTION,
    "qwen3_moe": ATTENTION,
    "olmoe": ATTENTION,
    "gpt_oss": ATTENTION,
    "glm4_moe": ATTENTION,
    "phimoe": ATTENTION,
    "prmoe": ATTENTION,
    "deepseek_v3": LATENT,
}


@pytest.fixture(autouse=True)
def _watched() -> None:
    watch_injection()


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_without_targets(family: str) -> None:
    model = get_peft_model(tiny_model(family, num_layers=2), LoraConfig(r=2))
    adapted = {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if ".lora_A" in name}
    assert adapted == FAMILIES[family]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_given_targets_stay(family: str) -> None:
    config = LoraConfig(r=2, target_modules=["o_proj"])
    get_peft_model(tiny_model(family, num_layers=2), config)
    assert config.target_modules == {"o_proj"}
    config = LoraConfig(r=2, target_modules=[], target_parameters=["experts.down_proj"])
    model = get_peft_model(tiny_model(family, num_layers=2), config)
    assert not any("q_proj.lora" in name for name, _ in model.named_parameters())
    assert set(config.target_parameters) == {"experts.down_proj"}


def test_targets_of_old_checkpoints_are_still_converted() -> None:
    config = LoraConfig(r=2, target_modules=["w1", "w2", "w3"])
    with pytest.warns(RuntimeWarning, match=r"(rank|alpha)_pattern keys did not match"):
        get_peft_model(tiny_model("mixtral", num_layers=2), config)
    assert config.target_parameters == {"gate_up_proj", "down_proj"}


def test_nothing_of_peft_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "olmoe", ["mine"])
    add_lora_defaults()
    assert TARGETS["olmoe"] == ["mine"]
    assert TARGETS["llama"] == ["q_proj", "v_proj"]


def test_the_hook_is_set_once() -> None:
    before = weight_conversion.convert_peft_config_for_transformers
    watch_injection()
    assert weight_conversion.convert_peft_config_for_transformers is before


def test_only_a_loss_of_targets_that_were_never_given_is_undone() -> None:
    config = LoraConfig(r=2)
    with keep_unset_targets(config):
        config.target_modules, config.target_parameters = set(), set()
    assert config.target_modules is None
    config = LoraConfig(r=2)
    with keep_unset_targets(config):
        config.target_modules = {"found"}
    assert config.target_modules == {"found"}
    config = LoraConfig(r=2, target_modules=[])
    with keep_unset_targets(config):
        config.target_modules = set()
    assert config.target_modules == set()
