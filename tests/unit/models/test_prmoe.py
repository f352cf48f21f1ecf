"""PR-MoE as a transformers model: built, saved, found by the auto classes, generated with, trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

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


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("residual", ["sum", "learned", None])
@pytest.mark.parametrize("mlp_gated", [True, False])
def test_save_load_and_generate(tmp_path: Path, residual: str | None, mlp_gated: bool) -> None:
    model = small(residual=residual, mlp_gated=mlp_gated)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is PRMoEForCausalLM
    assert loaded.config.experts_per_layer == [0, 4, 0, 8]
    ids = tokens(2, 7)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)
    cached = loaded.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(cached, loaded.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False))


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("mlp_gated", [True, False])
def test_experts_implementations_agree(implementation: str, mlp_gated: bool) -> None:
    model = small(num_experts_per_tok=2, mlp_gated=mlp_gated)
    ids = tokens(3, 9)
    model.set_experts_implementation("eager")
    expected = model(ids).logits
    model.set_experts_implementation(implementation)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize(
    "imports",
    [
        ["import swarm_plugins", "from transformers import AutoConfig"],
        ["from transformers import AutoConfig", "import swarm_plugins"],
        ["from transformers import AutoModelForCausalLM", "import swarm_plugins"],
        ["import transformers.models.llama.modeling_llama", "import swarm_plugins"],
    ],
    ids=" then ".join,
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
    assert "base_model_ep_plan" not in saved
    assert AutoConfig.from_pretrained(tmp_path).moe_layers == [1, 3]
