"""Forecasts the speed of a model with offloaded experts: arithmetic on sizes and measured speeds.

A token uses ``experts_per_token`` experts of each layer. Experts in fast memory (hits) cost their products; the others
are read first, and the token waits, except for the part that is read ahead while earlier layers compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm_plugins.offload.plan.sizes import ModelSizes

MEASURED_HITS: Sequence[tuple[float, float]] = ((0.0, 0.0), (0.25, 0.38), (0.5, 0.66), (0.75, 0.87), (1.0, 1.0))
"""Share of a layer's experts in memory, and share of requests that find theirs there: two of eight experts picked,
decoding answers to real text. With two of four picked, no more were found than an even use of the experts gives (.24,
.52 and .74), which is therefore assumed for fewer than eight."""
_FEWEST_WITH_HABITS = 8
# Share of the next layers' experts that their routers name early, and of the time that could at best be hidden.
_RECALL = 0.85
_HIDDEN = 0.7
# Of a token's time beyond products and reads: routing, bookkeeping, and memory and cores shared by computing and
# reading.
_OVERHEAD = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Measured speeds of a machine."""

    disk_bytes_per_s: float
    """Of the disk itself: expert-sized pieces at random places, past the page cache, two at a time."""
    expert_bytes_per_s: float
    """Of experts read one after the other while a layer waits for them."""
    step_s: float
    """The products of one token with every expert in fast memory."""
    link_bytes_per_s: float | None = None
    """From pinned RAM to the device; None where there is one memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Expected decoding of one sequence, once the cache is warm."""

    fast_share: float
    """Share of all expert bytes that fits in fast memory."""
    ram_share: float
    """The same for pinned RAM in addition."""
    hit_ratio: float
    """Share of requests that find their expert in fast memory, see `hit_ratio`."""
    hit_ratio_even: float
    """The same if every expert were equally likely at any time (independent references): a lower bound."""
    read_bytes: float
    """From disk, for a token."""
    copy_bytes: float
    """From RAM to the device, for a token."""
    resident_tokens_per_s: float
    """With every expert in fast memory."""
    tokens_per_s: float
    tokens_per_s_even: float
    """With ``hit_ratio_even``."""


def hit_ratio(share: float, num_experts: int = _FEWEST_WITH_HABITS) -> float:
    """Returns the share of requests that a cache of some of the experts answers.

    Linear between the measured points; an even, independent use of the experts would give ``share`` itself (every
    cache of ``C`` of ``E`` equally likely experts hits with ``C / E``).
    """
    if num_experts < _FEWEST_WITH_HABITS:
        return min(1.0, max(0.0, share))
    for (left, low), (right, high) in pairwise(MEASURED_HITS):
        if share < right:
            return low + (high - low) * (max(share, 0.0) - left) / (right - left)
    return 1.0


def forecast(
    sizes: ModelSizes,
    speeds: Speeds,
    *,
    fast_bytes: int,
    ram_bytes: int = 0,
) -> Forecast:
    """Forecasts decoding of a model on a machine, with so many bytes for experts on the device and in pinned RAM.

    Pinned RAM counts only where there is a link between two memories.
    """
    fast = min(1.0, fast_bytes / sizes.expert_bytes)
    ram = min(1.0 - fast, ram_bytes / sizes.expert_bytes) if speeds.link_bytes_per_s else 0.0

    def missed(hits: float, hits_below: float) -> tuple[float, float]:
        """Bytes copied and bytes read, for a token."""
        copied = sizes.token_bytes * (1 - hits) if speeds.link_bytes_per_s else 0.0
        return copied, sizes.token_stored_bytes * (1 - hits_below)

    def seconds(copied: float, read: float) -> float:
        moving = read / speeds.expert_bytes_per_s
        if speeds.link_bytes_per_s:
            # Copies follow reads: the slower of the two sets the pace.
            moving = max(moving, copied / speeds.link_bytes_per_s)
        hidden = _HIDDEN * min(_RECALL * moving, speeds.step_s)
        return _OVERHEAD * (speeds.step_s + moving - hidden)

    experts = min(layer.num_experts for layer in sizes.layers)
    likely = missed(hit_ratio(fast, experts), hit_ratio(fast + ram, experts))
    even = missed(fast, fast + ram)
    return Forecast(
        fast_share=fast,
        ram_share=ram,
        hit_ratio=hit_ratio(fast, experts),
        hit_ratio_even=fast,
        read_bytes=likely[1],
        copy_bytes=likely[0],
        resident_tokens_per_s=1 / (_OVERHEAD * speeds.step_s),
        tokens_per_s=1 / seconds(*likely),
        tokens_per_s_even=1 / seconds(*even),
    )
