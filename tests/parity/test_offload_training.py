"""Gradients through offloaded experts against the same model in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_models import Toys, tokens
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins import OffloadConfig, SwarmError, load_offloaded
from swarm_plugins.errors import UnsupportedError

FEW_BYTES = 60_000
# Sums in another order, float32.
RELATIVE = 1e-5
FAMILIES = ("mixtral", "gpt_oss", "nemotron_h", "aria_text", "qwen3_moe", "granitemoe", "prmoe", "prmoe_gpt")


def attention_lora(family: str) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def experts_lora(family: str) -> LoraConfig:
    first = "experts.up_proj" if family == "nemotron_h" else "experts.gate_up_proj"
    return LoraConfig(r=4, target_modules=[], target_parameters=[first, "experts.down_proj"], use_rslora=True)


def prompts(family: str) -> PromptTuningConfig:
    return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)


def adapted(model: PreTrainedModel, config: object) -> PeftModel:
    """Returns a model with an adapter that is not zero, the same for the same seed."""
    torch.manual_seed(0)
    tuned = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if parameter.requires_grad and "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return tuned


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert expected
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (found[name] - gradient).norm() <= RELATIVE * gradient.norm(), name


def pair(toys: Toys, family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Returns a toy in memory and offloaded."""
    local = AutoModelForCausalLM.from_pretrained(toys(family))
    return local, load_offloaded(toys(family), OffloadConfig(fast_bytes=FEW_BYTES), device="cpu")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granitemoe", "prmoe"])
def test_an_adapter_beside_the_experts_gets_the_very_gradients_of_the_table(toys: Toys, family: str) -> None:
    """A run goes on, in another place, in the same bits: where experts lie as the weights of linear layers do."""
    table = AutoModelForCausalLM.from_pretrained(toys(family), experts_implementation="swarm_table")
    there = load_offloaded(toys(family), OffloadConfig(fast_bytes=FEW_BYTES), device="cpu")
    found, expected = (gradients(adapted(one, attention_lora(family)), tokens(2, 9)) for one in (there, table))
    assert found.keys() == expected.keys()
    assert {name for name, gradient in expected.items() if not torch.equal(found[name], gradient)} == set()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapter", [attention_lora, experts_lora, prompts])
def test_adapters_get_the_gradients_of_the_plain_model(
    toys: Toys, family: str, adapter: Callable[[str], object]
) -> None:
    local, few = (adapted(model, adapter(family)).train() for model in pair(toys, family))
    assert_close(gradients(few, tokens()), gradients(local, tokens()))


def test_router_and_embedding_get_the_gradients_of_the_plain_model(toys: Toys) -> None:
    local, few = pair(toys, "mixtral")
    plain = {name: one for name, one in gradients(local, tokens()).items() if ".experts." not in name}
    assert any("gate" in name for name in plain)
    assert_close(gradients(few, tokens()), plain)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(toys: Toys, use_reentrant: bool) -> None:
    local, few = (adapted(model, experts_lora("mixtral")).train() for model in pair(toys, "mixtral"))
    few.enable_input_require_grads()
    few.base_model.model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_close(gradients(few, tokens()), gradients(local, tokens()))


def test_a_backward_pass_inside_autocast_changes_no_gradient(toys: Toys) -> None:
    # Of the experts alone: all else is rounded to bfloat16 in there, and each model has its own backward.
    _, few = pair(toys, "mixtral")
    experts: Any = few.get_submodule("model.layers.0.mlp.experts")
    torch.manual_seed(0)
    hidden = torch.randn(4, 32, requires_grad=True)
    weights, index = torch.rand(4, 6).topk(2)
    outside = torch.autograd.grad(experts(hidden, index, weights).square().sum(), hidden)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(experts(hidden, index, weights).square().sum(), hidden)[0]
    assert torch.equal(inside, outside)


def test_an_adapter_trained_here_is_an_ordinary_one(toys: Toys, tmp_path: Path) -> None:
    local, few = pair(toys, "mixtral")
    tuned = adapted(few, experts_lora("mixtral"))
    optimizer = torch.optim.SGD([one for one in tuned.parameters() if one.requires_grad], lr=0.1)
    gradients(tuned.train(), tokens())
    optimizer.step()
    tuned.save_pretrained(tmp_path)
    plain = PeftModel.from_pretrained(local, tmp_path).eval()
    with torch.no_grad():
        found, expected = tuned.eval()(tokens()).logits, plain(tokens()).logits
        with tuned.disable_adapter(), plain.disable_adapter():
            assert (tuned(tokens()).logits - plain(tokens()).logits).abs().max() < 1e-5
    assert (found - expected).abs().max() < 1e-5
    # A single token takes another way through the experts.
    first = tokens(1, 4)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(first)}
    assert torch.equal(tuned.generate(first, **options), plain.generate(first, **options))


def test_two_adapters_at_once_add_up(toys: Toys) -> None:
    models = []
    for model in pair(toys, "mixtral"):
        tuned = adapted(model, experts_lora("mixtral"))
        torch.manual_seed(1)
        tuned.add_adapter("second", experts_lora("mixtral"))
        tuned.base_model.set_adapter(["default", "second"])
        models.append(tuned.train())
    local, few = models
    with torch.no_grad():
        assert (few(tokens()).logits - local(tokens()).logits).abs().max() < 1e-5


def test_prefix_tuning_generates_the_same(toys: Toys) -> None:
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    local, few = (adapted(model, config).train() for model in pair(toys, "mixtral"))
    assert_close(gradients(few, tokens()), gradients(local, tokens()))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "orthogonal"])
def test_initialisations_that_read_weights_are_refused_with_the_cure(toys: Toys, init: str) -> None:
    _, few = pair(toys, "mixtral")
    config = LoraConfig(target_modules=[], target_parameters=["experts.down_proj"], init_lora_weights=init)
    with pytest.raises((AttributeError, SwarmError), match="init_lora_weights=True"):
        get_peft_model(few, config)


def test_training_the_experts_themselves_is_refused_with_the_cure(toys: Toys) -> None:
    _, few = pair(toys, "mixtral")
    few.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"freeze it.*target_parameters=\['experts"):
        few(tokens())


def test_merging_is_refused_with_the_cure(toys: Toys) -> None:
    _, few = pair(toys, "mixtral")
    with pytest.raises(UnsupportedError, match="keep the adapter apart"):
        get_peft_model(few, experts_lora("mixtral")).merge_and_unload()


def test_an_adapter_on_a_bias_of_experts_is_refused_with_the_cure(toys: Toys) -> None:
    _, few = pair(toys, "gpt_oss")
    tuned = get_peft_model(few, LoraConfig(target_modules=[], target_parameters=["experts.down_proj_bias"]))
    with pytest.raises(UnsupportedError, match=r"ParamWrapper on 'down_proj_bias' cannot work.*gate_up_proj"):
        tuned(tokens())


def test_experts_to_be_trained_as_a_whole_are_refused_with_the_cure(toys: Toys) -> None:
    _, few = pair(toys, "mixtral")
    tuned = get_peft_model(few, LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"]))
    with pytest.raises(UnsupportedError, match="freeze it"):
        tuned(tokens())


def test_adapters_on_the_router_and_on_experts_in_few_bits_train(toys: Toys) -> None:
    few = load_offloaded(toys("mixtral"), OffloadConfig(fast_bytes=FEW_BYTES, expert_bits=8), device="cpu")
    config = LoraConfig(target_modules=[], target_parameters=["experts.down_proj", "gate.weight"])
    found = gradients(adapted(few, config).train(), tokens())
    assert len(found) == 2 * 2 * 3
    assert all(one.isfinite().all() and one.norm() > 0 for one in found.values())


@pytest.mark.parametrize("bits", [None, 16, 8])
def test_memory_that_was_taken_in_inference_mode_serves_training_too(toys: Toys, bits: int | None) -> None:
    # Lightning validates in inference mode before the first step.
    config = OffloadConfig(fast_bytes=1 << 30, expert_bits=bits)
    models = [load_offloaded(toys("mixtral"), config, device="cpu") for _ in range(2)]
    local, few = (adapted(model, experts_lora("mixtral")) for model in models)
    with torch.inference_mode():
        few.eval()(tokens())
    assert_close(gradients(few.train(), tokens()), gradients(local.train(), tokens()))
    with torch.inference_mode():
        assert torch.equal(few.eval()(tokens()).logits, few(tokens()).logits)


TIMEOUT_S = 30.0


def test_overlapping_calls_leave_no_adapter_behind(toys: Toys) -> None:
    """Adapters when threads share a model: each call has its own, and leaves none behind."""
    few = load_offloaded(toys("mixtral"), OffloadConfig(fast_bytes=1 << 30), device="cpu")
    tuned = adapted(few, experts_lora("mixtral")).eval()

    @torch.no_grad()
    def logits() -> Tensor:
        found: Tensor = tuned(tokens()).logits
        return found

    with tuned.disable_adapter():
        bare = logits()
    expected = logits()
    wrapper: Any = tuned.get_submodule("base_model.model.model.layers.1.mlp.experts")
    meeting = threading.Barrier(2)
    # Two calls are in the same experts at once, and the one that came first is the first to leave.
    first_left = threading.Event()

    def meet(module: object, arguments: object, output: object) -> None:
        if meeting.wait(TIMEOUT_S) == 1:
            assert first_left.wait(TIMEOUT_S)

    hook = wrapper.get_base_layer().register_forward_hook(meet)

    def call() -> Tensor:
        try:
            return logits()
        finally:
            first_left.set()

    with ThreadPoolExecutor(2) as threads:
        found = [one.result(2 * TIMEOUT_S) for one in [threads.submit(call) for _ in range(2)]]
    hook.remove()
    assert all(torch.equal(one, expected) for one in found)
    assert torch.equal(logits(), expected)
    with tuned.disable_adapter():
        assert torch.equal(logits(), bare)
