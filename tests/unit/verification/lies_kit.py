"""A training run on a swarm that may hold liars."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from kits.liars import Liar, LyingSwarm
from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.blocks import Span
from swarm_plugins.client import SwarmConfig
from swarm_plugins.verification import Verifier

IDS = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(1))
HONEST = SwarmConfig(verify="off")
CHECKED = SwarmConfig(verify="on")


def tuned(swarm: LyingSwarm) -> PeftModel:
    """Returns the model with a LoRA."""
    model = AutoSwarmModelForCausalLM.from_pretrained(swarm.directory, connection=swarm.connection)
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def train(swarm: LyingSwarm, *, steps: int = 3) -> list[float]:
    """Returns the losses of some steps with a LoRA."""
    model = tuned(swarm)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1.0)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_liar(
    directory: Path, liar: Liar, *, config: SwarmConfig = CHECKED, dtype: torch.dtype | None = None
) -> LyingSwarm:
    """A swarm whose second half has a lying server, which looks faster, and an honest one."""
    return LyingSwarm(directory, spans=[(0, 2), (2, 4), (2, 4)], config=config, liars={1: liar}, dtype=dtype)


class OtherMachine(Liar):
    """An honest server whose sums are taken in another order at every call, as on a GPU."""

    def __init__(self) -> None:
        super().__init__("scaled", honest_calls=1 << 30)
        self._generator = torch.Generator().manual_seed(0)

    def corrupt(self, span: Span) -> Span:
        """Changes the order of the sums in all linear layers."""
        for module in span.model.modules():
            if isinstance(module, nn.Linear):
                self._reorder(module)
        return span

    def _reorder(self, module: nn.Linear) -> None:
        def forward(inputs: Tensor) -> Tensor:
            order = torch.randperm(module.in_features, generator=self._generator)
            return F.linear(inputs[..., order], module.weight[:, order], module.bias)

        module.forward = forward  # type: ignore[method-assign]


def verifier_of(model: nn.Module) -> Verifier:
    """Returns the verifier of a model on a swarm."""
    stack = next(module.swarm_stack for module in model.modules() if hasattr(module, "swarm_stack"))
    verifier = stack.remote.servers.guard
    assert isinstance(verifier, Verifier)
    return verifier


def all_checked(swarm: LyingSwarm) -> PreTrainedModel:
    """Returns the model of a swarm, every answer of which is checked."""
    model = AutoSwarmModelForCausalLM.from_pretrained(swarm.directory, connection=swarm.connection)
    verifier_of(model).checker.chance = lambda: 0.0
    return model


def finish_checks(model: nn.Module) -> None:
    """Waits for the checks in the background."""
    verifier, deadline = verifier_of(model), time.monotonic() + 60
    while verifier.checker.is_busy:
        assert time.monotonic() < deadline
        time.sleep(0.01)
