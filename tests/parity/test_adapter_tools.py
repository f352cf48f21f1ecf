"""PEFT's tools around adapters, and other ways to put adapters on a model, do on remote blocks what they do locally."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapter_cases import IDS, LABELS, MASK, TOLERANCE, attention_of, fill, lora, step, trained, tuned, worst_error
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, TaskType, get_peft_model
from peft.helpers import rescale_adapter_scale
from peft.utils.hotswap import hotswap_adapter
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from swarm_plugins.backbone import AutoSwarmModelForSequenceClassification
from swarm_plugins.errors import SwarmError

few_families = pytest.mark.parametrize("pair", ["llama", "mixtral"], indirect=True)
llama_only = pytest.mark.parametrize("pair", ["llama"], indirect=True)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    """The logits of the standard batch."""
    return model(input_ids=IDS, attention_mask=MASK).logits


def with_two(base: nn.Module, family: str) -> PeftModel:
    model = tuned(base, lora(family))
    model.add_adapter("second", lora(family))
    model.set_adapter("second")
    fill(model, seed=3)
    return model


@few_families
@pytest.mark.parametrize("combination", ["linear", "svd", "cat", "ties"])
def test_weighted_sum_of_adapters(pair, combination: str) -> None:
    found = []
    for base in (pair.load_local(), pair.load_remote()):
        model = with_two(base, pair.family)
        model.add_weighted_adapter(["default", "second"], [0.3, 0.7], "sum", combination_type=combination, density=0.5)
        model.set_adapter("sum")
        found.append(logits(model))
    torch.testing.assert_close(found[1], found[0], atol=TOLERANCE, rtol=TOLERANCE)


@few_families
def test_rescaling_for_a_while(pair) -> None:
    local, remote = (tuned(base, lora(pair.family)) for base in (pair.load_local(), pair.load_remote()))
    before = logits(remote)
    with rescale_adapter_scale(local, 0.5), rescale_adapter_scale(remote, 0.5):
        assert torch.equal(logits(remote), logits(local))
        assert not torch.equal(logits(remote), before)
    assert torch.equal(logits(remote), before)


@few_families
def test_weights_exchanged_in_place(pair, tmp_path: Path) -> None:
    model = tuned(pair.load_remote(), lora(pair.family))
    model.save_pretrained(tmp_path)
    before = logits(model)
    fill(model, seed=9)
    assert not torch.equal(logits(model), before)
    hotswap_adapter(model, tmp_path, "default")
    assert torch.equal(logits(model), before)


def by_transformers(base: nn.Module, path: Path) -> nn.Module:
    """Without any class of PEFT around the model."""
    base.load_adapter(str(path))
    return base


LOADERS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "peft": PeftModel.from_pretrained,
    "peft-empty-first": lambda base, path: PeftModel.from_pretrained(base, path, low_cpu_mem_usage=True),
    "peft-trainable": lambda base, path: PeftModel.from_pretrained(base, path, is_trainable=True).eval(),
    "transformers": by_transformers,
}


@few_families
@pytest.mark.parametrize("loader", LOADERS)
def test_every_way_to_load(pair, loader: str, tmp_path: Path) -> None:
    model = tuned(pair.load_remote(), lora(pair.family))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(LOADERS[loader](pair.load_remote(), tmp_path)), logits(model))


@llama_only
def test_a_copy_has_adapters_of_its_own(pair) -> None:
    model = tuned(pair.load_remote(), lora(pair.family))
    before = logits(model)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), before)
    fill(twin, seed=4)
    assert not torch.equal(logits(twin), before)
    assert torch.equal(logits(model), before)


@few_families
@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time:UserWarning")
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
def test_two_kinds_on_one_layer(pair) -> None:
    results = []
    for base in (pair.load_local(), pair.load_remote()):
        inner = tuned(base, lora(pair.family)).get_base_model()
        model = get_peft_model(inner, IA3Config(target_modules=["q_proj", "k_proj"], feedforward_modules=[]))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name or "ia3_" in name)
        fill(model)
        results.append(step(model.eval()))
    assert {name.rpartition(".default")[0][-6:] for name in results[1][1]} >= {".ia3_l", "lora_A", "lora_B"}
    assert results[1][0] == results[0][0]
    assert worst_error(results[1][1], results[0][1]) == 0


@few_families
def test_sequence_classification(pair) -> None:
    config = lora(pair.family, task_type=TaskType.SEQ_CLS)
    # As blocks of a server on a CPU: their gradients have these bits.
    local = AutoModelForSequenceClassification.from_pretrained(
        pair.directory, num_labels=3, experts_implementation="swarm_table"
    )
    remote = AutoSwarmModelForSequenceClassification.from_pretrained(
        pair.directory, connection=pair.swarm.connection, num_labels=3
    )
    results = []
    for base in (local, remote):
        model = tuned(base, config)
        assert any("score" in name for name in trained(model))
        results.append(step(model, labels=torch.tensor([2, 0])))
    assert results[1][0] == results[0][0]
    assert worst_error(results[1][1], results[0][1]) == 0


@few_families
def test_mixed_precision_on_the_client(pair) -> None:
    local, remote = (tuned(base, lora(pair.family)) for base in (pair.load_local(), pair.load_remote()))
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = step(local)
        remote_loss, gradients = step(remote)
    # The local blocks round to bfloat16 (8 bits), the servers of this pair compute in float32.
    assert remote_loss == pytest.approx(loss, rel=0.02)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}


@pytest.mark.parametrize("pair", ["deepseek_v3"], indirect=True)
def test_a_prefix_that_does_not_fit_is_refused_at_once(pair) -> None:
    model = get_peft_model(pair.load_remote(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(SwarmError, match=r"prefix of block 0 .* use prompt tuning or LoRA"):
        model(input_ids=IDS, labels=LABELS)
    with pytest.raises(SwarmError, match=r"prefix of block 0 .* use prompt tuning or LoRA"):
        model.generate(input_ids=IDS, max_new_tokens=3)
    # The refusal was no failure of the servers: they go on serving.
    assert torch.equal(pair.remote(IDS).logits, pair.local(IDS).logits)


@few_families
def test_rank_and_scale_by_pattern(pair) -> None:
    targets = attention_of(pair.family)
    config = LoraConfig(
        r=4, target_modules=targets, rank_pattern={targets[0]: 2}, alpha_pattern={targets[1]: 32}, task_type="CAUSAL_LM"
    )
    local, remote = (tuned(base, config) for base in (pair.load_local(), pair.load_remote()))
    loss, gradients = step(local)
    remote_loss, remote_gradients = step(remote)
    assert remote_loss == loss
    assert worst_error(remote_gradients, gradients) == 0
