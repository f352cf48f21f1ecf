"""A cross-attention module between two blocks: the local model's gradients, with a server killed in the middle too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm, insert_module
from swarm_plugins.testing import save_tiny

import torch
from torch import nn

BASE = sys.argv[1] if len(sys.argv) > 1 else str(save_tiny("mixtral", "runs/reader/model"))
ROWS = torch.randint(3, 100, (2, 16), generator=torch.Generator().manual_seed(0))


class Reader(nn.Module):
    """Attends from each token to some notes."""

    def __init__(self, notes: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("notes", notes)
        self.attention = nn.MultiheadAttention(notes.shape[-1], num_heads=1, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Takes and returns hidden states, `[batch, length, width]`."""
        notes = self.notes.expand(len(hidden), -1, -1)
        return hidden + self.attention(hidden, notes, notes, need_weights=False)[0]


def with_reader(**place: Any) -> Any:
    """Loads the model with a reader in its middle, always the same."""
    model = AutoSwarmModelForCausalLM.from_pretrained(BASE, **place)
    torch.manual_seed(0)
    notes = torch.randn(1, 6, model.config.hidden_size)
    insert_module(model, "reader", Reader(notes), before=model.config.num_hidden_layers // 2)
    return model


def gradients(model: Any, between: Callable[[], None] = lambda: None) -> torch.Tensor:
    """Returns the gradients of the reader in one row; calls a function between the two passes."""
    model.zero_grad()
    loss = model(ROWS, labels=ROWS, use_cache=False).loss
    between()
    loss.backward()
    return torch.cat([one.grad.flatten() for one in model.model.reader.parameters()])


expected = gradients(with_reader(offload="none"))
print(f"in memory: largest gradient {float(expected.abs().max()):.4f}")
with LocalSwarm(BASE, num_servers=2, dtype="float32") as swarm:
    model = with_reader(initial_peers=swarm.initial_peers)
    whole = gradients(model)
    broken = gradients(model, between=lambda: swarm.restart(0))  # kills the server of the first blocks
for what, found in {"on a swarm": whole, "a server killed": broken}.items():
    print(f"{what}: difference {float((found - expected).abs().max())}")
