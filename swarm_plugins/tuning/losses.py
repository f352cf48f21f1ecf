"""Losses of a training call, as sums over the positions of one text.

Every loss is a pure function of the log probabilities of the targets. Nothing is averaged and nothing masked: weights
and advantages of zero do that. Letters: N positions, K targets a position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarm_plugins.errors import ConfigError, printable

TARGETS = "target_tokens"
_UNPUBLISHED = {"stable_reinforce": "its formula is not published: use loss_fn=importance_sampling"}
_MASK = "sequence_ratio_mask"

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]


@dataclass(frozen=True)
class Loss:
    """One loss: what it takes, and the function."""

    compute: Callable[[Tensor, Inputs, Settings], Tensor]
    """Takes log probabilities, inputs of the same shape and settings; returns the loss at each position."""
    inputs: tuple[str, ...] = ()
    """Names of inputs that a text must bring besides its targets."""
    optional: tuple[str, ...] = ()
    """Names of inputs that it may bring."""
    settings: Settings = field(default_factory=dict)
    """Settings with their defaults."""


def _cross_entropy(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    weights = inputs.get("weights")
    return -logprobs if weights is None else -logprobs * weights


def _importance_sampling(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -(logprobs - inputs["logprobs"]).exp() * inputs["advantages"]


def _ppo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return _clipped((logprobs - inputs["logprobs"]).exp(), inputs["advantages"], settings)


def _clipped(ratio: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    bounded = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, bounded * advantages)


def _cispo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    ratio = (logprobs - inputs["logprobs"]).exp().detach()
    bounded = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -bounded * logprobs * inputs["advantages"]


def _dro(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    distance = (logprobs - inputs["logprobs"]).square()
    return -(logprobs * inputs["advantages"] - settings["beta"] / 2 * distance)


def _gspo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    mask = inputs.get(_MASK)
    counted = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask != 0
    ratios = (logprobs.detach() - inputs["logprobs"])[counted]
    # The ratio of the whole text, with the gradient of each of its tokens (GSPO-token, Zheng et al. 2025, section 4.3).
    of_text = ratios.mean() if ratios.numel() else logprobs.new_zeros(())
    return _clipped((of_text + logprobs - logprobs.detach()).exp(), inputs["advantages"], settings)


_OF_RATIOS = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(_cross_entropy, optional=("weights",)),
    "importance_sampling": Loss(_importance_sampling, _OF_RATIOS),
    "ppo": Loss(_ppo, _OF_RATIOS, settings=_CLIP),
    "cispo": Loss(_cispo, _OF_RATIOS, settings={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Loss(_dro, _OF_RATIOS, settings={"beta": 0.05}),
    "gspo": Loss(_gspo, _OF_RATIOS, (_MASK,), settings=_CLIP),
}
"""By the protocol's names: PPO (Schulman et al. 2017), CISPO (MiniMax-M1, 2025), DRO (Richemond et al. 2024), GSPO."""


def find_loss(name: str) -> Loss:
    """Returns a loss by its name.

    Raises:
        ConfigError: If there is none of that name.
    """
    if name in _UNPUBLISHED:
        raise ConfigError(f"loss_fn {name!r} cannot be computed here: {_UNPUBLISHED[name]}")
    if name not in LOSSES:
        raise ConfigError(f"unknown loss_fn {printable(name[:100])!r}: known are {', '.join(LOSSES)}")
    return LOSSES[name]


def settings_of(name: str, given: Mapping[str, float | str]) -> Settings:
    """Returns the settings of a loss: those given, and defaults.

    Raises:
        ConfigError: If the loss has no such setting, or it is no finite number.
    """
    known = find_loss(name).settings
    chosen = dict(known)
    for key, value in given.items():
        if key not in known:
            listed = ", ".join(known) or "none"
            raise ConfigError(f"{name} has no setting {printable(key[:100])!r}: it has {listed}")
        if isinstance(value, str) or not abs(value) < float("inf"):
            raise ConfigError(f"{key} of {name} must be a finite number, not {str(value)[:50]!r}")
        chosen[key] = value
    return chosen
