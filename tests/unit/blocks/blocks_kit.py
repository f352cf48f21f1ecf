"""Spans of every family's toy, beside the plain local model with the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from swarm_plugins.blocks import KVCache, Span, SpanInputs, StepInputs
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.testing.models import tiny_model

WIDTH = 32
NUM_BLOCKS = 4
BLOCKS = range(NUM_BLOCKS)


@dataclass
class Pair:
    """A span of all blocks of a toy, and the toy itself."""

    family: str
    checkpoint: Checkpoint
    span: Span

    @property
    def local(self) -> PreTrainedModel:
        """A fresh local causal language model without a final norm, so that its last hidden state is the blocks'."""
        model = tiny_model(self.family)
        model.requires_grad_(False)
        base(model).norm = nn.Identity()
        return model

    def step(self, session: KVCache, hidden: Tensor, **kwargs: Any) -> Tensor:
        [outputs] = self.span.step([StepInputs(cache=session, blocks=BLOCKS, hidden=hidden, **kwargs)])
        return outputs.hidden

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        return self.span.forward(SpanInputs(blocks=BLOCKS, hidden=hidden, **kwargs)).hidden


def base(model: nn.Module) -> Any:
    """The model inside a causal language model, also inside PEFT's wrapper."""
    return getattr(model, "get_base_model", lambda: model)().model


def run_local(model: nn.Module, hidden: Tensor, cache: DynamicCache | None = None, **kwargs: Any) -> Tensor:
    """Runs the local model's blocks."""
    output = base(model)(inputs_embeds=hidden, past_key_values=cache, use_cache=cache is not None, **kwargs)
    last: Tensor = output.last_hidden_state
    return last


def states(*shape: int, seed: int = 0) -> Tensor:
    """Random hidden states."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
