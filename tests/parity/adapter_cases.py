"""PEFT's methods, each as a config for a family, and the same tuned model locally and remotely."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import Tensor, nn

FAMILIES = ("llama", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "prmoe")
MOE = FAMILIES[1:]
WITH_DENSE_MLP = ("llama", "qwen2_moe", "deepseek_v3", "prmoe")
WITH_ROUTER_LOSS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "prmoe")
# Multi-head latent attention caches latents, to which PEFT's prefix of keys and values does not fit, locally either.
WITH_PREFIX = tuple(family for family in FAMILIES if family != "deepseek_v3")

IDS = torch.tensor([[5, 17, 99, 23, 64, 9, 88, 41], [31, 64, 9, 88, 12, 101, 7, 55]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
# Sums in another order differ by up to 2e-5 of the largest element, as the processor has it; a wrong factor by 1e-2.
TOLERANCE = 1e-4
LABELS = IDS.masked_fill(MASK == 0, -100)


def attention_of(family: str) -> list[str]:
    """Two projections of the family's attention."""
    return ["q_b_proj", "kv_b_proj"] if family == "deepseek_v3" else ["q_proj", "v_proj"]


def router_of(family: str) -> str:
    """The router's weight, a bare parameter."""
    return "router.weight" if family == "gpt_oss" else "gate.weight"


def lora(family: str, **changes: Any) -> LoraConfig:
    """LoRA on attention, with changes."""
    return LoraConfig(**{"r": 4, "target_modules": attention_of(family), "task_type": "CAUSAL_LM", **changes})


def prompt(kind: type[PeftConfig], **settings: Any) -> Callable[[str], PeftConfig]:
    """A method of prompt learning."""
    return lambda _: kind(task_type="CAUSAL_LM", num_virtual_tokens=3, **settings)


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
METHODS: dict[str, tuple[Callable[[str], PeftConfig], tuple[str, ...]]] = {
    "lora": (lora, FAMILIES),
    "lora-default-targets": (lambda f: lora(f, target_modules=None), FAMILIES),
    "lora-all-linear": (lambda f: lora(f, target_modules="all-linear"), FAMILIES),
    "rslora-some-layers": (lambda f: lora(f, use_rslora=True, lora_alpha=3, layers_to_transform=[1, 3]), FAMILIES),
    "lora-experts": (lambda f: lora(f, r=2, target_modules=[], target_parameters=EXPERTS), MOE),
    "lora-experts-up": (lambda f: lora(f, r=2, target_parameters=EXPERTS[:1]), MOE),
    "lora-experts-down": (lambda f: lora(f, r=2, target_modules=[], target_parameters=EXPERTS[1:]), MOE),
    "lora-router": (lambda f: lora(f, r=2, target_modules=[], target_parameters=[router_of(f)]), MOE),
    "ia3": (
        lambda f: IA3Config(target_modules=attention_of(f), feedforward_modules=[], task_type="CAUSAL_LM"),
        FAMILIES,
    ),
    "ia3-feedforward": (
        lambda _: IA3Config(
            target_modules=["o_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        ),
        WITH_DENSE_MLP,
    ),
    "prompt-tuning": (prompt(PromptTuningConfig), FAMILIES),
    "p-tuning": (prompt(PromptEncoderConfig, encoder_hidden_size=16), FAMILIES),
    "prefix-tuning": (prompt(PrefixTuningConfig), WITH_PREFIX),
    "prefix-tuning-projected": (
        prompt(PrefixTuningConfig, prefix_projection=True, encoder_hidden_size=16),
        WITH_PREFIX,
    ),
}
CASES = [(family, method) for family in FAMILIES for method, (_, families) in METHODS.items() if family in families]


def parametrize(
    fixture: str, families: Sequence[str], scope: str, *, others: Collection[str] = ()
) -> pytest.MarkDecorator:
    """Runs a test for every method of some families; ``fixture`` gets the family, ``case`` names both.

    All other families have the methods of ``others``.

    Without the scope pytest would make the fixture anew for each test, because ``case`` is not a fixture. Cases differ
    from each other, or pytest would sort equal ones together and switch between families.
    """
    cases = [
        pytest.param(family, (family, method), id=f"{family}-{method}")
        for family, method in CASES
        if family in families or method in others
    ]
    return pytest.mark.parametrize((fixture, "case"), cases, indirect=[fixture], scope=scope)


def config_of(case: tuple[str, str]) -> PeftConfig:
    """PEFT's config of a method for a family."""
    family, method = case
    return METHODS[method][0](family)


def tuned(base: nn.Module, config: PeftConfig, *, seed: int = 0) -> PeftModel:
    """Wraps a model with PEFT and fills every trained tensor with noise that depends on its name only."""
    model = get_peft_model(base, copy.deepcopy(config))
    fill(model, seed=seed)
    return model.eval()


@torch.no_grad()
def fill(model: nn.Module, *, seed: int = 0) -> None:
    """Fills every trained tensor: LoRA's B is zero at first, and then half of the gradients would be zero too."""
    for name, parameter in trained(model).items():
        generator = torch.Generator().manual_seed(seed + sum(name.encode()) + len(name))
        noise = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.copy_(1 + noise if "ia3_" in name else noise)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The tensors that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def step(model: nn.Module, **inputs: Any) -> tuple[float, dict[str, Tensor]]:
    """One forward and backward: the loss and the gradient of every trained tensor."""
    model.zero_grad(set_to_none=True)
    loss = model(**{"input_ids": IDS, "attention_mask": MASK, "labels": LABELS, **inputs}).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in trained(model).items()}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    assert not missing, f"no gradient for {missing}"
    return float(loss.detach()), {name: gradient.clone() for name, gradient in gradients.items()}


def worst_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference of any gradient, relative to the largest element of that gradient."""
    assert got.keys() == want.keys()
    scale = {name: float(gradient.abs().max()) for name, gradient in want.items()}
    return max(float((got[name] - want[name]).abs().max()) / max(scale[name], 1e-12) for name in want)


@contextmanager
def nothing_kept(pair) -> Iterator[None]:
    """Lets every backward run its forward again."""
    stores = [service.activations for service in pair.swarm.services.values()]
    budgets = [store.budget_bytes for store in stores]
    for store in stores:
        store.budget_bytes = 0
    yield
    for store, budget in zip(stores, budgets, strict=True):
        store.budget_bytes = budget


def recomputed_error(pair, local: nn.Module, remote: nn.Module, tolerance: float) -> float:
    """Compares a step of a remote model with the local one's; returns how far off gradients are without kept inputs."""
    assert trained(local).keys() == trained(remote).keys()
    loss, gradients = step(local)
    kept_loss, kept = step(remote)
    with nothing_kept(pair):
        again_loss, again = step(remote)
    assert kept_loss == pytest.approx(loss, rel=tolerance)
    assert worst_error(kept, gradients) <= tolerance
    assert again_loss == kept_loss
    return worst_error(again, kept)
