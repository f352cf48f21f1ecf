"""Upcycled models: the dense model's function where the scheme promises it, and what cannot be upcycled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.models import upcycle
from swarm_plugins.testing.models import tiny_model

IDS = torch.randint(4, 100, (2, 12), generator=torch.Generator().manual_seed(0))


def dense(model_type: str = "llama", **settings: Any) -> PreTrainedModel:
    sizes = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**sizes, **settings})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


@torch.no_grad()
def difference(first: PreTrainedModel, second: PreTrainedModel) -> float:
    return float((first(IDS).logits - second(IDS).logits).abs().max())


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {}),
        ("llama", {"mlp_bias": True, "attention_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
    ],
    ids=["llama", "biases", "tied", "rope", "mistral", "qwen2"],
)
@pytest.mark.parametrize(
    "scheme",
    [
        {"residual": "sum"},
        {"residual": "sum", "num_experts_per_tok": 2, "noise": 0.1},
        {"residual": "learned", "noise": 0.1},
        {"residual": None, "num_experts_per_tok": 2},
    ],
    ids=["sum", "sum top-2", "learned", "plain top-2"],
)
def test_the_dense_model_is_where_it_starts(model_type: str, settings: dict[str, Any], scheme: dict[str, Any]) -> None:
    source = dense(model_type, **settings)
    model = upcycle(source, [0, 4, 6], **scheme)
    assert model.config.experts_per_layer == [0, 4, 6]
    # The same sums in another order.
    assert difference(model, source) < 1e-5


def test_plain_top_1_starts_near_the_dense_model() -> None:
    source = dense()
    model = upcycle(source, 4, residual=None)
    assert model.config.experts_per_layer == [0, 4, 0]
    spread = float(source(IDS).logits.detach().std())
    assert 1e-6 < difference(model, source) < 0.1 * spread


@pytest.mark.parametrize("residual", ["sum", "learned"])
def test_experts_and_routers_learn_from_the_start(residual: Any) -> None:
    model = upcycle(dense(), 4, residual=residual).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = model.model.layers[1].mlp.gate.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    experts = model.model.layers[1].mlp.experts.down_proj
    assert experts.abs().amax() > 0
    assert not torch.equal(model.model.layers[1].mlp.gate.weight, before)


def test_the_dense_model_stays_as_it_is_and_a_seed_decides_the_routers() -> None:
    source = dense()
    saved = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    first, second, third = (upcycle(source, 4, seed=seed, noise=0.1) for seed in (0, 0, 1))
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, saved[name])
    again = upcycle(source, 4, seed=0, noise=0.1)
    name = "model.layers.1.mlp.gate.weight"
    assert torch.equal(second.state_dict()[name], again.state_dict()[name])
    assert not torch.equal(second.state_dict()[name], third.state_dict()[name])


def test_dtype_is_kept() -> None:
    assert upcycle(dense().bfloat16(), 4).dtype == torch.bfloat16


def test_it_generates_with_the_dense_models_settings() -> None:
    source = dense()
    source.generation_config.eos_token_id = [2, 7]
    model = upcycle(source, 4)
    assert model.generation_config.eos_token_id == [2, 7]
    assert model.generation_config is not source.generation_config


def adapted() -> PreTrainedModel:
    model = dense()
    model.add_adapter(LoraConfig(target_modules=["down_proj"]))
    return model


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: upcycle(tiny_model("mixtral"), 4), UnsupportedError, r"model_type 'mixtral'.*llama, mistral, qwen2"),
        (lambda: upcycle(dense("mistral", sliding_window=8), 4), UnsupportedError, "sliding_window 8 below its 64"),
        (lambda: upcycle(dense(), [4, 4]), ConfigError, "2 entries for 3 layers"),
        (lambda: upcycle(dense(), 4, noise=-1.0), ConfigError, "invalid noise -1.0"),
        (lambda: upcycle("llama", 4), UnsupportedError, r"cannot upcycle str \(model_type None\)"),
        (lambda: upcycle(dense(), 4, noise=float("nan")), ConfigError, "invalid noise nan"),
        (lambda: upcycle(dense(), 4, num_experts_per_tok=5), ConfigError, "5 is above the 4 experts of layer 1"),
        (lambda: upcycle(dense(), 4, moe_layers=[3]), ConfigError, r"moe_layers \[3\]: expected .* below 3"),
        (lambda: upcycle(dense(), 4, capacty_factor=1.0), ConfigError, "unknown setting 'capacty_factor'"),
        (lambda: upcycle(dense(), 4, num_hidden_layers=5), ConfigError, "num_hidden_layers=5 cannot be chosen"),
        (lambda: upcycle(adapted(), 4), UnsupportedError, "weights are not where .* merge adapters"),
        (lambda: upcycle(get_peft_model(dense(), LoraConfig()), 4), UnsupportedError, r"PeftModel .*merge_and_unload"),
        (lambda: upcycle(dense().to("meta"), 4), UnsupportedError, "load it whole"),
        (lambda: upcycle(dense(), 4, moe_intermediate_size=8), ConfigError, "8 differs .* 48"),
    ],
)
def test_what_cannot_be_upcycled_is_named(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()
