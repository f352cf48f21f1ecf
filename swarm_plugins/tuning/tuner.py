"""One adapter in training: gradients add up over calls until a step of the optimizer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarm_plugins.errors import ConfigError, NumericError
from swarm_plugins.tuning.computing import Computed, Part, run_pass
from swarm_plugins.tuning.datums import Datum, LossCall

_LEAST_EPS = 1e-37
"""Smaller numbers may become 0 in float32."""


@dataclass(frozen=True)
class AdamParams:
    """Settings of one step of AdamW; the defaults are the protocol's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Gradients are scaled to this norm if theirs is larger; 0: never."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name} must be a finite number, 0 or more; got {value!r}")
        if self.eps < _LEAST_EPS:
            raise ConfigError(
                f"eps must be at least {_LEAST_EPS:g}, got {self.eps!r}: weights without a gradient would become NaN"
            )
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"{name} must be 0 or more and below 1; got {value!r}")


class Tuner:
    """Trains the adapter of a model. For one thread at a time.

    Args:
        model: A model with an adapter of PEFT, in eval mode: nothing is dropped out at random.
        held: What is to live as long as this.
    """

    def __init__(self, model: Any, held: object = None) -> None:
        self.model = model
        self.held = held
        self.parameters: dict[str, Tensor] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self.optimizer = torch.optim.AdamW(self.parameters.values(), foreach=False)
        self.num_steps = 0
        """Steps that the optimizer has made."""
        self._failure = ""
        self._has_gradients = False

    def compute(
        self, datums: Sequence[Datum], call: LossCall, *, backward: bool, stop: threading.Event | None = None
    ) -> list[Computed]:
        """Computes a loss on texts, and adds its gradients to those of earlier calls.

        Args:
            datums: Texts, as `check_datums` takes them.
            call: The loss.
            backward: Whether gradients are wanted.
            stop: Ends it after a batch, once it is set.

        Raises:
            NumericError: If the loss is NaN or infinite. As with any other error, the next step is refused then.
            CancelledError: If it was stopped.
            SwarmError: If servers are missing or fail.
        """
        try:
            (found,) = run_pass(self.model, [Part(datums, call)], backward=backward, stop=stop)
            if isinstance(found, NumericError):
                raise found
        except Exception as exc:
            if backward:
                self.fail(str(exc))
            raise
        self._has_gradients |= backward
        return found

    def added(self) -> None:
        """Notes that a pass with others has added gradients."""
        self._has_gradients = True

    def fail(self, why: str) -> None:
        """Has the next step refused, since gradients are missing."""
        self._failure = self._failure or why

    def step(self, settings: AdamParams) -> dict[str, float]:
        """Makes one step of AdamW with the gradients so far, which are dropped then; returns their norm.

        Raises:
            ConfigError: If there are none, or a call that should have added some has failed.
            NumericError: If they are NaN or infinite; the adapter stays as it is.
        """
        try:
            if self._failure:
                raise ConfigError(f"no step: a forward_backward before it failed ({self._failure[:300]})")
            if not self._has_gradients:
                raise ConfigError("no step: call forward_backward first; the gradients of earlier calls are used up")
            norm = torch.nn.utils.get_total_norm(
                [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
            )
            if not bool(norm.isfinite()):
                raise NumericError("no step: the gradients are NaN or infinite; lower the learning rate")
            if settings.grad_clip_norm:
                torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), settings.grad_clip_norm, norm)
            self.optimizer.param_groups[0].update(
                lr=settings.learning_rate,
                betas=(settings.beta1, settings.beta2),
                eps=settings.eps,
                weight_decay=settings.weight_decay,
            )
            self.optimizer.step()
            self.num_steps += 1
            return {"grad_norm": float(norm)}
        finally:
            self.drop()

    def drop(self) -> None:
        """Drops the gradients so far, and the note of a call that has failed."""
        self._failure, self._has_gradients = "", False
        self.optimizer.zero_grad()
