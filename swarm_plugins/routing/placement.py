"""Which blocks a new server takes: those the swarm lacks most.

After Borzunov et al. 2023, "Distributed inference and fine-tuning of large language models over the Internet",
section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm_plugins.errors import ConfigError

__all__ = ["block_coverage", "choose_span"]


def block_coverage(num_blocks: int, servers: Sequence[tuple[int, int, float]]) -> list[float]:
    """Returns the throughput announced for each block.

    Args:
        num_blocks: Blocks of the model.
        servers: ``(start, end, throughput)`` of each server.
    """
    coverage = [0.0] * num_blocks
    for start, end, throughput in servers:
        for block in range(max(start, 0), min(end, num_blocks)):
            coverage[block] += throughput
    return coverage


def choose_span(coverage: Sequence[float], num_blocks: int) -> range:
    """Returns the consecutive blocks that are served worst.

    A chain is as fast as its worst block, so the span is taken whose sorted throughputs are lexicographically least:
    its worst block is the worst of all, and so on; the first of equals.

    Args:
        coverage: Throughput of each block of the model.
        num_blocks: Blocks to take.

    Raises:
        ConfigError: If the model does not have that many blocks.
    """
    if not 1 <= num_blocks <= len(coverage):
        raise ConfigError(f"cannot serve {num_blocks} blocks: the model has {len(coverage)}, 1 to all of them can be")
    starts = range(len(coverage) - num_blocks + 1)
    start = min(starts, key=lambda first: (sorted(coverage[first : first + num_blocks]), first))
    return range(start, start + num_blocks)
