"""Losses of a training call, as sums over the positions of one text.

Every loss is a pure function: those of the protocol of the log probabilities of the targets, some of ours of the whole
distribution. Nothing is averaged and nothing masked: weights
and advantages of zero do that. Letters: N positions, K targets a position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from swarm_plugins.errors import ConfigError, printable
from swarm_plugins.tuning.whole_losses import check_reference, entropy, forward_kl, reverse_kl

TARGETS = "target_tokens"
_UNPUBLISHED = {"stable_reinforce": "its formula is not published: use loss_fn=importance_sampling"}
_MASK = "sequence_ratio_mask"
_BONUS = "entropy_bonus"

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]


class Scores(NamedTuple):
    """Log probabilities of one text."""

    logprobs: Tensor
    """Of the targets, ``[N]`` or ``[N, K]``."""
    everything: Tensor
    """Of all tokens, ``[N, V]``."""


@dataclass(frozen=True)
class Loss:
    """One loss: what it takes, and the function."""

    compute: Callable[[Scores, Inputs, Settings], Tensor]
    """Takes log probabilities, inputs and settings; returns the loss at each position."""
    inputs: tuple[str, ...] = ()
    """Names of inputs that a text must bring besides its targets."""
    optional: tuple[str, ...] = ()
    """Names of inputs that it may bring."""
    settings: Settings = field(default_factory=dict)
    """Settings with their defaults."""
    by_position: tuple[str, ...] = ()
    """Names of inputs with one value a position, also where there are several targets."""
    check: Callable[[Inputs], None] | None = None
    """Raises ConfigError if inputs that are valid by themselves do not fit each other."""


def _cross_entropy(scores: Scores, inputs: Inputs, settings: Settings) -> Tensor:
    weights = inputs.get("weights")
    return -scores.logprobs if weights is None else -scores.logprobs * weights


def _importance_sampling(scores: Scores, inputs: Inputs, settings: Settings) -> Tensor:
    return -(scores.logprobs - inputs["logprobs"]).exp() * inputs["advantages"]


def _ppo(scores: Scores, inputs: Inputs, settings: Settings) -> Tensor:
    return _clipped((scores.logprobs - inputs["logprobs"]).exp(), inputs, settings)


def _clipped(ratio: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _bounded(ratio, inputs, settings) * advantages)


def _bounded(ratio: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Clips ratios; per-position bounds override the settings."""
    low, high = (inputs.get(name, ratio.new_tensor(settings[name])) for name in _CLIP)
    return ratio.clamp(low, high)


def _cispo(scores: Scores, inputs: Inputs, settings: Settings) -> Tensor:
    ratio = (scores.logprobs - inputs["logprobs"]).exp().detach()
    return -_bounded(ratio, inputs, settings) * scores.logprobs * inputs["advantages"]


def _dro(scores: Scores, inputs: Inputs, settings: Settings) -> Tensor:
    distance = (scores.logprobs - inputs["logprobs"]).square()
    return -(scores.logprobs * inputs["advantages"] - settings["beta"] / 2 * distance)


def _gspo(scores: Scores, inputs: Inputs, settings: Settings) -> Tensor:
    logprobs, mask = scores.logprobs, inputs.get(_MASK)
    counted = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask != 0
    ratios = (logprobs.detach() - inputs["logprobs"])[counted]
    # The ratio of the whole text, with the gradient of each of its tokens (GSPO-token, Zheng et al. 2025, section 4.3).
    of_text = ratios.mean() if ratios.numel() else logprobs.new_zeros(())
    return _clipped((of_text + logprobs - logprobs.detach()).exp(), inputs, settings)


def _of_policy(
    compute: Callable[[Scores, Inputs, Settings], Tensor],
    settings: Mapping[str, float] = MappingProxyType({}),
    optional: tuple[str, ...] = (),
) -> Loss:
    """Returns a loss of policy gradients; ``entropy_bonus`` rewards entropy where there is an advantage."""

    def with_bonus(scores: Scores, inputs: Inputs, chosen: Settings) -> Tensor:
        losses = compute(scores, inputs, chosen)
        if not chosen[_BONUS]:
            return losses
        bonus = chosen[_BONUS] * entropy(scores.everything)
        # Once a position, also where it has several targets.
        counted = (inputs["advantages"] != 0).view(len(losses), -1)
        shares = counted / counted.sum(dim=1, keepdim=True).clamp(min=1)
        return losses - (shares * bonus[:, None]).view(losses.shape)

    return Loss(with_bonus, ("logprobs", "advantages"), optional, {**settings, _BONUS: 0.0})


def _entropy(scores: Scores, inputs: Inputs, settings: Settings) -> Tensor:
    return _weighted(-entropy(scores.everything), inputs)


def _distance(measure: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Loss:
    """Returns a loss: how far the model is from a reference that names some tokens' log probabilities."""

    def compute(scores: Scores, inputs: Inputs, settings: Settings) -> Tensor:
        return _weighted(measure(scores.everything, inputs[TARGETS], inputs["logprobs"]), inputs)

    return Loss(compute, ("logprobs",), ("weights",), by_position=("weights",), check=check_reference)


def _weighted(losses: Tensor, inputs: Inputs) -> Tensor:
    weights = inputs.get("weights")
    return losses if weights is None else losses * weights


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(_cross_entropy, optional=("weights",)),
    "importance_sampling": _of_policy(_importance_sampling),
    "ppo": _of_policy(_ppo, _CLIP, tuple(_CLIP)),
    "cispo": _of_policy(_cispo, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, tuple(_CLIP)),
    "dro": _of_policy(_dro, {"beta": 0.05}),
    "gspo": _of_policy(_gspo, _CLIP, (*_CLIP, _MASK)),
    "forward_kl": _distance(forward_kl),
    "reverse_kl": _distance(reverse_kl),
    "entropy": Loss(_entropy, optional=("weights",), by_position=("weights",)),
}
"""By the protocol's names: PPO (Schulman et al. 2017), CISPO (MiniMax-M1, 2025), DRO (Richemond et al. 2024), GSPO.

The last three are ours, of the whole distribution: distillation from a reference (Hinton et al. 2015; the reverse as
in MiniLLM, Gu et al. 2024), and entropy to be raised."""


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
        ConfigError: If the loss has no such setting, or its value is not finite.
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
