"""How far an answer may be from what blocks compute here: scores, and thresholds measured on honest pairs.

Two honest computations differ by the order of their sums, so hashes cannot be compared. The score of a token is the
error in units of what the blocks have changed, with an allowance for the rounding of the residual stream:
``|y - y'| / (|y' - x| + 8 u |x|)``, where ``x`` is the input, ``y`` the answer, ``y'`` the result here, ``u`` the unit
of rounding.

Rounding errors point anywhere, so they nearly cancel in the gain ``<y - y', y'> / <y', y'>`` of a wide vector. An
output that is scaled by a little shows there although its score is that of an honest 16-bit answer.

Where the blocks magnify a rounding (two experts nearly tied, a gradient that cancels to almost nothing), an honest
answer may be off by any amount. So before an answer is called wrong, the blocks run again here from inputs that are off
by a rounding, and what that changes is forgiven.

Shapes: ``B`` batch, ``S`` tokens, ``N`` tokens that are not padding, ``D`` width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_UNITS = {
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "kv-int8": 1.5 * 2.0**-8,
    "rotated8": 2.0**-7,
    "quantized": 2.0**-6,
}
"""Unit of rounding by the coarsest type that a tensor has passed through. ``quantized`` are weights,
whose products differ from device to device; ``kv-int8`` are sessions that keep keys and values in 8 bits."""


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
    # Keys and values in 8 bits against wide ones, as where one forward repeats a session: 1.8e-2 / 4.4e-2 / 8e-4.
    "kv-int8": Threshold(6e-2, 0.3, 5e-3),
    "rotated8": Threshold(6e-2, 0.5, 1e-2),
    # Products with weights in int8 and in float32 differ by 0.1 / 0.3 / 2e-3.
    "quantized": Threshold(0.2, 0.9, 2e-2),
}
"""By the coarsest type on the way, for one block."""
# The same for gradients: float32 3e-6 / 1.2e-5, float16 5e-3 / 1.1e-2, bfloat16 3.3e-2 / 8e-2.
BACKWARD = {
    "float32": Threshold(1e-3, 1e-2, 1e-3),
    "float16": Threshold(2e-2, 0.3, 5e-3),
    "bfloat16": Threshold(0.1, 0.5, 1e-2),
    "rotated8": Threshold(0.15, 0.8, 2e-2),
    "quantized": Threshold(0.3, 0.9, 5e-2),
}
"""The same for gradients."""
_ROUGH = Threshold(0.5, 0.75, 0.25)
"""For a mixture's tokens behind ones that two runs have cached: rounding sent some of those to other experts, and an
honest median reached 0.97 of the strict limit in bfloat16. Unrelated answers score about 1."""
_TIED_SHARE = 0.02
"""Share of a mixture's tokens that may differ by more than the threshold: where two experts are nearly tied, rounding
decides which one a router takes. In 16 bits this share is added for each block."""
_MOST_TIED_SHARE = 0.4
_MIN_TOKENS = {"float32": 2}
MIN_ROUGH_TOKENS = 16
"""Tokens without which nothing is said about a mixture: a few may all have gone to other experts."""
_BLOCKS_TO_DOUBLE = 8
"""Errors pile up from block to block: over so many blocks the median may be twice as large as over none."""
_MOST_MEDIAN = 0.5
"""An answer that has nothing to do with the right one has a score of about 1."""
_NUDGES_FORGIVEN = 4.0
"""An honest answer may be off by so many times what a rounding of the inputs changes here."""
_NO_GRADIENT = 2.0**-14
"""Gradients of adapter tensors that are smaller than this share of the largest one consist of rounding errors."""
_SIGMAS = 4.0
"""Standard deviations that the gain of a narrow or short input, and the number of tied tokens, may be off by."""


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


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Compares answers with what some blocks compute here; None where there are too few tokens to tell.

    ``nudged`` are results for inputs that are off by a rounding.
    """

    precision: str
    """The coarsest type on the way."""
    is_mixture: bool
    num_blocks: int = 1
    """Blocks whose errors have piled up in the answer."""
    is_rough: bool = False
    """Whether to detect only answers unrelated to the right ones; see `_ROUGH`."""
    mask: Tensor | None = None
    """``[B, L]``, False for padding, which does not count; the last ``S`` columns belong to what is compared."""

    def outputs(
        self, hidden: Tensor, output: Tensor, expected: Tensor, nudged: Sequence[Tensor] = ()
    ) -> Verdict | None:
        """Compares the blocks' output for an input, all ``[B, S, D]``."""
        x, here = self._real(hidden), self._real(expected)
        change = (here - x).norm(dim=-1) + 8 * _UNITS[self.precision] * x.norm(dim=-1)
        return self._verdict(FORWARD, output, here, change, nudged)

    def gradients(self, found: Tensor, expected: Tensor, nudged: Sequence[Tensor] = ()) -> Verdict | None:
        """Compares a gradient of hidden states, ``[B, S, D]``."""
        here = self._real(expected)
        norms = here.norm(dim=-1)
        # Tokens that hardly matter to the loss have gradients of rounding errors.
        scale = norms + _UNITS[self.precision] * norms.max() if norms.numel() else norms
        return self._verdict(BACKWARD, found, here, scale, nudged)

    def parameters(
        self,
        found: Sequence[Tensor],
        expected: Sequence[Tensor],
        nudged: Sequence[Sequence[Tensor]] = (),
        *,
        hidden: Tensor,
    ) -> Verdict | None:
        """Compares gradients of adapter tensors or of a prefix; each tensor counts as one token.

        ``hidden`` is the gradient here of the blocks' input, ``[B, S, D]``.
        """
        num_tokens = len(self._real(hidden))
        if num_tokens < self._min_tokens:
            return None
        norms = _norms(expected)
        floor = 8 * _UNITS[self.precision] * norms.max()
        if self.precision == "float32":
            floor = _NO_GRADIENT * torch.maximum(norms.max(), hidden.detach().double().cpu().norm())
        errors = _norms([got.double() - here.double() for got, here in zip(found, expected, strict=True)])
        spread = [_norms([a.double() - b.double() for a, b in zip(one, expected, strict=True)]) for one in nudged]
        scores = _forgiven(errors, spread) / (norms + floor).clamp_min(1e-30)
        limits = _limits(BACKWARD, self.precision, self.num_blocks)
        # Tokens that have gone to other experts are part of these sums.
        tied = 2 * math.sqrt(self._num_excused(num_tokens) / num_tokens)
        median, worst = (max(limit, min(tied, _MOST_MEDIAN)) for limit in (limits.median, limits.worst))
        return Verdict(float(scores.median()), float(scores.max()), 0.0, Threshold(median, worst, limits.gain))

    def can_tell(self, output: Tensor) -> bool:
        """Returns whether an output, ``[B, S, D]``, has enough tokens to be compared."""
        rows, tokens = output.shape[:2]
        mask = self.mask
        count = rows * tokens if mask is None else int(mask[:, mask.shape[1] - tokens :].sum())
        return count >= self._min_tokens

    @property
    def _min_tokens(self) -> int:
        return _MIN_TOKENS.get(self.precision, MIN_ROUGH_TOKENS) if self.is_mixture else 1

    def _real(self, tensor: Tensor) -> Tensor:
        """Returns the tokens that are not padding, ``[N, D]``."""
        flat, mask = tensor.detach().to("cpu", torch.float64).flatten(0, 1), self.mask
        return flat if mask is None else flat[mask[:, mask.shape[1] - tensor.shape[1] :].flatten()]

    def _num_excused(self, num_tokens: int) -> int:
        """Returns how many tokens may be off by any amount."""
        if not self.is_mixture:
            return 0
        if self.precision == "float32":
            return max(1, int(_TIED_SHARE * num_tokens))
        mean = min(_TIED_SHARE * (1 + self.num_blocks), _MOST_TIED_SHARE) * num_tokens
        return min(int(mean + _SIGMAS * math.sqrt(mean)), num_tokens // 2)

    def _verdict(
        self, table: Mapping[str, Threshold], found: Tensor, here: Tensor, scale: Tensor, nudged: Sequence[Tensor]
    ) -> Verdict | None:
        if len(here) < self._min_tokens:
            return None
        errors, moved = self._real(found) - here, [self._real(one) - here for one in nudged]
        spread = [one.norm(dim=-1) for one in moved]
        scores = _forgiven(errors.norm(dim=-1), spread) / scale.clamp_min(1e-30)
        worst = scores.sort().values[len(scores) - 1 - self._num_excused(len(here))]
        limits = _limits(table, self.precision, self.num_blocks)
        # The mean of so many roundings is not yet zero.
        noise = _SIGMAS * limits.median / math.sqrt(here.numel())
        forgiven = _NUDGES_FORGIVEN * max((abs(_gain(one, here)) for one in moved), default=0.0)
        limits = _ROUGH if self.is_rough else replace(limits, gain=limits.gain + noise + forgiven)
        return Verdict(float(scores.median()), float(worst), _gain(errors, here), limits)


def _gain(errors: Tensor, here: Tensor) -> float:
    return float(((errors * here).sum(dim=-1) / (here * here).sum(dim=-1).clamp_min(1e-30)).median())


def _forgiven(errors: Tensor, spread: Sequence[Tensor]) -> Tensor:
    """Returns errors without what a rounding of the inputs explains; NaN stays."""
    return (errors - _NUDGES_FORGIVEN * torch.stack(list(spread)).amax(dim=0)).clamp_min(0) if spread else errors


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([one.detach().double().cpu().norm() for one in tensors])


def _limits(table: Mapping[str, Threshold], precision: str, num_blocks: int) -> Threshold:
    one, factor = table[precision], 1 + (num_blocks - 1) / _BLOCKS_TO_DOUBLE
    return replace(one, median=min(one.median * factor, _MOST_MEDIAN))
