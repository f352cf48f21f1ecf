"""PR-MoE at its edges: settings that do not fit, empty and lopsided batches, capacity, what a decoding step touches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig

from swarm_plugins.errors import ConfigError, NumericError
from swarm_plugins.models import PRMoEConfig, PRMoEForCausalLM
from swarm_plugins.moe.losses import load_balancing_loss

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "experts_per_layer": [0, 4, 0, 8],
    "initializer_range": 0.2,
}
IDS = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(1))
IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm", "swarm_table"]


def small(**settings: Any) -> PRMoEForCausalLM:
    torch.manual_seed(0)
    return PRMoEForCausalLM(PRMoEConfig(**{**SMALL, **settings})).eval()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"experts_per_layer": 8}, [0, 8, 0, 8]),
        ({"experts_per_layer": 8, "moe_layers": [2, 3]}, [0, 0, 8, 8]),
        ({"experts_per_layer": [4, 8], "moe_layers": [1, 3]}, [0, 4, 0, 8]),
        ({"experts_per_layer": [4, 0, 0, 8], "moe_layers": [0, 3]}, [4, 0, 0, 8]),
        ({"experts_per_layer": [0, 0, 0, 0]}, [0, 0, 0, 0]),
    ],
)
def test_short_forms_become_the_full_list(settings: dict[str, Any], expected: list[int]) -> None:
    config = PRMoEConfig(**{**SMALL, **settings})
    assert config.experts_per_layer == expected
    assert config.moe_layers == [layer for layer, count in enumerate(expected) if count]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"experts_per_layer": [4, 8]}, "2 entries for 4 layers: give one per layer, 0 for a dense one"),
        ({"experts_per_layer": [4, 8, 8], "moe_layers": [1, 3]}, "3 entries for 4 layers"),
        ({"moe_layers": [1, 2]}, r"moe_layers \[1, 2\] contradicts .* layers \[1, 3\]"),
        ({"experts_per_layer": 4, "moe_layers": [1, 4]}, r"moe_layers \[1, 4\]: expected different indices below 4"),
        ({"experts_per_layer": 4, "moe_layers": [1, 1]}, r"moe_layers \[1, 1\]: expected different"),
        ({"experts_per_layer": [0, -4, 0, 8]}, "at least 0, got -4"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 is above the 4 experts of layer 1"),
        ({"num_experts_per_tok": 0}, "invalid num_experts_per_tok 0"),
        ({"capacity_factor": 0.0}, "invalid capacity_factor 0.0"),
        ({"capacity_factor": -1}, "invalid capacity_factor -1"),
        ({"capacity_factor": float("nan")}, "invalid capacity_factor nan"),
        ({"min_capacity": -1}, "invalid min_capacity -1"),
        ({"router_jitter_noise": 1.0}, "invalid router_jitter_noise 1.0"),
        ({"experts_per_layer": []}, "0 entries for 4 layers"),
        ({"experts_per_layer": 4, "moe_layers": []}, r"no layer to go to \(moe_layers \[\], 4 layers\)"),
        ({"experts_per_layer": 4, "num_hidden_layers": 1}, r"no layer to go to \(moe_layers None, 1 layers\)"),
        ({"router_aux_loss_coef": float("nan")}, "invalid router_aux_loss_coef nan"),
        ({"router_aux_loss_coef": -0.1}, "invalid router_aux_loss_coef -0.1"),
        ({"moe_intermediate_size": 0}, "invalid moe_intermediate_size 0: expected at least 1"),
        ({"num_attention_heads": 0}, "invalid num_attention_heads 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PRMoEConfig(**{**SMALL, **settings})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("experts_per_layer", "8"),
        ("experts_per_layer", [0, "4", 0, 8]),
        ("experts_per_layer", True),
        ("moe_layers", [1.0]),
        ("num_experts_per_tok", 1.5),
        ("capacity_factor", "1.0"),
        ("residual", "max"),
        ("norm", "batch"),
    ],
)
def test_settings_of_another_type_are_named_as_transformers_names_them(setting: str, value: object) -> None:
    with pytest.raises(StrictDataclassFieldValidationError, match=rf"'{setting}'(.|\n)*{re.escape(str(value))}"):
        PRMoEConfig(**{**SMALL, setting: value})


def test_a_list_that_no_longer_fits_is_named_by_the_model() -> None:
    config = PRMoEConfig(**SMALL)
    config.num_hidden_layers = 5
    with pytest.raises(ConfigError, match=r"experts_per_layer \[0, 4, 0, 8\] does not fit 5 layers"):
        PRMoEForCausalLM(config)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"experts_per_layer": [4]}, "experts_per_layer has 1 entries for 4 layers: give one per layer"),
        ({"moe_layers": [1, 2]}, r"moe_layers \[1, 2\] contradicts experts_per_layer \[0, 4, 0, 8\]"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 is above the 4 experts of layer 1"),
    ],
)
def test_settings_changed_at_loading_are_checked_too(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    small().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=says):
        PRMoEForCausalLM.from_pretrained(tmp_path, **changed)


def test_experts_given_at_loading_count(tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    config = PRMoEForCausalLM.from_pretrained(tmp_path, experts_per_layer=[4, 8], moe_layers=[1, 3]).config
    assert (config.experts_per_layer, config.moe_layers) == ([0, 4, 0, 8], [1, 3])
    config = AutoConfig.from_pretrained(tmp_path, experts_per_layer=2, moe_layers=[0])
    assert (config.experts_per_layer, config.moe_layers) == ([2, 0, 0, 0], [0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("factor", [None, 1.0])
def test_a_layer_without_tokens_returns_none(implementation: str, factor: float | None) -> None:
    model = small(capacity_factor=factor)
    model.set_experts_implementation(implementation)
    assert model.model.layers[1].mlp(torch.zeros(0, 16, 32)).shape == (0, 16, 32)


def test_an_empty_batch_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the batch is empty \(shape \[0, 16\]\): give at least one token"):
        small()(IDS[:0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_all_tokens_on_one_expert_compute_that_expert(implementation: str) -> None:
    model = small()
    model.set_experts_implementation(implementation)
    block = model.model.layers[3].mlp
    hidden = torch.rand(1, 6, 32) + 0.1
    with torch.no_grad():
        block.gate.weight.zero_()
        block.gate.weight[5] = 1.0
        weights = (hidden @ block.gate.weight.T).softmax(-1)[..., 5:6]
        gate, up = (hidden @ block.experts.gate_up_proj[5].T).chunk(2, dim=-1)
        alone = (torch.nn.functional.silu(gate) * up) @ block.experts.down_proj[5].T
        expected = alone * weights + block.residual_mlp(hidden)
        torch.testing.assert_close(block(hidden), expected)


def test_evaluation_is_deterministic() -> None:
    model = small(capacity_factor=1.0)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, model(IDS).logits)


def test_tokens_beyond_the_capacity_keep_the_residual_branch() -> None:
    model = small(capacity_factor=0.5)
    block = model.model.layers[1].mlp
    hidden = torch.randn(1, 16, 32)
    with torch.no_grad():
        found, dense = block(hidden), block.residual_mlp(hidden)
        _, weights, index = block.gate(hidden)
        whole = small().model.layers[1].mlp(hidden)
    dropped = weights[:, 0] == 0
    # Two of sixteen tokens have room at each of four experts.
    assert int((~dropped).sum()) == sum(min(2, int((index == expert).sum())) for expert in range(4))
    assert torch.equal(found[0][dropped], dense[0][dropped])
    torch.testing.assert_close(found[0][~dropped], whole[0][~dropped])


@pytest.fixture
def unwritten_memory() -> Iterator[None]:
    """Memory that nobody wrote is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_implementation_leaves_out_what_is_dropped(implementation: str) -> None:
    model, hidden = small(capacity_factor=0.5, num_experts_per_tok=2), torch.randn(1, 16, 32)
    with torch.no_grad():
        wanted = model.model.layers[1].mlp(hidden)
        model.set_experts_implementation(implementation)
        torch.testing.assert_close(model.model.layers[1].mlp(hidden), wanted)


@pytest.mark.parametrize("implementation", [one for one in IMPLEMENTATIONS if one != "batched_mm"])
def test_what_is_dropped_is_not_computed(implementation: str) -> None:
    model = small(capacity_factor=0.5, num_experts_per_tok=2)
    model.set_experts_implementation(implementation)
    block, dropless = model.model.layers[1].mlp, small(num_experts_per_tok=2).model.layers[1].mlp
    hidden = torch.randn(1, 16, 32)
    with torch.no_grad():
        _, weights, index = block.gate(hidden)
        _, all_weights, all_index = dropless.gate(hidden)
        is_dropped = index == block.gate.num_experts
        assert is_dropped.any()
        assert torch.equal(index[~is_dropped], all_index[~is_dropped])
        wanted = dropless.experts(hidden[0], all_index, all_weights.masked_fill(is_dropped, 0.0))
        torch.testing.assert_close(block.experts(hidden[0], index, weights), wanted)
        # Rows that are computed cannot hide numbers that are none.
        block.experts.down_proj.data[:] = float("nan")
        found = block.experts(hidden[0], index, weights)
    assert torch.equal(found.isnan().all(dim=1), ~is_dropped.all(dim=1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("more", [{}, {"mlp_bias": True}], ids=["plain", "biases"])
def test_memory_that_nobody_wrote_changes_nothing(
    implementation: str, more: dict[str, Any], unwritten_memory: None
) -> None:
    block = small(capacity_factor=0.5, num_experts_per_tok=2, **more).model.layers[1].mlp
    block.config._experts_implementation = implementation
    hidden = torch.randn(1, 16, 32, requires_grad=True)
    output = block(hidden)
    output.square().sum().backward()
    grads = [hidden.grad, *(parameter.grad for parameter in block.parameters())]
    assert all(one is not None and one.isfinite().all() for one in [output, *grads])


def test_only_training_is_random() -> None:
    model = small(capacity_factor=0.5, random_token_selection=True, router_jitter_noise=0.1)
    router, hidden = model.model.layers[1].mlp.gate, torch.randn(1, 16, 32)
    with torch.no_grad():
        assert all(one.equal(other) for one, other in zip(router(hidden), router(hidden), strict=True))
        router.train()
        logits, weights, _ = router(hidden)
        again = router(hidden)
    assert not logits.equal(again[0])
    assert not (weights == 0).equal(again[1] == 0)
    torch.testing.assert_close(logits, again[0], rtol=0.5, atol=0.5)


def test_one_token_touches_only_the_chosen_experts() -> None:
    model = small(num_experts_per_tok=2)
    block = model.model.layers[3].mlp
    hidden = torch.randn(1, 1, 32)
    for implementation in ("eager", "batched_mm", "swarm_table"):
        model.set_experts_implementation(implementation)
        with torch.no_grad():
            expected = block(hidden)
            chosen = block.gate(hidden)[2].flatten().tolist()
            saved = block.experts.gate_up_proj.clone()
            # Any use of the others would show.
            block.experts.gate_up_proj[[expert for expert in range(8) if expert not in chosen]] = float("nan")
            assert torch.equal(block(hidden), expected), implementation
            block.experts.gate_up_proj.copy_(saved)


def test_a_router_without_numbers_is_named() -> None:
    model = small()
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight[0, 0] = float("nan")
    with pytest.raises(NumericError, match="router logits of 32 of 32 tokens are NaN"):
        model(IDS)


def test_balance_is_the_sum_over_layers_and_leaves_padding_out() -> None:
    model = small()
    mask = torch.ones_like(IDS)
    mask[1, 10:] = 0
    with torch.no_grad():
        output = model(IDS, attention_mask=mask, output_router_logits=True)
    assert [tuple(one.shape) for one in output.router_logits] == [(32, 4), (32, 8)]
    with torch.no_grad():
        first = model(IDS[:1], output_router_logits=True).router_logits
        second = model(IDS[1:, :10], output_router_logits=True).router_logits
    expected = 0.0
    for one, two in zip(first, second, strict=True):
        probabilities = torch.cat([one, two]).softmax(-1)
        share = torch.nn.functional.one_hot(probabilities.argmax(-1), probabilities.shape[1]).float().mean(0)
        expected += float((share * probabilities.mean(0)).sum() * probabilities.shape[1])
    assert float(output.aux_loss) == pytest.approx(expected, rel=1e-4)


def test_balance_of_a_step_with_a_cache_is_about_its_own_tokens() -> None:
    model = small(output_router_logits=True)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    first = model(IDS[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
    positions = mask.sum(dim=1, keepdim=True) - 1
    last = model(IDS[:, -1:], attention_mask=mask, position_ids=positions, past_key_values=first.past_key_values)
    expected = sum(load_balancing_loss(one, 1) for one in last.router_logits)
    torch.testing.assert_close(last.aux_loss, expected)


def test_accumulated_batches_balance_once() -> None:
    model = small(router_aux_loss_coef=1.0).train()
    labels = IDS.clone()
    labels[0, :8] = -100
    num_items = (labels[:, 1:] != -100).sum()
    outputs = [model(IDS[[row]], labels=labels[[row]], num_items_in_batch=num_items) for row in range(2)]
    shares = [8 / 23, 15 / 23]
    text = [model(IDS[[row]], labels=labels[[row]], output_router_logits=False).loss for row in range(2)]
    expected = sum(share * (loss + one.aux_loss) for share, loss, one in zip(shares, text, outputs, strict=True))
    torch.testing.assert_close(outputs[0].loss + outputs[1].loss, expected)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradient_checkpointing_that_would_teach_routers_nothing_is_refused() -> None:
    model = small().train()
    model.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ConfigError, match="load-balancing loss has no gradient: gradient checkpointing with use_re"):
        model(IDS, labels=IDS)
    with torch.no_grad():
        assert model(IDS, labels=IDS).aux_loss > 0


def test_gradient_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for is_checkpointed in (False, True):
        model = small().train()
        if is_checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model(IDS, labels=IDS, output_router_logits=False).loss.backward()
        gradients.append({name: one.grad for name, one in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)
