"""The table of PEFT's methods in the docs names all of them and is true; what lies at the client trains there."""

from __future__ import annotations

import re
from typing import Any

import peft
import pytest
import torch
from adapter_cases import IDS, MASK, TOLERANCE, step, trained, tuned, worst_error
from package_imports import ROOT
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model

from swarm_plugins.backbone.refusals import REFUSED_METHODS, check_config
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.peft_methods import PEFT_METHODS

# What PEFT says of layers, of prompts and of methods that it wants to be used otherwise.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore::UserWarning:peft\..*"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning"),
]
TABLE = dict(
    re.findall(r"^\| `([A-Z0-9_]+)` \| (works|refused) \|", (ROOT / "docs/reference/peft.md").read_text(), re.M)
)
ON_BLOCKS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
VIRTUAL = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
REFUSED: dict[str, PeftConfig] = {
    "ADAMSS": peft.AdamssConfig(**ON_BLOCKS),
    "BOFT": peft.BOFTConfig(**ON_BLOCKS, boft_block_size=4),
    "DEFT": peft.DeftConfig(**ON_BLOCKS),
    "DELORA": peft.DeloraConfig(**ON_BLOCKS),
    "FOURIERFT": peft.FourierFTConfig(**ON_BLOCKS, n_frequency=4),
    "FROD": peft.FrodConfig(**ON_BLOCKS),
    "GLORA": peft.GloraConfig(**ON_BLOCKS),
    "HRA": peft.HRAConfig(**ON_BLOCKS),
    "LN_TUNING": peft.LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM"),
    "OSF": peft.OSFConfig(**ON_BLOCKS),
    "PEANUT": peft.PeanutConfig(**ON_BLOCKS),
    "POLY": peft.PolyConfig(**ON_BLOCKS),
    "PSOFT": peft.PsoftConfig(**ON_BLOCKS),
    "PVERA": peft.PveraConfig(**ON_BLOCKS, r=4),
    "SHADOW": peft.ShadowConfig(task_type="CAUSAL_LM"),
    "SHIRA": peft.ShiraConfig(**ON_BLOCKS, r=2),
    "SUPERTUNING": peft.SupertuningConfig(**ON_BLOCKS),
    "TINYLORA": peft.TinyLoraConfig(**ON_BLOCKS),
    "UNILORA": peft.UniLoraConfig(**ON_BLOCKS),
    "WAVEFT": peft.WaveFTConfig(**ON_BLOCKS, n_frequency=4),
}
ELSEWHERE = {"ADAPTION_PROMPT", "XLORA"}
"""Refused in tests of their own."""
LOCAL: dict[str, tuple[PeftConfig, dict[str, Any]]] = {
    "MULTITASK_PROMPT_TUNING": (
        peft.MultitaskPromptTuningConfig(**VIRTUAL, num_tasks=2),
        {"task_ids": torch.tensor([0, 1])},
    ),
    "CPT": (
        peft.CPTConfig(
            task_type="CAUSAL_LM", cpt_token_ids=[1, 2, 3, 4], cpt_mask=[1] * 4, cpt_tokens_type_mask=[1, 2, 3, 4]
        ),
        {},
    ),
    "CARTRIDGE": (peft.CartridgeConfig(**VIRTUAL), {}),
    "TRAINABLE_TOKENS": (peft.TrainableTokensConfig(token_indices=[5, 17, 99], task_type="CAUSAL_LM"), {}),
}
BEFORE = {"LORA", "IA3", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"}
"""Compared with the local model in test_adapters.py."""
PARTS: dict[str, PeftConfig] = {
    "lm_head": LoraConfig(target_modules=["lm_head", "q_proj"], task_type="CAUSAL_LM"),
    "lm_head-dora": LoraConfig(target_modules=["lm_head", "q_proj"], use_dora=True, task_type="CAUSAL_LM"),
    "embed_tokens": LoraConfig(target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM"),
    "modules_to_save": LoraConfig(**ON_BLOCKS, modules_to_save=["lm_head", "embed_tokens"]),
    "modules_to_save-norm": LoraConfig(**ON_BLOCKS, modules_to_save=["model.norm"]),
    "trainable_token_indices": LoraConfig(**ON_BLOCKS, trainable_token_indices=[5, 17]),
    "vera-lm_head": peft.VeraConfig(target_modules=["lm_head", "q_proj"], r=4, task_type="CAUSAL_LM"),
    "loha-modules_to_save": peft.LoHaConfig(**ON_BLOCKS, modules_to_save=["lm_head"]),
    "final-norm": peft.LNTuningConfig(target_modules=["model.norm"], task_type="CAUSAL_LM"),
}


def test_the_table_names_every_method_of_peft_and_has_a_test_for_each() -> None:
    assert TABLE.keys() == {kind.value for kind in PeftType}
    refused = {name for name, status in TABLE.items() if status == "refused"}
    assert refused == REFUSED_METHODS.keys() == REFUSED.keys() | ELSEWHERE
    assert TABLE.keys() - refused == PEFT_METHODS.keys() | LOCAL.keys() | BEFORE


@pytest.mark.parametrize("pair", ["llama"], indirect=True, scope="session")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_methods_are_refused_by_name(pair, name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{name} cannot work on remote blocks: {REFUSED_METHODS[name]}; "):
        get_peft_model(pair.load_remote(), REFUSED[name])


def test_xlora_is_refused_by_name() -> None:
    config = peft.XLoraConfig(hidden_size=32, adapters={"a": "./a"}, task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedError, match="XLORA cannot work on remote blocks: it mixes adapters"):
        check_config(config, ["model.layers.0.self_attn.q_proj"])


@pytest.mark.parametrize(
    ("pair", "name"),
    [
        pytest.param(family, name, id=f"{family}-{name}")
        for family, names in (("llama", LOCAL | PARTS), ("mixtral", PARTS))
        for name in names
    ],
    indirect=["pair"],
    scope="session",
)
def test_what_lies_here_trains_as_in_the_local_model(pair, name: str, tmp_path: Any) -> None:
    config, extra = LOCAL.get(name) or (PARTS[name], {})
    models = []
    for base in (pair.load_local(), pair.load_remote()):
        torch.manual_seed(1)  # cartridges begin with a token that is not trained
        models.append(tuned(base, config))
    local, remote = models
    assert trained(local).keys() == trained(remote).keys()
    loss, gradients = step(local, **extra)
    found, others = step(remote, **extra)
    assert found == pytest.approx(loss, rel=TOLERANCE)
    assert worst_error(others, gradients) <= TOLERANCE
    remote.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(pair.load_local(), tmp_path).eval()
    with torch.no_grad():
        want, got = (model(input_ids=IDS, attention_mask=MASK, **extra).logits for model in (remote, again))
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)
