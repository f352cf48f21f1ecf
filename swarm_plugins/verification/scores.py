"""How far an answer may be from what a block computes here: scores, and thresholds measured on honest pairs.

Two honest computations of a block differ by the order of their sums, so hashes cannot be compared. The score of a
token is the error in units of what the block has changed, with an allowance for the rounding of the residual stream:
``|y - y'| / (|y' - x| + 8 u |x|)``, where ``x`` is the input, ``y`` the answer, ``y'`` the result here, ``u`` the unit
of rounding.

Shapes: ``B`` batch, ``S`` tokens, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_UNITS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 2.0**-7}
"""Unit of rounding by the coarsest type that a tensor has passed through; ``int8`` is the codec."""


@dataclass(frozen=True)
class Threshold:
    """Largest score of an honest answer."""

    median: float
    """Of the median token."""
    worst: float
    """Of the worst token."""


FORWARD = {
    "float32": Threshold(1e-4, 1e-3),
    "float16": Threshold(5e-3, 0.15),
    "bfloat16": Threshold(3e-2, 0.2),
    "int8": Threshold(6e-2, 0.5),
}
"""By the coarsest type on the way."""
BACKWARD = {
    "float32": Threshold(1e-3, 1e-2),
    "float16": Threshold(2e-2, 0.3),
    "bfloat16": Threshold(0.1, 0.5),
    "int8": Threshold(0.15, 0.8),
}
"""The same for gradients."""
_TIED_SHARE = 0.02
"""Share of a mixture's tokens that may differ by more than the threshold: where two experts are nearly tied, rounding
decides which one a router takes."""


def coarsest(names: Sequence[str]) -> str:
    """Returns the type with the largest unit of rounding; unknown names count as float32."""
    return max(names, key=lambda name: _UNITS.get(name, 0.0))


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison."""

    median: float
    worst: float
    threshold: Threshold

    @property
    def is_wrong(self) -> bool:
        """Whether no honest computation gives this answer."""
        # A NaN is wrong too.
        return not (self.median <= self.threshold.median and self.worst <= self.threshold.worst)

    def __str__(self) -> str:
        return (
            f"error of the median token {self.median:.2g}, of the worst {self.worst:.2g}; honest servers stay below "
            f"{self.threshold.median:g} and {self.threshold.worst:g}"
        )


def compare_outputs(
    hidden: Tensor, output: Tensor, expected: Tensor, precision: str, *, mask: Tensor | None = None, is_mixture: bool
) -> Verdict:
    """Compares a block's output with the one computed here, all ``[B, S, D]``; padding tokens do not count."""
    x, y, here = (tensor.detach().to("cpu", torch.float64).flatten(0, 1) for tensor in (hidden, output, expected))
    change = (here - x).norm(dim=-1) + 8 * _UNITS[precision] * x.norm(dim=-1)
    return _verdict((y - here).norm(dim=-1), change, FORWARD[precision], mask, hidden.shape[1], is_mixture)


def compare_gradients(
    found: Tensor, expected: Tensor, precision: str, *, mask: Tensor | None = None, is_mixture: bool
) -> Verdict:
    """Compares a gradient of hidden states with the one computed here, both ``[B, S, D]``."""
    got, here = (tensor.detach().to("cpu", torch.float64).flatten(0, 1) for tensor in (found, expected))
    norms = here.norm(dim=-1)
    # Tokens that hardly matter to the loss have gradients of rounding errors.
    scale = norms + _UNITS[precision] * norms.max()
    return _verdict((got - here).norm(dim=-1), scale, BACKWARD[precision], mask, found.shape[1], is_mixture)


def compare_parameters(found: Sequence[Tensor], expected: Sequence[Tensor], precision: str) -> Verdict:
    """Compares gradients of adapter tensors or of a prefix; each tensor counts as one token."""
    errors = torch.tensor([float((got - here).double().norm()) for got, here in zip(found, expected, strict=True)])
    norms = torch.tensor([float(here.double().norm()) for here in expected])
    scale = norms + 8 * _UNITS[precision] * norms.max()
    return _verdict(errors, scale, BACKWARD[precision], None, 1, False)


def _verdict(
    errors: Tensor, scale: Tensor, threshold: Threshold, mask: Tensor | None, num_new: int, is_mixture: bool
) -> Verdict:
    if mask is not None:
        real = mask[:, mask.shape[1] - num_new :].flatten()
        errors, scale = errors[real], scale[real]
    if errors.numel() == 0:
        return Verdict(0.0, 0.0, threshold)
    scores = errors / scale.clamp_min(1e-30)
    excused = max(1, int(_TIED_SHARE * len(scores))) if is_mixture and len(scores) > 1 else 0
    worst = scores.sort().values[len(scores) - 1 - excused]
    return Verdict(float(scores.median()), float(worst), threshold)
