"""One output layer for all requests that run side by side.

It is the largest product of a token that is computed here, 49,152 x 576 for SmolLM2-135M. Nearly all of its time is
spent on reading the weights, which rows of other requests can share.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from swarm_plugins.weights.plain_linears import has_plain_weight

_MAX_ROWS = 64
"""Longer inputs gain nothing from sharing, and the others would wait for them."""
_FEW_ROWS = 8
"""For so few rows a CPU multiplies weights by rows up to twice as fast as rows by weights, which BLAS copies first."""


class _Call:
    """Rows of one caller, and what became of them."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.outcome: Tensor | Exception | None = None


class SharedHead(nn.Module):
    """An output layer for several threads. Calls that arrive while it computes wait, and are then computed together.

    Outputs depend on the number of rows in their last bits only.

    Args:
        head: The layer.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head
        self._waiting: list[_Call] = []
        self._adding = threading.Lock()
        self._computing = threading.Lock()

    @property
    def weight(self) -> Tensor:
        return self.head.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the logits ``[..., vocabulary]`` of hidden states ``[..., D]``."""
        if torch.is_grad_enabled() or hidden.shape[:-1].numel() > _MAX_ROWS:
            logits: Tensor = self.head(hidden)
            return logits
        call = _Call(hidden.reshape(-1, hidden.shape[-1]))
        with self._adding:
            self._waiting.append(call)
        with self._computing:
            # The thread that computed before may have included this call.
            if call.outcome is None:
                self._compute()
        if not isinstance(call.outcome, Tensor):
            raise call.outcome or RuntimeError("an output layer has computed nothing")
        return call.outcome.contiguous().reshape(*hidden.shape[:-1], -1)

    def _compute(self) -> None:
        with self._adding:
            calls, self._waiting = self._waiting, []
        try:
            logits = self._logits(torch.cat([call.rows for call in calls]))
            for call, part in zip(calls, logits.split([len(call.rows) for call in calls]), strict=True):
                call.outcome = part
        except Exception as error:  # noqa: BLE001 - each caller raises it
            for call in calls:
                call.outcome = error

    def _logits(self, rows: Tensor) -> Tensor:
        if getattr(self.head, "bias", None) is None and rows.device.type == "cpu" and 1 < len(rows) <= _FEW_ROWS:
            return torch.mm(self.head.weight, rows.t()).t()
        logits: Tensor = self.head(rows)
        return logits


def share_head(model: Any, head: SharedHead | None) -> Any:
    """Gives a model the shared output layer, if its own is the same and has no adapter; returns the model."""
    own = model.get_output_embeddings()
    if head is not None and has_plain_weight(own) and own.weight is head.weight:
        model.set_output_embeddings(head)
    return model
