"""How much memory the ways to run a model get."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from swarm_plugins.errors import ConfigError

if TYPE_CHECKING:
    from swarm_plugins.offload.plan.sizes import ModelSizes

NUM_READERS = 2
# Thread stacks and fragments of the heap.
_SPARE_BYTES = 64 << 20


class Budgets(NamedTuple):
    """Bytes of a model with a share of its experts in memory."""

    smallest: int
    """Least that experts get: one for each reader, and one to compute with."""
    fast: int
    """Of the experts in memory."""
    model: int
    """Of these and of all other weights."""
    limit: int
    """Of a process, without its libraries."""


def budgets_of(sizes: ModelSizes, share: float) -> Budgets:
    """Returns what a model gets with a share of its experts in memory."""
    smallest = _padded((NUM_READERS + 1) * sizes.largest_expert_bytes)
    fast = max(smallest, _padded(int(share * sizes.expert_bytes)))
    model = sizes.other_bytes + fast
    limit = int(1.1 * model) + sizes.cache_bytes + sizes.activation_bytes + _SPARE_BYTES
    return Budgets(smallest, fast, model, limit)


def parse_share(text: str) -> float:
    """Parses a share such as ``25%``; raises ConfigError unless it is above 0 % and at most 100 %."""
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else -1.0
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ConfigError(f"invalid --fast {text!r}: expected more than 0% and at most 100%, such as 25%")
    return share


def _padded(num_bytes: int) -> int:
    # Expert buffers are padded to whole cache lines and pages.
    return int(num_bytes * 1.002)
