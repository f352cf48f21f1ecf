"""What the expert-parallel strategies refuse before any rank waits for another, and what they keep."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import lightning.fabric.plugins.precision as fabric_precision
import lightning.pytorch as pl
import lightning.pytorch.plugins.precision as trainer_precision
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from swarm_plugins import ExpertParallelStrategy, FabricExpertParallelStrategy
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.strategy.expert_parallel import member
from swarm_plugins.strategy.expert_parallel.member import find_mixture
from swarm_plugins.testing import tiny_model

STRATEGIES = [
    pytest.param(ExpertParallelStrategy, id="trainer"),
    pytest.param(FabricExpertParallelStrategy, id="fabric"),
]


class Holder(pl.LightningModule):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


@pytest.mark.parametrize("cls", STRATEGIES)
def test_making_one_starts_nothing_and_keeps_the_options(cls: Any) -> None:
    strategy = cls([1, 2], "hierarchical_all_to_all", ranks_per_node=2, timeout_s=7)
    assert (strategy.ep_size, strategy.ep_implementation) == ([1, 2], "hierarchical_all_to_all")
    assert strategy._timeout.total_seconds() == strategy.timeout_s == 7
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("cls", STRATEGIES)
def test_options_of_ddp_are_refused_by_name(cls: Any) -> None:
    with pytest.raises(ConfigError, match=r"no option 'find_unused_parameters', 'static_graph': valid are ep_size, "):
        cls(find_unused_parameters=True, static_graph=True)


@pytest.mark.parametrize("cls", STRATEGIES)
def test_a_strategy_belongs_to_one_trainer(cls: Any) -> None:
    strategy = cls()
    strategy.accelerator = object()
    with pytest.raises(ConfigError, match=r"belongs to another Trainer or Fabric: make a new one"):
        strategy.accelerator = object()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning
@pytest.mark.parametrize(
    "callback", [WeightAveraging(), EMAWeightAveraging(), StochasticWeightAveraging(0.1)], ids=lambda one: type(one)
)
def test_averages_of_the_whole_module_are_refused(callback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExpertParallelStrategy, "_configure_launcher", lambda _: None)  # sets variables
    trainer = pl.Trainer(strategy=ExpertParallelStrategy(), callbacks=[callback], accelerator="cpu", logger=False)
    with pytest.raises(ConfigError, match=rf"^{type(callback).__name__} averages a copy .* holds only its own experts"):
        trainer.fit(BoringModel())
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("name", ["16-mixed", "16-true"])
def test_precisions_that_cannot_work_are_refused_by_name(name: Any) -> None:
    refusal = rf"precision '{name}' .* use one of '32-true', 'bf16-mixed', 'bf16-true', '64-true'"
    for module, cls, attribute in (
        (trainer_precision, ExpertParallelStrategy, "precision_plugin"),
        (fabric_precision, FabricExpertParallelStrategy, "precision"),
    ):
        made: Any = module
        plugin = made.MixedPrecision(name, "cpu") if "mixed" in name else made.HalfPrecision(name)
        with pytest.raises(ConfigError, match=refusal):
            setattr(cls(), attribute, plugin)


def test_the_mixture_is_found_inside_other_modules() -> None:
    model = tiny_model("mixtral", num_layers=1)
    assert find_mixture(Holder(model=nn.ModuleDict({"inner": model}), head=nn.Linear(2, 2))) is model
    assert find_mixture(model) is model
    assert find_mixture(Holder(student=tiny_model("llama", num_layers=1), model=model)) is model


def test_a_module_without_a_mixture_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Holder holds no Hugging Face model.*configure_model\(\)"):
        find_mixture(Holder(head=nn.Linear(2, 2)))
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM has no expert-parallel plan.*mixtral"):
        find_mixture(Holder(model=tiny_model("llama", num_layers=1)))


def test_two_mixtures_are_refused_with_their_names() -> None:
    parts = {name: tiny_model("mixtral", num_layers=1) for name in ("student", "teacher")}
    with pytest.raises(
        ConfigError, match=r"2 mixtures of experts: 'student' \(Mixtral.*'teacher' \(Mixtral.*one: keep"
    ):
        find_mixture(Holder(**parts))


NAMES = """
import sys
import lightning.pytorch, lightning.fabric, pytorch_lightning, lightning_fabric
import swarm_plugins
for trainer in (lightning.pytorch.Trainer, pytorch_lightning.Trainer):
    made = trainer(strategy="expert_parallel", accelerator="cpu", devices=2, logger=False)
    print(type(made.strategy).__module__)
for fabric in (lightning.fabric.Fabric, lightning_fabric.Fabric):
    made = fabric(strategy="expert_parallel", accelerator="cpu", devices=2)
    print(type(made.strategy).__module__)
print([name for name in sys.modules if name.startswith("hivemind")][:1])
"""


@pytest.mark.slow
def test_the_name_is_known_in_both_spellings_and_loads_no_swarm() -> None:
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    *modules, hivemind = done.stdout.splitlines()
    home = "swarm_plugins.strategy.expert_parallel"
    assert modules == [f"{home}.{end}" for end in ("unified", "standalone", "unified", "standalone_fabric")]
    assert hivemind == "[]"


def test_gradients_are_clipped_once_all_of_them_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    synchronized: list[int] = []
    monkeypatch.setattr(member, "synchronize_gradients", lambda module, parameters: synchronized.append(1))
    monkeypatch.setattr(member, "clip_gradients", lambda module, *_, **__: torch.tensor(1.0))
    strategy, layer, other = FabricExpertParallelStrategy(), nn.Linear(2, 1), nn.Linear(2, 1)
    monkeypatch.setattr(strategy, "reduce_boolean_decision", lambda decision, all: decision)
    optimizer = strategy.setup_optimizer(torch.optim.SGD(layer.parameters()))

    def backward(module: nn.Module) -> None:
        module(torch.ones(1, 2)).sum().backward()

    backward(layer)
    strategy.clip_norm(layer, optimizer, 1.0)
    backward(other)
    strategy.synchronize(layer, optimizer)
    assert len(synchronized) == 1, "nothing was added to these"
    backward(layer)
    with pytest.raises(ConfigError, match="added to after they were clipped: clip once, right before"):
        strategy.synchronize(layer, optimizer)
    optimizer.zero_grad()
    layer.weight.requires_grad_(False)
    backward(layer)
    strategy.clip_norm(layer, optimizer, 1.0)
    layer.weight.requires_grad_(True)
    layer.bias.requires_grad_(False)
    backward(layer)
    with pytest.raises(ConfigError, match="added to after they were clipped"):
        strategy.synchronize(layer, optimizer)
    layer.bias.requires_grad_(True)
    for forget in (optimizer.zero_grad, optimizer.step):
        forget()
        backward(layer)
        strategy.clip_norm(layer, optimizer, 1.0)
    assert len(synchronized) == 4
    optimizer.step()
    backward(layer)
    optimizer.step()
    optimizer.step(lambda: backward(layer))
    optimizer.step()
    assert len(synchronized) == 6, "once after each of the backward passes, which nothing here has counted"
