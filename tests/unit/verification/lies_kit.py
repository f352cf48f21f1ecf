"""A training run on a swarm that may hold liars."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.client import SwarmConfig
from swarm_plugins.testing import InProcessSwarm, Liar

IDS = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(1))
HONEST = SwarmConfig(verify="off")
CHECKED = SwarmConfig(verify="on")


def tuned(swarm: InProcessSwarm) -> PeftModel:
    """Returns the model with a LoRA."""
    model = AutoSwarmModelForCausalLM.from_pretrained(swarm.directory, connection=swarm.connection)
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def train(swarm: InProcessSwarm, *, steps: int = 3) -> list[float]:
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


def with_liar(directory: Path, liar: Liar, *, config: SwarmConfig = CHECKED) -> InProcessSwarm:
    """A swarm whose second half has a lying server, which looks faster, and an honest one."""
    return InProcessSwarm(directory, spans=[(0, 2), (2, 4), (2, 4)], config=config, liars={1: liar})
