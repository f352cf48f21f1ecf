"""Adds the distillation term to the loss of a student's training forward, by a hook on the student."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from swarm_plugins.distill.loss import check_shapes, counted_positions, token_divergence
from swarm_plugins.errors import ConfigError

# What a forward of a causal language model is told about its tokens; the rest is about the student alone.
_TOKEN_INPUTS = ("input_ids", "attention_mask", "position_ids")


class Tally:
    """Counts teacher forwards and sums losses over tokens, across the life of one training run."""

    def __init__(self) -> None:
        self.num_forwards = 0
        """Teacher forwards so far."""
        self._sums: dict[str, Tensor] = {}
        self._num_tokens: Any = 0

    def add(self, num_tokens: Tensor, **sums: Tensor) -> None:
        """Adds sums of losses over tokens; nothing waits for the device."""
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach().float()
        self._num_tokens = self._num_tokens + num_tokens

    def take(self) -> dict[str, Tensor]:
        """Returns the means per token since the last call, by name; empty if there was no token."""
        means = {name: value / self._num_tokens for name, value in self._sums.items()}
        self._sums, self._num_tokens = {}, 0
        return means


class DistillationTerm:
    """A forward hook: runs the teacher on the student's tokens and adds the weighted divergence to ``output.loss``.

    Acts on forward passes with gradients and with labels; leaves validation and generation (``no_grad``) alone.

    Args:
        teacher: The teacher.
        temperature: Softens both distributions.
        tally: Where forwards and losses are noted.
    """

    def __init__(self, teacher: nn.Module, temperature: float, tally: Tally) -> None:
        self.teacher = teacher
        self.temperature = temperature
        self.tally = tally
        self.weight = 0.0
        """Factor of the term."""

    def __reduce__(self) -> Any:
        # A student that is copied or pickled in training (an average of weights, torch.save) must not take the teacher
        # along, nor be taught for ever: its hook has weight 0.
        return DistillationTerm, (nn.Identity(), self.temperature, Tally())

    def __call__(self, student: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Adds the term to a student's output, in place."""
        # Not student.training: Lightning trains a model in the mode that it finds, and from_pretrained leaves it in
        # evaluation mode.
        if self.weight == 0 or not torch.is_grad_enabled():
            return
        inputs = _named(student, args, kwargs)
        labels = inputs.get("labels")
        if labels is None:
            return
        loss, logits = _loss_and_logits(student, output)
        teacher_logits = self._teach(inputs)
        check_shapes(logits, teacher_logits, labels)
        counted = counted_positions(labels, inputs.get("attention_mask"))
        num_tokens = counted.sum().clamp(min=1).to(logits.device)
        num_items = inputs.get("num_items_in_batch")
        divisor = num_tokens if num_items is None else num_items
        scale = self.temperature**2
        divergence = token_divergence(logits, teacher_logits, counted, self.temperature) * scale  # summed over tokens
        output.loss = loss + self.weight * divergence / divisor
        self.tally.add(num_tokens, lm_loss=loss * divisor, kd_loss=divergence)

    def _teach(self, inputs: Mapping[str, Any]) -> Tensor:
        if inputs.get("input_ids") is None:
            raise ConfigError(
                "the student was called without input_ids, which its teacher needs; pass input_ids (soft prompts and "
                "inputs_embeds cannot be distilled)"
            )
        # A module that holds the teacher would switch it to training mode with itself.
        self.teacher.train(False)
        self.tally.num_forwards += 1
        tokens = {name: inputs[name] for name in _TOKEN_INPUTS if inputs.get(name) is not None}
        # Not inference mode: autograd cannot keep its tensors.
        with torch.no_grad():
            logits: Tensor = self.teacher(**tokens, use_cache=False).logits
        return logits


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments of a call by name."""
    if not args:
        return kwargs
    # The class's: an instance's may be wrapped, for mixed precision.
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _loss_and_logits(student: nn.Module, output: Any) -> tuple[Tensor, Tensor]:
    loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    if not isinstance(loss, Tensor) or not isinstance(logits, Tensor):
        found = (
            "a tuple" if isinstance(output, tuple) else f"loss {type(loss).__name__}, logits {type(logits).__name__}"
        )
        raise ConfigError(
            f"{type(student).__name__} got labels but returned {found} instead of an output with .loss and .logits; "
            "leave return_dict on, and fused losses that skip the logits (Liger) off"
        )
    return loss, logits
