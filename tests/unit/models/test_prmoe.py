"""PR-MoE as a transformers model: built, saved, found by the auto classes, generated with, trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from swarm_plugins.errors import ConfigError
from swarm_plugins.models import PRMoEConfig, PRMoEForCausalLM, PRMoEForSequenceClassification

ROOT = Path(__file__).parent.parent.parent.parent
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "experts_per_layer": [0, 4, 0, 8],
    "pad_token_id": 0,
}


def small(**settings: Any) -> PRMoEForCausalLM:
    torch.manual_seed(0)
    model = PRMoEForCausalLM(PRMoEConfig(**{**SMALL, "initializer_range": 0.2, **settings}))
    return model.eval()


def perturbed(model: PRMoEForCausalLM) -> PRMoEForCausalLM:
    """Moves biases away from zero, so that a lost one changes the logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(1))


GPT: dict[str, Any] = {
    "mlp_gated": False,
    "hidden_act": "gelu",
    "mlp_bias": True,
    "attention_bias": True,
    "norm": "layer",
    "position_embedding": "learned",
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "settings",
    [{"residual": "sum"}, {"residual": "learned", "mlp_gated": False}, {"residual": None, "mlp_bias": True}, GPT],
    ids=["sum", "learned", "plain", "gpt"],
)
def test_save_load_and_generate(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = perturbed(small(**settings))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is PRMoEForCausalLM
    assert loaded.config.experts_per_layer == [0, 4, 0, 8]
    ids = tokens(2, 7)
    # Not bit for bit: some processors round by where a weight lies in memory.
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-6)
    cached = loaded.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(cached, loaded.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False))


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "swarm_table"])
@pytest.mark.parametrize("settings", [{}, {"num_experts_per_tok": 2}, GPT], ids=["top-1", "top-2", "gpt"])
def test_experts_implementations_agree(implementation: str, settings: dict[str, Any]) -> None:
    model = perturbed(small(**settings))
    ids = tokens(3, 9)
    model.set_experts_implementation("eager")
    expected, expected_gradients = logits_and_gradients(model, ids)
    model.set_experts_implementation(implementation)
    found, gradients = logits_and_gradients(model, ids)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-5)


def logits_and_gradients(model: PRMoEForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    output = model(ids, labels=ids)
    model.zero_grad()
    output.loss.backward()
    # batched_mm of a layer without routed experts has a gradient of zeros, the others none.
    return output.logits.detach(), {name: one.grad.clone() for name, one in model.named_parameters()}


def test_router_learns_from_the_task_at_top_1() -> None:
    model = small(router_aux_loss_coef=0.0).train()
    ids = tokens(2, 16)
    model(ids, labels=ids).loss.backward()
    for layer in (1, 3):
        gradient = model.model.layers[layer].mlp.gate.weight.grad
        assert gradient.norm() > 1e-4


def test_balance_counts_only_while_routers_are_trained() -> None:
    model = small()
    ids = tokens(2, 16)
    assert model(ids, labels=ids).aux_loss is None
    output = model.train()(ids, labels=ids)
    assert output.aux_loss > 1.9, "two layers, each at least about 1"
    plain = model(ids, labels=ids, output_router_logits=False).loss
    torch.testing.assert_close(output.loss, plain + 0.01 * output.aux_loss)
    for layer in (1, 3):
        model.model.layers[layer].mlp.gate.weight.requires_grad_(False)
    assert model(ids, labels=ids).aux_loss is None
    assert get_peft_model(small().train(), LoraConfig(target_modules=["q_proj"]))(ids, labels=ids).aux_loss is None
    adapted = get_peft_model(small().train(), LoraConfig(target_parameters=["gate.weight"], target_modules=[]))
    assert adapted(ids, labels=ids).aux_loss.requires_grad


def test_classifier(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = PRMoEForSequenceClassification(PRMoEConfig(**SMALL, num_labels=3)).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    ids = tokens(2, 7)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


AUTO = """
import sys
{first}
{second}
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained({folder!r})
loaded = "swarm_plugins.models.prmoe.modeling" in sys.modules
print(type(AutoModelForCausalLM.from_config(config)).__name__, loaded)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        ["import swarm_plugins", "from transformers import AutoConfig"],
        ["from transformers import AutoConfig", "import swarm_plugins"],
        # Half an import meets another half in each of them.
        ["from transformers import AutoModelForCausalLM", "import swarm_plugins"],
        ["import transformers.models.llama.modeling_llama", "import swarm_plugins"],
    ],
    ids=str,
)
def test_auto_classes_know_it_whatever_is_imported_first(tmp_path: Path, imports: list[str]) -> None:
    PRMoEConfig(**SMALL).save_pretrained(tmp_path)
    code = AUTO.format(first=imports[0], second=imports[1], folder=str(tmp_path))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["PRMoEForCausalLM", "True"]
    assert "could not be registered" not in result.stderr


def test_the_saved_config_is_complete(tmp_path: Path) -> None:
    PRMoEConfig(**{**SMALL, "experts_per_layer": [4, 8], "moe_layers": [1, 3]}).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["experts_per_layer"] == [0, 4, 0, 8]
    assert not {"base_model_ep_plan", "moe_layers"} & saved.keys()
    assert AutoConfig.from_pretrained(tmp_path).moe_layers == [1, 3]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # The paper's sizes: Tables 1, 4, 5 and 6.
        ("350M", 0.35),
        ("1.3B", 1.3),
        ("6.7B", 6.7),
        ("350M+MoE-128", 13),
        ("1.3B+MoE-128", 52),
        ("350M+PR-MoE-32/64", 4),
        ("1.3B+PR-MoE-64/128", 31),
        ("350M+PR-MoE-32/64+L21", 3.5),
        ("1.3B+PR-MoE-64/128+L21", 27),
        ("2.4B+MoE-128", 107.7),
        ("8B+MoE-128", 349.0),
        ("24B+MoE-128", 1046.9),
        ("47B+MoE-128", 2024.0),
    ],
)
def test_presets_have_the_sizes_of_the_paper(name: str, billions: float) -> None:
    count = num_parameters(PRMoEConfig.preset(name))
    assert count == pytest.approx(billions * 1e9, rel=0.03)
    if name == "350M+PR-MoE-32/64":
        assert count < num_parameters(PRMoEConfig.preset("350M+MoE-128")) / 3


def test_a_pr_moe_is_a_pyramid_and_a_residual_one() -> None:
    plain, residual, pyramid, both = (
        num_parameters(PRMoEConfig.preset(f"350M+{kind}"))
        for kind in ("MoE-32", "Residual-MoE-32", "Pyramid-MoE-32/64", "PR-MoE-32/64")
    )
    assert plain < residual < pyramid
    assert both - pyramid == residual - plain


def num_parameters(config: PRMoEConfig) -> int:
    with torch.device("meta"):
        model = PRMoEForCausalLM(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_preset_takes_other_settings_and_names_the_known_ones() -> None:
    assert PRMoEConfig.preset("350M", vocab_size=100).vocab_size == 100
    with pytest.raises(ConfigError, match=r"unknown preset '350M\+MoE'; known: 350M, 1.3B"):
        PRMoEConfig.preset("350M+MoE")


def test_positions_beyond_the_learned_ones_are_named() -> None:
    with pytest.raises(ConfigError, match="position 32 is beyond the 32 learned ones"):
        small(**GPT)(tokens(1, 33))
