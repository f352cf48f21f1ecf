"""How far an answer may be from what blocks compute here: scores, and thresholds measured on honest pairs.

Two honest computations differ by the order of their sums, so hashes cannot be compared. The score of a token is the
error in units of what the blocks have changed, with an allowance for the rounding of the residual stream:
``|y - y'| / (|y' - x| + 8 u |x|)``, where ``x`` is the input, ``y`` the answer, ``y'`` the result here, ``u`` the unit
of rounding.

Rounding errors point anywhere, so they nearly cancel in the gain ``<y - y', y'> / <y', y'>`` of a wide vector. An
output that is scaled by a little shows there although its score is that of an honest 16-bit answer.

Shapes: ``B`` batch, ``S`` tokens, ``D`` width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_UNITS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 2.0**-7, "quantized": 2.0**-6}
"""Unit of rounding by the coarsest type that a tensor has passed through. ``int8`` is the codec; ``quantized`` are
weights, whose products differ from device to device."""


@dataclass(frozen=True)
class Threshold:
    """Largest figures of an honest answer."""

    median: float
    """Score of the median token."""
    worst: float
    """Score of the worst token."""
    gain: float
    """Gain of the median token of many."""


# Measured with SmolLM2-135M on spans of 1 to 15 blocks, with and without vector instructions, tokens together and one
# by one; largest honest scores (median token / worst token / gain):
# float32 9e-7 / 3e-6 / 3e-8, float16 1.4e-3 / 3e-3 / 7e-5, bfloat16 1.0e-2 / 2.3e-2 / 1e-4.
# A random mixture of 8 experts, medians for 1 and 8 blocks: float16 8e-4 and 2.1e-3, bfloat16 6e-3 and 2.0e-2; tokens
# above the limit of the worst for 8 blocks: 3 % and 5 %.
FORWARD = {
    "float32": Threshold(1e-4, 1e-3, 1e-4),
    "float16": Threshold(5e-3, 0.15, 2e-3),
    "bfloat16": Threshold(3e-2, 0.2, 3e-3),
    "int8": Threshold(6e-2, 0.5, 1e-2),
    # Products with weights in int8 and in float32 differ by 0.1 / 0.3 / 2e-3.
    "quantized": Threshold(0.2, 0.9, 2e-2),
}
"""By the coarsest type on the way, for one block."""
# The same for gradients: float32 3e-6 / 1.2e-5, float16 5e-3 / 1.1e-2, bfloat16 3.3e-2 / 8e-2.
BACKWARD = {
    "float32": Threshold(1e-3, 1e-2, 1e-3),
    "float16": Threshold(2e-2, 0.3, 5e-3),
    "bfloat16": Threshold(0.1, 0.5, 1e-2),
    "int8": Threshold(0.15, 0.8, 2e-2),
    "quantized": Threshold(0.3, 0.9, 5e-2),
}
"""The same for gradients."""
_TIED_SHARE = 0.02
"""Share of a mixture's tokens that may differ by more than the threshold: where two experts are nearly tied, rounding
decides which one a router takes. In 16 bits this share is added for each block."""
_MOST_TIED_SHARE = 0.4
_MIN_TOKENS = 16
"""Tokens without which nothing is said about a mixture in 16 bits: a few may all have gone to other experts."""
_BLOCKS_TO_DOUBLE = 8
"""Errors pile up from block to block: over so many blocks the median may be twice as large as over none."""
_MOST_MEDIAN = 0.5
"""An answer that has nothing to do with the right one has a score of about 1."""
_SIGMAS = 4.0
"""Standard deviations that the gain of a narrow or short input, and the number of tied tokens, may be off by."""


def is_conclusive(precision: str, num_tokens: int, *, is_mixture: bool) -> bool:
    """Returns whether so many tokens are enough to tell a lie from nearly tied experts."""
    return not is_mixture or precision == "float32" or num_tokens >= _MIN_TOKENS


def coarsest(names: Sequence[str]) -> str:
    """Returns the type with the largest unit of rounding; unknown names count as float32."""
    found = max(names, key=lambda name: _UNITS.get(name, 0.0))
    return found if found in _UNITS else "float32"


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison."""

    median: float
    worst: float
    gain: float
    threshold: Threshold

    @property
    def is_wrong(self) -> bool:
        """Whether no honest computation gives this answer."""
        limit = self.threshold
        # Written so that NaN is wrong too.
        return not (self.median <= limit.median and self.worst <= limit.worst and abs(self.gain) <= limit.gain)

    def __str__(self) -> str:
        limit = self.threshold
        return (
            f"error of the median token {self.median:.2g}, of the worst {self.worst:.2g}, gain {self.gain:.2g}; "
            f"honest servers stay below {limit.median:g}, {limit.worst:g} and {limit.gain:.2g}"
        )


def compare_outputs(
    hidden: Tensor,
    output: Tensor,
    expected: Tensor,
    precision: str,
    *,
    mask: Tensor | None = None,
    is_mixture: bool,
    num_blocks: int = 1,
) -> Verdict:
    """Compares blocks' output with the one computed here, all ``[B, S, D]``; padding tokens do not count."""
    x, y, here = (_real(tensor, mask) for tensor in (hidden, output, expected))
    change = (here - x).norm(dim=-1) + 8 * _UNITS[precision] * x.norm(dim=-1)
    excused = _excused(precision, is_mixture, num_blocks, len(x))
    return _verdict(y, here, change, _limits(FORWARD, precision, num_blocks), excused)


def compare_gradients(
    found: Tensor,
    expected: Tensor,
    precision: str,
    *,
    mask: Tensor | None = None,
    is_mixture: bool,
    num_blocks: int = 1,
) -> Verdict:
    """Compares a gradient of hidden states with the one computed here, both ``[B, S, D]``."""
    got, here = (_real(tensor, mask) for tensor in (found, expected))
    norms = here.norm(dim=-1)
    # Tokens that hardly matter to the loss have gradients of rounding errors.
    scale = norms + _UNITS[precision] * norms.max() if norms.numel() else norms
    excused = _excused(precision, is_mixture, num_blocks, len(got))
    return _verdict(got, here, scale, _limits(BACKWARD, precision, num_blocks), excused)


def compare_parameters(
    found: Sequence[Tensor], expected: Sequence[Tensor], precision: str, *, num_blocks: int = 1
) -> Verdict:
    """Compares gradients of adapter tensors or of a prefix; each tensor counts as one token."""
    pairs = [(got.detach().double(), here.detach().double()) for got, here in zip(found, expected, strict=True)]
    errors = torch.tensor([float((got - here).norm()) for got, here in pairs])
    norms = torch.tensor([float(here.norm()) for _, here in pairs])
    scores = errors / (norms + 8 * _UNITS[precision] * norms.max()).clamp_min(1e-30)
    return Verdict(float(scores.median()), float(scores.max()), 0.0, _limits(BACKWARD, precision, num_blocks))


def _limits(table: Mapping[str, Threshold], precision: str, num_blocks: int) -> Threshold:
    one, factor = table[precision], 1 + (num_blocks - 1) / _BLOCKS_TO_DOUBLE
    return Threshold(min(one.median * factor, _MOST_MEDIAN), one.worst, one.gain)


def _excused(precision: str, is_mixture: bool, num_blocks: int, num_tokens: int) -> int:
    """Returns how many tokens may be off by any amount."""
    if not is_mixture or num_tokens < 2:
        return 0
    if precision == "float32":
        return max(1, int(_TIED_SHARE * num_tokens))
    mean = min(_TIED_SHARE * (1 + num_blocks), _MOST_TIED_SHARE) * num_tokens
    return min(int(mean + _SIGMAS * math.sqrt(mean)), num_tokens // 2)


def _real(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the tokens that are not padding, ``[N, D]``."""
    flat = tensor.detach().to("cpu", torch.float64).flatten(0, 1)
    return flat if mask is None else flat[mask[:, mask.shape[1] - tensor.shape[1] :].flatten()]


def _verdict(found: Tensor, here: Tensor, scale: Tensor, threshold: Threshold, excused: int) -> Verdict:
    if not len(scale):
        return Verdict(0.0, 0.0, 0.0, threshold)
    errors = found - here
    scores = errors.norm(dim=-1) / scale.clamp_min(1e-30)
    worst = scores.sort().values[len(scores) - 1 - excused]
    gains = (errors * here).sum(dim=-1) / (here * here).sum(dim=-1).clamp_min(1e-30)
    # The mean of so many roundings is not yet zero.
    noise = _SIGMAS * threshold.median / math.sqrt(here.numel())
    limit = Threshold(threshold.median, threshold.worst, threshold.gain + noise)
    return Verdict(float(scores.median()), float(worst), float(gains.median()), limit)
