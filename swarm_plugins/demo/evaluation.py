"""Held-out loss with its standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarm_plugins.demo.progress import Progress

_ROWS_AT_ONCE = 4


@dataclass(frozen=True)
class Figure:
    """A mean over documents, with its standard error."""

    mean: float
    standard_error: float

    @classmethod
    def of(cls, values: Tensor) -> Figure:
        """Returns mean and standard error of independent values."""
        if len(values) < 2:
            return cls(float(values.mean()), math.inf)
        return cls(float(values.mean()), float(values.std()) / math.sqrt(len(values)))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.standard_error:.3f}"


def change(before: Tensor, after: Tensor) -> Figure:
    """Returns the mean of paired changes: documents differ from one another more than each changes."""
    return Figure.of(after - before)


def losses_of(model: nn.Module, pieces: Tensor, what: str) -> Tensor:
    """Returns the loss ``[pieces]`` of each piece ``[pieces, length]`` under a model; ``what`` labels the bar."""
    was_training = model.training
    model.eval()
    found = []
    try:
        with torch.no_grad(), Progress(what, len(pieces), "pieces") as bar:
            for batch in pieces.split(_ROWS_AT_ONCE):
                output: Any = model(input_ids=batch, use_cache=False)
                # Soft prompts precede the text.
                logits = output.logits[:, -batch.shape[1] :].float()  # [B, S, V]
                found.append(_of_each(logits, batch))
                bar.advance(len(batch))
    finally:
        model.train(was_training)
    return torch.cat(found)


def _of_each(logits: Tensor, tokens: Tensor) -> Tensor:
    losses = functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")  # [B, S - 1]
    return losses.mean(1)
