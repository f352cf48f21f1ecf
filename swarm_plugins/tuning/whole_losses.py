"""Losses of the whole distribution at a position, where the protocol knows the targets' log probabilities only.

Letters: N positions, V tokens of the vocabulary, K targets a position. All logarithms are natural.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swarm_plugins.errors import ConfigError

_LEAST = 1e-6
"""Probability that a reference's other tokens have together, at least: rounding may leave nothing of it."""
_ROUNDING = 1e-3
"""By how much the probabilities of a reference may add up to more than 1, and are then scaled down."""


def entropy(everything: Tensor) -> Tensor:
    """Returns the entropy ``[N]`` of distributions, given their log probabilities ``[N, V]``."""
    return -(everything.exp() * everything).sum(dim=1)


def forward_kl(everything: Tensor, targets: Tensor, reference: Tensor) -> Tensor:
    """Returns how far a reference is from the model, the mean in the reference's distribution ``[N]``.

    Args:
        everything: The model's log probabilities, ``[N, V]``.
        targets: Tokens that the reference names, ``[N, K]``; the others count as one.
        reference: Their log probabilities by it, ``[N, K]``.
    """
    ours, theirs = _with_rest(everything, targets, reference)
    return (theirs.exp() * (theirs - ours)).sum(dim=1)


def reverse_kl(everything: Tensor, targets: Tensor, reference: Tensor) -> Tensor:
    """Returns how far the model is from a reference, the mean in the model's distribution; see `forward_kl`."""
    ours, theirs = _with_rest(everything, targets, reference)
    return (ours.exp() * (ours - theirs)).sum(dim=1)


def check_reference(inputs: Mapping[str, Tensor]) -> None:
    """Raises ConfigError unless ``logprobs`` are a distribution over distinct ``target_tokens``."""
    targets, reference = inputs["target_tokens"], inputs["logprobs"]
    ordered = targets.view(len(targets), -1).sort(dim=1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise ConfigError("target_tokens names a token twice at one position: name each once")
    most = float(reference.view(len(targets), -1).double().exp().sum(dim=1).max())
    if most > 1 + _ROUNDING:
        raise ConfigError(f"logprobs are not log probabilities: their exponentials add up to {most:.4g}, not to 1")


def _with_rest(everything: Tensor, targets: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both distributions over the targets and all other tokens as one, ``[N, K + 1]`` each."""
    named, reference = targets.view(len(targets), -1), reference.view(len(targets), -1)
    # Of the others' own terms: 1 minus the named ones' would be rounding only, where these are nearly all.
    others = everything.scatter(1, named, float("-inf")).logsumexp(dim=1, keepdim=True)
    ours = torch.cat([everything.gather(1, named), others], dim=1)
    rest = (1 - reference.exp().sum(dim=1, keepdim=True)).clamp(min=_LEAST)
    theirs = torch.cat([reference, rest.log()], dim=1).log_softmax(dim=1)
    return ours, theirs
